#!/bin/sh
# Are the CUDA kernels right on this machine's GPUs, and how fast are they? Takes less than 5 minutes, prints a table last, and exits
# with 1 if a result is wrong, with 2 if something is missing. Uses $PYTHON, or else .venv/bin/python, which `make setup` makes.
cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-.venv/bin/python}
if ! command -v "$python" >/dev/null; then
    echo "check_gpu: there is no $python. Run 'make setup', or give a Python 3.11 or newer: PYTHON=python3 scripts/check_gpu.sh" >&2
    exit 2
fi
if ! "$python" -c "import sys, importlib.util as i; sys.exit(not (i.find_spec('torch') and i.find_spec('numpy')))"; then
    echo "check_gpu: $python has no PyTorch or no NumPy. Run 'make setup', or '$python -m pip install -e .[cuda]'" >&2
    exit 2
fi
PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" exec "$python" scripts/check_gpu.py
