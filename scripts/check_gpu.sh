#!/bin/sh
# Checks that the CUDA kernels are right on this machine's GPUs, and measures how fast they are. It
# takes less than 5 minutes and prints a table at the end. The exit code is 1 if a result is wrong
# and 2 if something is missing. It uses $PYTHON, or .venv/bin/python, which `make setup` makes.
cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-.venv/bin/python}
if ! command -v "$python" >/dev/null; then
    echo "check_gpu: there is no $python. Run 'make setup', or name a Python 3.11 or newer:" \
        "PYTHON=python3 scripts/check_gpu.sh" >&2
    exit 2
fi
installed="import importlib.util as i; exit(not (i.find_spec('torch') and i.find_spec('numpy')))"
if ! "$python" -c "$installed"; then
    echo "check_gpu: $python has no PyTorch or no NumPy. Run 'make setup', or" \
        "'$python -m pip install -e .[cuda13]' ([cuda12] with a PyTorch for CUDA 12)" >&2
    exit 2
fi
PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" exec "$python" scripts/check_gpu.py
