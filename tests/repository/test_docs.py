"""README and docs/ tell the truth: commands, files, tests and links exist, and the site builds."""

import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from helpers.pages import CLAIMS, PAGES, README, ROOT, blocks, prose

REPRODUCING = ROOT / "docs" / "reproducing.md"


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


def targets_of(words: list[str]) -> list[str]:
    """The targets of a make command; figure-N stands for any figure."""
    command, *rest = without_variables(words)
    named = [word for word in rest if "=" not in word] if command == "make" else []
    return [name.replace("-N", "-4") for name in named]


def complaint(words: list[str]) -> str | None:
    """Why a command cannot work, or None. Nothing is run."""
    command, *rest = without_variables(words)
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
    return None if command in ("make", "git", "cd") else f"no test knows the command {command}"


def test_every_command_of_a_page_exists():
    wrong = [(place, complaint(words)) for path in PAGES for place, words in commands(path)]
    assert [(place, why) for place, why in wrong if why] == []


def test_every_make_target_that_a_page_names_exists():
    named = {name for path in PAGES for _, words in commands(path) for name in targets_of(words)}
    assert len(named) > 20
    done = subprocess.run(
        ["make", "--dry-run", *sorted(named)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_every_file_that_a_page_names_exists():
    """Inline code such as `scripts/check_gpu.sh`; names in capitals and stars stand for others."""
    top = "src|conf|experiments|notebooks|scripts|examples|results|tests|docs"
    named = [
        (path.name, name)
        for path in PAGES
        for name in re.findall(rf"`((?:{top})/[^`\s:]*)`", prose(path))
        if not re.search(r"[A-Z*<]{2}|\*|live|runs/", name)
    ]
    assert [(page, name) for page, name in named if not (ROOT / name).exists()] == []


def test_every_optimizer_that_the_experiments_page_offers_is_in_conf():
    table = re.search(r"^\| `optimizer=` .*?\n\n", prose(REPRODUCING), re.M | re.S)[0]
    offered = re.findall(r"`([a-z]\w+)`", table)
    assert len(offered) > 10
    configured = ROOT / "conf" / "optimizer"
    assert [name for name in offered if not (configured / f"{name}.yaml").exists()] == []


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


def lines_of_pages() -> list[tuple[str, str]]:
    """(page, line) of all pages, without the claims, which are written by a program."""
    return [
        (path.name, line)
        for path in PAGES
        for line in CLAIMS.sub("", path.read_text()).splitlines()
    ]


def test_no_line_of_prose_is_wider_than_100_columns():
    lines = lines_of_pages()
    assert [wide for wide in lines if len(wide[1]) > 100 and not wide[1].startswith("|")] == []


def test_no_table_cell_holds_a_paragraph():
    rows = [(page, line) for page, line in lines_of_pages() if line.startswith("|")]
    assert [(page, c) for page, row in rows for c in row.split("|") if len(c) > 140] == []


def anchor(heading: str) -> str:
    """The name under which GitHub and the site link to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def is_broken(path: Path, target: str) -> bool:
    """Whether a link of a page leads to no file, or to no heading of a page."""
    if re.match(r"https?:", target):
        return False
    name, _, fragment = target.partition("#")
    file = (path.parent / name).resolve() if name else path
    if not file.exists():
        return True
    headings = re.findall(r"^#+ (.+)$", prose(file), re.M) if file.suffix == ".md" else []
    return bool(fragment) and fragment not in map(anchor, headings)


def test_every_internal_link_leads_somewhere():
    links = [
        (path, target) for path in PAGES for target in re.findall(r"\]\(([^)\s]+)\)", prose(path))
    ]
    assert len(links) > 50
    assert [(path.name, target) for path, target in links if is_broken(path, target)] == []


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


def test_citation_and_changelog_know_the_version_of_the_package():
    yaml = pytest.importorskip("yaml")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
    assert len(citation["references"]) == 3
    assert f"## [{project['version']}]" in (ROOT / "CHANGELOG.md").read_text()


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
