"""Claims that need the papers' clusters, judged by the time model.

`python -m onebit.lab.claims.by_model` writes results/MODEL.md.

The rule, written before the model existed: the model may judge if the median of its error, over all
numbers about time that the papers print and that no other printed number contradicts, is at most
15 %. Its prediction of a claim's statistic is then taken to be right within that factor, and this
interval is held against the range that the claim itself asks for:

    reproduced by model        the interval lies inside the range
    not reproduced by model    it lies outside
    partly by model            it lies across a border, so the model cannot tell

This says what the cluster that the papers describe would do, not what anybody measured: the verdict
of a claim in results/CLAIMS.md stays "needs a cluster". S10 and S16 are not judged: the batch, the
stage and the baseline of S10 are not stated, and S16 compares two libraries on one network.
"""

import argparse
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import numpy as np

from onebit.lab.bench.model import papers, points
from onebit.lab.bench.model.check import CONTRADICTION, LIMIT, Check, check
from onebit.lab.bench.model.papers import LAMB_PAPER, PRETRAINING, Setting
from onebit.lab.claims import CLAIMS
from onebit.lab.claims.speed import adam_at_its_best, paper_throughput
from onebit.lab.runs.load import RESULTS, paper_number
from onebit.time_model import COMPRESSED, onebit, zero_one

ADAM_PAPER = papers.ADAM_PAPER
ZERO_ONE_FREEZE = 12_500  # the authors' BERT script; its other intervals are the defaults
FILE = RESULTS / "MODEL.md"


def pretraining_gain(batch: int) -> float:
    """Of a compressed step of BERT-Large on 64 GPUs over Ethernet."""
    return papers.predicted_gain(Setting(ADAM_PAPER, PRETRAINING, "Ethernet", 64, batch))


def run_gain(setting: Setting, steps: int, warmup: int) -> float:
    """Of a whole run."""
    dense, compressed = papers.predicted_run(setting, steps, warmup)
    return dense / compressed


def bert_run() -> tuple[Setting, int, int]:
    """(setting, steps, warm-up) of the pre-training of Figure 4."""
    steps, warmup = (int(paper_number(f"bert_large_128_{name}")) for name in ("steps", "warmup"))
    return points.pretraining(), steps, warmup


def squad_run() -> tuple[Setting, int, int]:
    """(setting, steps, warm-up) of the fine-tuning."""
    steps, warmup = (int(paper_number(f"squad_{name}")) for name in ("steps", "warmup"))
    return points.squad(), steps, warmup


def pretraining_throughput() -> float:
    """Samples/s of the compressed stage of Figure 4's run."""
    return papers.predicted_throughput(COMPRESSED, points.pretraining())


def lamb_setting(batch: int) -> Setting:
    """1-bit LAMB on 256 GPUs over Ethernet."""
    return Setting(LAMB_PAPER, PRETRAINING, "Ethernet", 256, batch)


def lamb_run_gain(batch: int) -> float:
    """Of a whole run with the share of warm-up steps that the paper has at batch 65,536."""
    _, steps, warmup = points.lamb_run(PRETRAINING)
    return run_gain(lamb_setting(batch), steps, warmup)


def zero_one_gain() -> float:
    """0/1 Adam over 1-bit Adam: the authors' BERT-Large script, on 128 GPUs over Ethernet."""
    _, steps, warmup = bert_run()
    gpus, batch = int(paper_number("zero_one_gpus")), int(paper_number("batch"))
    setting = Setting(ADAM_PAPER, PRETRAINING, "Ethernet", gpus, batch)
    one, zero = (
        papers.predicted_seconds(method, setting)
        for method in (onebit(warmup / steps), zero_one(steps, ZERO_ONE_FREEZE))
    )
    return one / zero


PREDICTIONS: dict[str, Callable[[], float]] = {
    "C7": lambda: run_gain(*bert_run()),
    "S4": lambda: pretraining_gain(1024),
    "S5": lambda: pretraining_gain(4096),
    "S6": lambda: pretraining_throughput() / adam_at_its_best(),
    "S7": lambda: pretraining_throughput() / paper_throughput("fig5b", "Adam (InfiniBand)", 64),
    "S8": lambda: papers.predicted_gain(points.squad()),
    "S9": lambda: run_gain(*squad_run()),
    "S11": lambda: papers.predicted_gain(lamb_setting(65_536)),
    "S14": lambda: papers.predicted_gain(lamb_setting(8192)),
    "S15": lambda: lamb_run_gain(8192),
    "L7": lambda: lamb_run_gain(65_536),
    "Z6": zero_one_gain,
}


@dataclass(frozen=True)
class Judgement:
    """A claim's prediction, the interval around it, and what follows from the claim's rule."""

    name: str
    prediction: float
    low: float
    high: float
    verdict: str


def judge(name: str, prediction: float, accepts: tuple[float, float], trusted: bool) -> Judgement:
    """Hold the prediction, right within LIMIT, against the range that the claim asks for."""
    low, high = prediction / (1 + LIMIT), prediction * (1 + LIMIT)
    if not trusted:
        verdict = "not judged"
    elif accepts[0] <= low and high <= accepts[1]:
        verdict = "reproduced by model"
    elif high < accepts[0] or low > accepts[1]:
        verdict = "not reproduced by model"
    else:
        verdict = "partly by model"
    return Judgement(name, prediction, low, high, verdict)


def judge_all(found: Check) -> list[Judgement]:
    """All claims that the model speaks about."""
    claims = {claim.name: claim for claim in CLAIMS}
    return [
        judge(name, predict(), claims[name].accepts, found.may_judge)
        for name, predict in PREDICTIONS.items()
    ]


# ---- the report


def table(header: list[str], lines: list[list[str]]) -> str:
    """A Markdown table."""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def claims_table(found: Check) -> str:
    """The claims with their verdicts."""
    claims = {claim.name: claim for claim in CLAIMS}
    lines = []
    for judgement in judge_all(found):
        claim = claims[judgement.name]
        low = claim.accepts[0]
        numbers = [f"{n:.2f}" for n in (judgement.prediction, judgement.low, judgement.high)]
        lines.append(
            [
                claim.name,
                f"{claim.statement} ({claim.place})",
                f"at least {low:.2f}" if claim.accepts[1] == inf else f"{claim.accepts}",
                claim.paper(),
                f"{numbers[0]} [{numbers[1]}, {numbers[2]}]",
                f"**{judgement.verdict}**",
            ]
        )
    return table(["", "claim", "asked for", "paper", "model", "verdict"], lines)


def errors_table(found: Check) -> str:
    """The error in each figure and curve."""
    errors = defaultdict(list)
    for point in found.counted:
        errors[point.place, point.curve].append(point.error)
    lines = [
        [place, curve, str(len(values)), f"{np.median(values):.0%}", f"{max(values):.0%}"]
        for (place, curve), values in errors.items()
    ]
    return table(["place", "curve", "points", "median error", "largest"], lines)


def points_table(found: Check) -> str:
    """Every point."""
    lines = []
    for i, point in enumerate(found.points):
        against = found.contradicted.get(i)
        remark = point.apart or (f"contradicted by {against}" if against else "")
        printed, predicted = (f"{value:,.4g}" for value in (point.printed, point.predicted))
        place = f"{point.place}: {point.curve}"
        lines.append(
            [place, point.what, printed, predicted, point.unit, f"{point.error:.0%}", remark]
        )
    header = ["place and curve", "setting", "printed", "model", "unit", "error", "remark"]
    return table(header, lines)


def report(found: Check) -> str:
    """results/MODEL.md."""
    worst = "\n".join(
        f"- {point.place}, {point.what}: {point.printed:,.4g} {point.unit} printed, "
        f"{point.predicted:,.4g} by the model ({point.error:.0%})"
        for point in found.worst()
    )
    verb = "may" if found.may_judge else "may not"
    return f"""# The time model against the papers

Written by `make claims` from `results/paper`; do not edit. `docs/network.md` explains the model,
its inputs and its errors.

The median error is **{found.median_error:.1%}** over {len(found.counted)} points, so by the rule
(at most {LIMIT:.0%}) the model {verb} judge. An error is the larger of two numbers over the
smaller, less 1. {len(found.points) - len(found.counted)} points do not count: inputs of the model,
points that follow from others, and {len(found.contradicted)} that the papers contradict by more
than {CONTRADICTION:.0%} elsewhere.

## Claims

In brackets: the prediction divided and multiplied by {1 + LIMIT:.2f}.

{claims_table(found)}

## Errors by figure

{errors_table(found)}

The worst:

{worst}

## Every point

{points_table(found)}
"""


def main() -> None:
    """Write results/MODEL.md and print the verdicts."""
    argparse.ArgumentParser(description=main.__doc__).parse_args()
    found = check()
    FILE.write_text(report(found), encoding="utf-8")
    print(f"median error {found.median_error:.1%} over {len(found.counted)} points")
    for judgement in judge_all(found):
        print(f"{judgement.name:4} {judgement.verdict:24} {judgement.prediction:.2f}")
    print(f"{FILE.relative_to(RESULTS.parent)} is written.")


if __name__ == "__main__":
    main()
