"""Error feedback: errors cancel in SGD, but not in Adam's variance; forgetting them is costly.

    python experiments/error_feedback.py             redraw the figure from results/theory
    python experiments/error_feedback.py --measure   run it first, 1 minute on 2 cores

"1-bit Adam" (Tang et al., ICML 2021). Section 4.1: with delta_s = mean_i delta_i + delta_bar, what
step s loses,

    without feedback   x_t = x_0 - gamma sum_s g_s + gamma sum_s delta_s
    with feedback      x_t = x_0 - gamma sum_s g_s + gamma delta_t

Section 4.2: Adam on such gradients squares g_t + delta_{t-1} - delta_t, so that v takes in, beside
g_t^2, a term 2 g_t (delta_{t-1} - delta_t) and a term (delta_{t-1} - delta_t)^2, which is never
negative. "Reset": the errors are forgotten after every k steps; k = 1 is no feedback at all. The
problem is that of linear_speedup, but its noise is that of rare events: where the noise's median is
not 0, the mean sign points elsewhere than the mean gradient. f lies between 0 and 1.

Rules, written before the committed runs; "intervals" are 95% t-intervals over the seeds.

    1. Without feedback ||sum_s delta_s|| grows like t^0.5 or faster from T / 10 to T; with feedback
       ||delta_t|| is at most twice as large after T / 10 as before.
    2. With feedback f ends at most twice as high as without compression; without feedback at least
       ten times as high.
    3. The quadratic term, summed over the coordinates and all steps, is larger than the sum of
       g_t^2, and grows like t^0.9 to t^1.1.
    4. Forgetting the errors at every step costs more than every 10 steps, and that more than never:
       the intervals are apart.

`onebit.lab.claims.theory` judges them.
"""

import argparse
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from onebit import reference
from onebit.lab.bench import theory
from onebit.lab.bench.drawing import draw_seeds
from onebit.lab.bench.measurement import TheoryMeasurement
from onebit.lab.bench.theory import Problem, Sample, Step
from onebit.lab.claims.theory import error_feedback_rules
from onebit.lab.claims.theory_statistics import chosen, final
from onebit.lab.report import figure as figures
from onebit.lab.runs.measurements import positive

PROBLEM = Problem(sigma=4.0, rare=0.1, v_max=1.0)
WORKERS, GAMMA, ADAM_GAMMA, STEPS = 4, 0.005, 0.001, 10000
SEEDS = tuple(range(1, 9))
RESETS = (1, 10, 100, 1000, None)
FEEDBACK = {
    "exact": ("SGD, not compressed", False, None),
    "feedback": ("1-bit SGD, error feedback", True, None),
    "none": ("1-bit SGD, no feedback", True, 1),
}
TERMS = {
    "squared gradient": r"$g_t^2$",
    "cross": r"$2 g_t (\delta_{t-1} - \delta_t)$",
    "quadratic": r"$(\delta_{t-1} - \delta_t)^2$",
}
LOOKS = {
    "exact": ("#0072B2", "-", "o"),
    "feedback": ("#D55E00", "--", "s"),
    "none": ("#E69F00", "-.", "v"),
    "squared gradient": ("#0072B2", "-", "o"),
    "cross": ("#009E73", ":", "^"),
    "quadratic": ("#CC79A7", "--", "D"),
}


def withheld(
    run: Iterator[Step], reset_every: int | None
) -> Iterator[tuple[int, Step, np.ndarray]]:
    """(t, step, what all errors up to t keep from x [seeds, d]) for each step.

    The last is what was forgotten and the errors that are still kept.
    """
    forgotten = 0.0
    for t, step in enumerate(run, 1):
        total = forgotten + step.error
        yield t, step, total
        if reset_every is not None and t % reset_every == 0:
            forgotten = total


def marks(steps: int) -> set[int]:
    """Some 50 steps, evenly spaced on a logarithmic axis, among them the last."""
    return {int(t) for t in np.unique(np.geomspace(1, steps, 50).round())}


def rows_of(part: str, setting: object, seeds: tuple[int, ...], quantities: dict) -> list[dict]:
    """The rows of one setting.

    quantities: step -> {quantity: [seeds]}.
    """
    return [
        {
            "part": part,
            "setting": setting,
            "quantity": quantity,
            "step": t,
            "seed": seed,
            "value": values[i],
        }
        for t, found in quantities.items()
        for quantity, values in found.items()
        for i, seed in enumerate(seeds)
    ]


def value(step: Step) -> np.ndarray:
    """f(x) after the step, of each seed."""
    return PROBLEM.value(step.state.x.reshape(step.gradient.shape))


def sums(setting: str, seeds: tuple[int, ...], steps: int) -> list[dict]:
    """Section 4.1, on SGD: f and the norm of what the errors keep from x."""
    _, compressed, reset_every = FEEDBACK[setting]
    run = theory.momentum_sgd(
        Sample(PROBLEM, WORKERS, seeds), steps, GAMMA, compressed, beta=0.0, reset_every=reset_every
    )
    marked, found = marks(steps), {}
    for t, step, total in withheld(run, reset_every):
        if t in marked:
            found[t] = {"f": value(step), "errors": np.linalg.norm(total, axis=-1)}
    return rows_of("sums", setting, seeds, found)


def terms(setting: str, seeds: tuple[int, ...], steps: int) -> list[dict]:
    """Section 4.2, on Adam with compressed gradients: the terms of (g_t + delta_{t-1} - delta_t)^2.

    They are summed over coordinates and steps.
    """
    C = theory.one_bit_by_seed(PROBLEM.dimension)
    run = theory.steps_of(
        reference.naive_one_bit_adam,
        Sample(PROBLEM, WORKERS, seeds),
        steps,
        lambda t: ADAM_GAMMA,
        ((), ()),
        C=C,
    )
    marked, found = marks(steps), {}
    previous, totals = 0.0, np.zeros((3, len(seeds)))
    for t, step in enumerate(run, 1):
        change = previous - step.error
        totals = totals + [
            (step.mean**2).sum(-1),
            (2 * step.mean * change).sum(-1),
            (change**2).sum(-1),
        ]
        previous = step.error
        if t in marked:
            found[t] = dict(zip(TERMS, totals))
    return rows_of("terms", setting, seeds, found)


def resets(setting: int | str, seeds: tuple[int, ...], steps: int) -> list[dict]:
    """f of momentum SGD that forgets the errors every `setting` steps; "exact": not compressed.

    f is the mean over the last tenth of the steps.
    """
    compressed = setting != "exact"
    reset_every = None if setting in ("never", "exact") else setting
    run = theory.momentum_sgd(
        Sample(PROBLEM, WORKERS, seeds), steps, GAMMA, compressed, reset_every=reset_every
    )
    tail = [value(step) for t, step in enumerate(run, 1) if t > 0.9 * steps]
    return rows_of("resets", setting, seeds, {steps: {"f": np.mean(tail, axis=0)}})


def measure(options: argparse.Namespace) -> list[dict]:
    """The rows of the CSV: every part in every setting."""
    seeds, steps = tuple(options.seeds), options.steps
    settings = (
        [(sums, name) for name in FEEDBACK]
        + [(terms, "naive")]
        + [(resets, k or "never") for k in RESETS]
        + [(resets, "exact")]
    )
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        tasks = [pool.submit(part, setting, seeds, steps) for part, setting in settings]
        return [row for task in tasks for row in task.result()]


# ---- the figure


def plot(rows: pd.DataFrame) -> figures.Drawing:
    """Errors and f with and without feedback, the terms of v, and the cost of forgetting errors."""
    drawing, (errors, values, squares, reset) = figures.canvas(4)
    for setting, label in (
        ("none", r"no feedback: $\|\sum_s \delta_s\|$"),
        ("feedback", r"feedback: $\|\delta_t\|$"),
    ):
        draw(errors, rows, "sums", setting, "errors", label)
    errors.set(
        title="What the errors keep from x (section 4.1)",
        xlabel="step t",
        ylabel="norm",
        xscale="log",
        yscale="log",
    )
    for setting, (label, *_) in FEEDBACK.items():
        draw(values, rows, "sums", setting, "f", label)
    values.set(
        title="What it does to SGD", xlabel="step t", ylabel=r"$f(x_t)$", xscale="log", yscale="log"
    )
    for quantity, label in TERMS.items():
        draw(squares, rows, "terms", "naive", quantity, label)
    squares.axhline(0, color="0.4", linewidth=0.8)
    squares.set(
        title="What Adam's variance takes in (section 4.2)",
        xlabel="step t",
        ylabel="mean per step up to t",
        xscale="log",
    )
    draw_resets(reset, rows)
    for axes in (errors, values, squares):
        axes.legend()
    return drawing


def draw(
    axes: Axes, rows: pd.DataFrame, part: str, setting: str, quantity: str, label: str
) -> None:
    """One quantity against the steps; terms are divided by the number of steps."""
    found = chosen(rows, part, setting, quantity)
    if part == "terms":
        found = found.assign(value=found.value / found.step)
    draw_seeds(axes, found, "step", "value", label, LOOKS[quantity if part == "terms" else setting])


def draw_resets(axes: Axes, rows: pd.DataFrame) -> None:
    """Each seed a small point, their mean a large one."""
    names = [k or "never" for k in RESETS]
    means = [final(rows, "resets", k, "f").mean() for k in names]
    for i, k in enumerate(names):
        seeds = final(rows, "resets", k, "f")
        axes.plot(
            [i] * len(seeds), seeds, color="#D55E00", linestyle="none", marker="_", markersize=9
        )
    axes.plot(
        range(len(names)),
        means,
        color="#D55E00",
        linestyle="--",
        marker="s",
        markersize=5,
        label="1-bit, errors forgotten every k steps",
    )
    axes.axhline(
        final(rows, "resets", "exact", "f").mean(), color="#0072B2", label="not compressed"
    )
    axes.set_xticks(range(len(names)), [f"{k:,}" if k != "never" else k for k in names])
    axes.set(
        title="What forgetting costs momentum SGD",
        xlabel="k",
        ylabel=r"$f$, last tenth of the steps",
        yscale="log",
    )
    axes.legend()


NOTE = (
    "f(x) = sum_j L w^2/2 u_j^2/(1 + u_j^2), u = Qx/w, "
    f"d = {PROBLEM.dimension}, L = {PROBLEM.L:g}, w = {PROBLEM.width:g}, W = {WORKERS} workers; "
    f"rare noise, p = {PROBLEM.rare:g}, sigma = {PROBLEM.sigma:g}; SGD and momentum SGD (beta = "
    f"0.9) at learning rate {GAMMA:g}, Adam at {ADAM_GAMMA:g}. delta_t is the mean of the workers' "
    "errors and the server's; with feedback it is all that is left of the sum. The terms of the "
    "variance are summed over all coordinates. In the last panel a dash is a seed."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The number of steps and the seeds."""
    parser.add_argument("--steps", type=positive(int), default=STEPS)
    parser.add_argument("--seeds", type=positive(int), nargs="+", default=SEEDS)


MEASUREMENT = TheoryMeasurement(
    name="error_feedback",
    description=__doc__,
    add_options=add_options,
    quick={"steps": 200, "seeds": (1, 2, 3)},
    recorded=("steps", "seeds"),
    constants={
        "workers": WORKERS,
        "gamma": GAMMA,
        "adam_gamma": ADAM_GAMMA,
        "problem": asdict(PROBLEM),
    },
    measure=measure,
    plot=plot,
    note=lambda rows, facts: NOTE,
    rules=error_feedback_rules,
)

if __name__ == "__main__":
    MEASUREMENT.main()
