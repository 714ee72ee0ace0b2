"""Install DeepSpeed into a folder of its own, which this project does not depend on.

    python scripts/install_deepspeed.py [VERSION]       prints the folder; 0.19.8 unless given

The folder is .deepspeed/VERSION, or $ONEBIT_DEEPSPEED/VERSION. Without dependencies but the few
pure ones that it imports, so that torch stays as it is; what is there already is not installed
again. Needs pip and a package index.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

TESTED = "0.19.8"  # the engine of the tests
LAST_WITH_THE_OLD = "0.19.6"  # the last with OneBitAdam, ZeroOneAdam and OneBitLamb
NEEDED = ("hjson", "py-cpuinfo", "msgpack", "einops", "ninja", "psutil")
NEEDED += ("pydantic", "pydantic-core", "annotated-types", "typing-inspection")


def folder_of(version: str = TESTED) -> Path:
    root = os.environ.get("ONEBIT_DEEPSPEED") or Path(__file__).resolve().parents[1] / ".deepspeed"
    return Path(root, version)


def install(version: str = TESTED, timeout: float = 300) -> Path:
    """The folder with this version. RuntimeError, with pip's last words, if it cannot be had."""
    folder = folder_of(version)
    if (folder / "deepspeed").is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            _pip_install(version, Path(temporary, version), timeout)
            Path(temporary, version).rename(folder)
    except OSError as error:
        if not (folder / "deepspeed").is_dir():  # else another process was faster
            raise RuntimeError(f"{folder} cannot be written: {error}") from error
    return folder


def _pip_install(version: str, target: Path, timeout: float) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target]
    try:
        subprocess.run(
            [*command, f"deepspeed=={version}", *NEEDED],
            check=True,
            capture_output=True,
            text=True,
            timeout=timeout,
            env=os.environ | {"DS_ACCELERATOR": "cpu"},
        )
    except subprocess.CalledProcessError as error:
        last = "\n".join(error.stderr.strip().splitlines()[-3:])
        raise RuntimeError(f"pip could not install deepspeed=={version}: {last}") from error
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(
            f"pip had not installed deepspeed=={version} after {timeout} s"
        ) from error


if __name__ == "__main__":
    print(install(*sys.argv[1:2]))
