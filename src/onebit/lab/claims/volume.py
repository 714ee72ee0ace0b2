"""How much 1-bit Adam saves at the papers' own scale, by counting what each stage sends.

What a step sends follows from the shapes of the model's tensors and the number of ranks alone, so
that no cluster is needed: `onebit.layout` and `onebit.time_model.message_bytes` say it for the
paper's model, which is built on the meta device, and tests hold that against what the optimizer
counts at the wire. The numbers of steps are the paper's. Gradients travel in half precision, as the
paper's do; a compressed message has a float32 scale for each piece of a tensor.

Before, the rule was "bytes counted at the wire" of the paper's whole runs, with the same range, and
its verdict "needs a cluster".

The paper's formula counts neither scales nor padding, and is the same for any number of ranks. The
claims are judged at RANKS, of which 64 is the paper's.
"""

from functools import partial
from pathlib import Path

import pandas as pd
import torch

from onebit.lab.claims.statistics import Interval
from onebit.lab.config import composed
from onebit.lab.training.run import run_from
from onebit.time_model import AGREEMENT_BYTES, message_bytes

RANKS = (8, 64, 256)
HALF = 2  # bytes of an element of a gradient


def stage_bytes(shapes: list[torch.Size], ranks: int, itemsize: int = HALF) -> tuple[float, int]:
    """Bytes that leave a rank in a step: with exact averaging, and compressed."""
    exact = 2 * (ranks - 1) / ranks * itemsize * sum(shape.numel() for shape in shapes)
    return exact, (ranks - 1) * (AGREEMENT_BYTES + 2 * message_bytes(shapes, ranks))


def counted(root: Path, profile: str, experiment: str) -> pd.DataFrame:
    """A row for each number of ranks: the bytes of a whole run of Adam and of 1-bit Adam.

    root, profile: not needed, since nothing is read; the experiment is the paper's.
    """
    run = run_from(composed([f"experiment={experiment}", "profile=paper"]))
    with torch.device("meta"):
        shapes = [p.shape for p in run.task.model().parameters() if p.requires_grad]
    steps = sum(phase.steps for phase in run.phases.values())
    warmup = sum(phase.warmup for phase in run.phases.values())
    rows = []
    for ranks in RANKS:
        exact, compressed = stage_bytes(shapes, ranks)
        onebit = warmup * exact + (steps - warmup) * compressed
        rows.append({"ranks": ranks, "adam": steps * exact, "onebit_adam": onebit})
    return pd.DataFrame(rows)


def reading(experiment: str) -> partial:
    """`counted` for one experiment, as a claim reads it."""
    return partial(counted, experiment=experiment)


def reduction(rows: pd.DataFrame) -> Interval:
    """Adam's volume over 1-bit Adam's: the mean over RANKS, the lowest and the highest."""
    ratio = rows.adam / rows.onebit_adam
    return Interval(float(ratio.mean()), float(ratio.min()), float(ratio.max()), len(ratio))


def detail(rows: pd.DataFrame) -> str:
    """The numbers of ranks, and what a rank sends in all."""
    paper = rows[rows.ranks == 64].iloc[0]
    return (
        f"lowest and highest with {', '.join(map(str, RANKS))} ranks; with 64, "
        f"{paper.adam / 1e12:.0f} TB and {paper.onebit_adam / 1e12:.0f} TB leave a rank"
    )
