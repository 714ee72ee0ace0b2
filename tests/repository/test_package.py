"""The wheel is complete: what is installed from it trains, without the repository."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# As after `pip install .` without the extra `fast`: plain torch, nothing to compile.
TRAINING = """
import sys
sys.modules["numba"] = None
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def train(rank, rendezvous):
    import onebit

    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = onebit.OneBitAdam(model.parameters(), lr=0.05, warmup=10)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(40):
        x = torch.randn(16, 8, generator=generator)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert optimizer.phase == "compressed" and losses[-1] < losses[0] / 2, losses
    if rank == 0:
        print(onebit.__file__)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(train, ("file://" + sys.argv[1],), 2)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    before = set(ROOT.iterdir())
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(ROOT.iterdir()) == before, "the build left something in the repository"
    [built] = folder.glob("*.whl")
    return built


def test_the_wheel_holds_the_cuda_source_and_the_marker_of_its_types(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {f"onebit/{p.relative_to(ROOT / 'src/onebit')}" for p in ROOT.glob("src/**/*.py")}
    assert sources | {"onebit/kernels/onebit.cu", "onebit/py.typed"} <= names


def test_a_program_trains_over_two_processes_from_the_installed_wheel(wheel, tmp_path):
    site, script = tmp_path / "site", tmp_path / "train.py"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", site, wheel], check=True)
    script.write_text(TRAINING)
    done = subprocess.run(
        [sys.executable, script, tmp_path / "rendezvous"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(site / "onebit" / "__init__.py")
