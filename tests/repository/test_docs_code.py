"""The code of README.md and docs/using.md runs as it is printed, in two processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.pages import README, ROOT, USING, Block, blocks

pytestmark = pytest.mark.timeout(300)  # a busy machine takes minutes to start processes

# What stands for the reader's own code in the blocks of a page.
SETUP = """
import os, tempfile
import torch
from torch import nn
import onebit

torch.compile = lambda function: function  # compiling takes longer than all other blocks together
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
rank = int(os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", 0)))
generator = torch.Generator().manual_seed(rank)
data = [torch.randn(8, 16, generator=generator) for _ in range(4)]
batch = data[0]

def loss(model, batch):
    return (model(batch) - batch.sum(1, keepdim=True)).square().mean()
"""
GLOO = """
if not torch.distributed.is_initialized():
    torch.distributed.init_process_group("gloo")
folder, checkpoint = os.environ["FOLDER"], os.environ["FOLDER"] + "/checkpoint.pt"
optimizer = onebit.OneBitAdam(model.parameters(), lr=1e-3, warmup=2000)
"""
README_MODEL = """
model = nn.Linear(1024, 1024)
data = [torch.randn(8, 1024, generator=generator) for _ in range(22)]
"""


def python_sections(path: Path) -> list[list[Block]]:
    """The Python blocks of a page, those below one heading together."""
    sections: dict[str, list[Block]] = {}
    for block in blocks(path):
        if block.language == "python":
            sections.setdefault(block.section, []).append(block)
    return list(sections.values())


def run_blocks(folder: Path, launcher: list[str], setup: str, sections: list[list[Block]]) -> str:
    """Run blocks in two processes, and return what process 0 prints."""
    page = folder / "page.json"
    listed = [[[block.place, block.text] for block in section] for section in sections]
    page.write_text(json.dumps({"setup": setup, "sections": listed}))
    here = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "FOLDER": str(folder)}
    started = subprocess.Popen(
        [*launcher, str(ROOT / "tests" / "repository" / "run_blocks.py"), str(page)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | here,
    )
    try:
        printed, errors = started.communicate(timeout=250)
    except subprocess.TimeoutExpired:
        started.terminate()  # the launcher then ends the processes that it has started
        started.wait(30)
        raise
    assert started.returncode == 0, errors[-4000:]
    return printed


def torchrun() -> list[str]:
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--standalone",
    ]


def uses_mpi(section: list[Block]) -> bool:
    return any("comm.Mpi(" in block.text for block in section)


def test_readmes_loop_trains_on_two_processes_and_prints_what_readme_shows(tmp_path):
    """The diff is applied; only the length of the warm-up is another one, to save time."""
    diff, question, answer = (
        next(block for block in blocks(README) if block.language == language)
        for language in ("diff", "python", "text")
    )
    kept = [line[1:] for line in diff.text.splitlines() if not line.startswith("-")]
    loop = "\n".join(kept).replace("warmup=2000", "warmup=20")
    assert "warmup=20)" in loop
    section = [Block(diff.place, "", "python", loop), question]
    printed = run_blocks(tmp_path, torchrun(), SETUP + README_MODEL, [section])
    assert printed.strip() == answer.text.strip()


def test_every_python_block_of_using_runs_on_two_processes(tmp_path):
    sections = [section for section in python_sections(USING) if not uses_mpi(section)]
    assert len(sections) > 10
    run_blocks(tmp_path, torchrun(), SETUP + GLOO, sections)


def test_every_mpi_block_of_using_runs_under_mpirun(tmp_path):
    pytest.importorskip("mpi4py")
    launcher = Path(sys.executable).with_name("mpirun")
    if not launcher.exists():
        pytest.skip("this environment has no mpirun beside its Python")
    options = ["--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable]
    sections = [section for section in python_sections(USING) if uses_mpi(section)]
    assert sections
    run_blocks(tmp_path, [str(launcher), *options], SETUP, sections)
