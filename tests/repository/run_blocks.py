"""Run Python blocks of a page, as a reader who pastes them would. A launcher starts this file.

    torchrun --nproc-per-node 2 run_blocks.py page.json

page.json holds `setup`, code that stands for the reader's own model and data, and `sections`: lists
of [name, code]. The blocks of a section share their names; each section starts from `setup`. Only
process 0 prints.
"""

import contextlib
import json
import os
import sys
import traceback
from pathlib import Path


def is_first() -> bool:
    """Whether this is process 0, under torchrun as under mpirun."""
    return "0" == os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0"))


def run(page: dict) -> None:
    """Execute every block; the first that fails ends the process, with the block's name."""
    for section in page["sections"]:
        names = {"__name__": "page"}
        exec(page["setup"], names)
        for name, code in section:
            try:
                exec(compile(code, name, "exec"), names)
            except Exception:
                traceback.print_exc()
                raise SystemExit(f"the block at {name} failed") from None


def main() -> None:
    page = json.loads(Path(sys.argv[1]).read_text())
    with open(os.devnull, "w") as nothing:
        with contextlib.nullcontext() if is_first() else contextlib.redirect_stdout(nothing):
            run(page)


if __name__ == "__main__":
    main()
