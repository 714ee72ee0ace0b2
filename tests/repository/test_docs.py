"""README and docs/ tell the truth: code blocks run, commands and links exist, the site builds."""

import functools
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
USING = ROOT / "docs" / "using.md"
TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES = TOP + sorted((ROOT / "docs").rglob("*.md"))
CLAIMS = re.compile(r"<!-- claims: .*<!-- end of claims -->\n", re.S)

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


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        place: file and line, as an error names it.
        section: the heading above it.
    """

    place: str
    section: str
    language: str
    text: str


def blocks(path: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found, section, language, lines, start = [], "", None, [], 0
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if language is None and line.startswith("#"):
            section = line
        elif language is None and line.startswith("```"):
            language, lines, start = line[3:].strip(), [], number
        elif line.startswith("```"):
            place = f"{path.name}:{start}"
            found.append(Block(place, section, language, "\n".join(lines)))
            language = None
        elif language is not None:
            lines.append(line)
    return found


def prose(path: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S)


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
    done = subprocess.run(
        [*launcher, str(ROOT / "tests" / "repository" / "run_blocks.py"), str(page)],
        capture_output=True,
        text=True,
        timeout=110,
        env=os.environ
        | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "FOLDER": str(folder)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


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


# ---- commands


def commands(path: Path) -> list[tuple[str, list[str]]]:
    """(place, words) of every command in the shell blocks of a page, and of `make ...` in text."""
    found = [
        (block.place, line)
        for block in blocks(path)
        if block.language == "sh"
        for line in block.text.replace("\\\n", " ").splitlines()
        if line.split("#")[0].strip()
    ]
    found += [(path.name, command) for command in re.findall(r"`(make [^`]+)`", prose(path))]
    return [(place, shlex.split(line, comments=True)) for place, line in found]


def without_variables(words: list[str]) -> list[str]:
    """A command without the NAME=VALUE before it."""
    return words[1:] if words and re.fullmatch(r"[A-Z_]+=.*", words[0]) else words


@functools.cache
def make_knows(target: str) -> bool:
    done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True)
    return done.returncode == 0


def complaint(words: list[str]) -> str | None:
    """Why a command cannot work, or None. Nothing is run but make --dry-run."""
    command, *rest = without_variables(words)
    if command == "make":
        targets = [word for word in rest if "=" not in word]
        unknown = [name for name in targets if not make_knows(name.replace("-N", "-4"))]
        return f"make has no target {unknown[0]}" if unknown else None
    if "-m" in rest and command in ("python", "mpirun"):
        module = rest[rest.index("-m") + 1]
        return None if importlib.util.find_spec(module) else f"there is no module {module}"
    if command in ("pip", ".venv/bin/python"):
        extras = re.findall(r"\.\[(.+?)\]", " ".join(rest))
        known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        missing = set(",".join(extras).split(",")) - {""} - known["optional-dependencies"].keys()
        return f"there is no extra {missing}" if missing else None
    if command in ("torchrun", "mpirun", "python", "sbatch") or "/" in command:
        files = [word for word in [command, *rest] if re.search(r"\.(py|sh|sbatch)$", word)]
        missing = [name for name in files if name != "script.py" and not (ROOT / name).exists()]
        return f"there is no file {missing[0]}" if missing else None
    return None if command in ("git", "cd") else f"no test knows the command {command}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_command_of_a_page_exists(path):
    wrong = [(place, complaint(words)) for place, words in commands(path)]
    assert [(place, why) for place, why in wrong if why] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_file_that_a_page_names_exists(path):
    """Inline code such as `scripts/check_gpu.sh`; names in capitals and stars stand for others."""
    top = "src|conf|experiments|notebooks|scripts|examples|results|tests|docs"
    named = re.findall(rf"`((?:{top})/[^`\s:]*)`", prose(path))
    concrete = [name for name in named if not re.search(r"[A-Z*<]{2}|\*|live|runs/", name)]
    assert [name for name in concrete if not (ROOT / name).exists()] == []


def test_every_test_that_a_page_names_exists():
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = {name for path in PAGES for name in re.findall(r"`(test_\w+)`", path.read_text())}
    assert len(named) > 40
    assert sorted(name for name in named if f"def {name}(" not in tests) == []


# ---- the form of pages


def test_readme_is_at_most_180_lines_and_1800_words_beside_the_claims():
    outside, found = CLAIMS.subn("", README.read_text())
    assert found == 1
    assert len(outside.splitlines()) <= 180 and len(outside.split()) <= 1800


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_no_line_of_prose_is_wider_than_100_columns(path):
    lines = CLAIMS.sub("", path.read_text()).splitlines()
    wide = [line for line in lines if len(line) > 100 and not line.startswith("|")]
    assert wide == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_no_table_cell_holds_a_paragraph(path):
    rows = [line for line in CLAIMS.sub("", path.read_text()).splitlines() if line.startswith("|")]
    assert [cell for row in rows for cell in row.split("|") if len(cell) > 140] == []


def anchor(heading: str) -> str:
    """The name under which GitHub and the site link to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_internal_link_leads_somewhere(path):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if re.match(r"https?:", target):
            continue
        name, _, fragment = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        if not file.exists():
            broken.append(target)
        elif fragment and file.suffix == ".md":
            headings = re.findall(r"^#+ (.+)$", prose(file), re.M)
            if fragment not in map(anchor, headings):
                broken.append(target)
    assert broken == []


SPEED_TABLE = {  # the experiments of docs/speed.md with a warm-up -> baseline, compressed optimizer
    "figure_04": ("adam", "onebit_adam"),
    "zero_one_adam_gpt2": ("adam", "onebit_adam"),
    "lamb": ("lamb", "onebit_lamb"),
    "figure_08": ("adam", "onebit_adam"),
    "squad": ("adam", "onebit_adam"),
    "glue_sst2": ("adam", "onebit_adam"),
    "figure_06": ("adam", "onebit_adam"),
}


def test_headline_numbers_are_those_of_the_committed_runs():
    """31.7: the median over experiments of a compressed step; 5.6 and 4.4: over the whole run."""
    pd = pytest.importorskip("pandas")
    steps, totals = {}, {}
    for experiment, (exact, compressed) in SPEED_TABLE.items():
        folder = ROOT / "results" / "runs" / experiment / "laptop"
        sent = [
            pd.read_csv(folder / method / "seed-1" / "curve.csv").set_index("step").bytes_sent
            for method in (exact, compressed)
        ]
        steps[experiment] = sent[0].diff().iloc[-1] / sent[1].diff().iloc[-1]
        totals[experiment] = sent[0].iloc[-1] / sent[1].iloc[-1]
    assert round(pd.Series(steps).median(), 1) == 31.7
    assert round(totals["figure_04"], 1) == 5.6 and round(totals["figure_08"], 1) == 4.4
    speed = (ROOT / "docs" / "speed.md").read_text()
    for experiment in SPEED_TABLE:
        row = next(line for line in speed.splitlines() if f"`{experiment}` |" in line)
        assert f"| {steps[experiment]:.1f} x |" in row and f"| {totals[experiment]:.1f} x |" in row


@pytest.mark.timeout(300)
def test_the_site_builds_without_a_warning(tmp_path):
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("material") is None:
        pytest.skip("needs mkdocs-material and mkdocstrings: pip install '.[docs]'")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "OneBitAdam" in (tmp_path / "api" / "optimizers" / "index.html").read_text()
