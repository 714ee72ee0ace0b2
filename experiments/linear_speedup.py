"""Linear speedup: W workers need 1 / W of the steps for the same error, compressed or not.

    python experiments/linear_speedup.py             redraw the figure from results/theory
    python experiments/linear_speedup.py --measure   run it first, 3 to 4 minutes on 2 cores

Corollary 1 of "1-bit Adam" (Tang et al., ICML 2021): with the learning rate

    gamma = 1 / (4 L / v_min + sigma sqrt(T / n) + eps^(2/3) T^(1/3) / v_min)

the error 1 / (T v_min) sum_t ||grad f(x_t)||^2_V, V = diag(1 / v), is at most of the order
sigma / sqrt(n T) + eps^(2/3) / T^(2/3) + 1 / T. It is about the second stage, under a frozen v;
here v is given. eps bounds the errors. It enters the theorem only through E||mean_i delta_i +
delta_bar||^2 <= eps^2, so it is measured as the largest such norm in PILOT_STEPS steps of runs with
other seeds, at the learning rate for eps = 0; `eps_rms` and `eps_max` are the root mean square and
the largest of the run itself.

Methods. 1-bit Adam and momentum SGD take the same gamma and the same preconditioner, so that they
differ in the compression alone. "Own rate" is momentum SGD with the gamma for eps = 0, which is
larger: the price of compression that the corollary itself names.

Rules, written before the committed runs. An exponent is the slope of log error against log n (T =
the largest) or log T (n = AT), by least squares for each seed; its interval is the 95% t-interval
over the seeds.

    1. The intervals of 1-bit Adam's exponent in n and of momentum SGD's at the same gamma have a
       number in common.
    2. 1-bit Adam's exponent in n is within MARGIN of that of the corollary's whole bound at the
       same points.
    3. The same holds in T.
    4. No run, with W = 64 neither, takes more than LIMIT seconds of a core; all seeds of one method
       at one n and T are a run, in one thread.

`onebit.lab.claims.theory` judges them, and has MARGIN and LIMIT.

sigma and T were chosen in trial runs, so that the noise's term is the larger part of 1 / gamma
everywhere (`noise_share`), and so that the runs reach the minimum, which the bound takes for
granted: gamma L T is 14 or more, and `f_end` is near f* = 0. A first committed-size run varied T at
n = 4; there gamma L T began at 7, the shorter runs ended on the way down, and rule 3 failed
(-0.417): hence AT = 16.
"""

import argparse
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from onebit.lab.bench import theory
from onebit.lab.bench.drawing import draw_seeds, plain_ticks
from onebit.lab.bench.measurement import TheoryMeasurement
from onebit.lab.bench.theory import SPEEDUP_PROBLEM as PROBLEM
from onebit.lab.bench.theory import SPEEDUP_WORKERS as AT
from onebit.lab.bench.theory import Sample
from onebit.lab.claims.theory import METHODS, linear_speedup_rules
from onebit.lab.claims.theory_statistics import along_axis, bound_terms, exponent
from onebit.lab.report import figure as figures
from onebit.lab.report.style import LOOKS as OPTIMIZER_LOOKS
from onebit.lab.runs.measurements import positive

WORKERS = (1, 2, 4, 8, 16, 32, 64)
STEPS = (4000, 8000, 16000, 32000, 64000)
SEEDS = tuple(range(1, 9))
PILOT_STEPS, PILOT_SEEDS = 2000, tuple(range(101, 109))
LOOKS = {
    "onebit_adam": OPTIMIZER_LOOKS["onebit_adam"][1:],
    "momentum_sgd": ("#0072B2", "-", "o"),
    "momentum_sgd_own": ("#000000", ":", "X"),
    "no_feedback": ("#E69F00", "-.", "v"),
}
# The first three fall together.
MARKER_SIZES = {"onebit_adam": 9, "momentum_sgd": 6, "momentum_sgd_own": 3, "no_feedback": 4}


def measured_eps(workers: int, steps: int) -> float:
    """The largest norm of the errors in pilot runs."""
    run = theory.momentum_sgd(
        Sample(PROBLEM, workers, PILOT_SEEDS),
        min(PILOT_STEPS, steps),
        PROBLEM.learning_rate(workers, steps, 0.0),
        True,
    )
    return max(np.linalg.norm(step.error, axis=-1).max() for step in run)


def rows_of(method: str, workers: int, steps: int, seeds: tuple[int, ...]) -> list[dict]:
    """The rows of one method at one n and T, one for each seed."""
    start = time.process_time()
    eps = 0.0 if method == "momentum_sgd_own" else measured_eps(workers, steps)
    gamma = PROBLEM.learning_rate(workers, steps, eps)
    run = theory.momentum_sgd(
        Sample(PROBLEM, workers, seeds, stream=steps),
        steps,
        gamma,
        compressed=method in ("onebit_adam", "no_feedback"),
        reset_every=1 if method == "no_feedback" else None,
    )
    total, squares, largest = np.zeros((3, len(seeds)))
    for step in run:
        total += step.norm(PROBLEM.v)
        size = np.linalg.norm(step.error, axis=-1)
        squares += size**2
        largest = np.maximum(largest, size)
    found = {
        "error": total / steps,
        "f_end": PROBLEM.value(step.state.x.reshape(len(seeds), -1)),
        "eps_rms": np.sqrt(squares / steps),
        "eps_max": largest,
    }
    common = {
        "method": method,
        "workers": workers,
        "steps": steps,
        "gamma": gamma,
        "eps": eps,
        "noise_share": gamma * PROBLEM.sigma * np.sqrt(steps / workers),
    }
    seconds = time.process_time() - start
    return [
        {
            **common,
            "seed": seed,
            **{name: values[i] for name, values in found.items()},
            "seconds": seconds,
        }
        for i, seed in enumerate(seeds)
    ]


def measure(options: argparse.Namespace) -> list[dict]:
    """The rows of the CSV: every n at the largest T, every T at AT workers."""
    last = max(options.steps)
    settings = sorted(
        {(n, last) for n in options.workers} | {(AT, T) for T in options.steps},
        key=np.prod,
        reverse=True,
    )
    found = []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        tasks = [
            pool.submit(rows_of, method, n, T, tuple(options.seeds))
            for n, T in settings
            for method in METHODS
        ]
        for task in as_completed(tasks):
            found += task.result()
            print(
                "{method}, W = {workers}, T = {steps}: {seconds:.0f} s".format(**found[-1]),
                flush=True,
            )
    methods = list(METHODS)
    return sorted(
        found,
        key=lambda row: (methods.index(row["method"]), row["workers"], row["steps"], row["seed"]),
    )


# ---- the figure


def plot(rows: pd.DataFrame) -> figures.Drawing:
    """Error against W and against T, and the terms of the corollary's bound against W."""
    drawing, (by_workers, by_steps, terms) = figures.canvas(3)
    draw_along(by_workers, rows, "workers")
    by_workers.set(title=f"T = {rows.steps.max():,} steps", xlabel="workers W")
    draw_along(by_steps, rows, "steps")
    by_steps.set(title=f"W = {AT} workers", xlabel="steps T")
    draw_terms(terms, along_axis(rows, "onebit_adam", "workers"))
    terms.set(
        title=f"The terms of Corollary 1, T = {rows.steps.max():,}",
        xlabel="workers W",
        ylabel="bound, constants left out",
    )
    for axes, values in (
        (by_workers, rows.workers),
        (by_steps, rows[rows.workers == AT].steps),
        (terms, rows.workers),
    ):
        axes.set_xscale("log", base=2)
        ticks = sorted(values.unique())
        axes.set_xticks(ticks, [f"{value:,}" for value in ticks])
        axes.minorticks_off()
    return drawing


def draw_along(axes: Axes, rows: pd.DataFrame, along: str) -> None:
    """Each method's points, the line fitted to them, and a guide of slope -1/2."""
    for method, label in METHODS.items():
        chosen, look = along_axis(rows, method, along), LOOKS[method]
        found = exponent(rows, method, along)
        text = f"{label}: {found.shown('.3f')}"
        points = (look[0], "none", look[2])
        draw_seeds(axes, chosen, along, "error", text, points, MARKER_SIZES[method])
        x = np.sort(chosen[along].unique())
        middle, centre = np.log(chosen.error).mean(), np.log(chosen[along]).mean()
        fitted = np.exp(middle + found.mean * (np.log(x) - centre))
        axes.plot(x, fitted, color=look[0], linestyle=look[1], linewidth=1.2)
    sgd = along_axis(rows, "momentum_sgd", along).groupby(along).error.mean()
    guide = 0.6 * sgd.iloc[0] * (x / x[0]) ** -0.5
    axes.plot(x, guide, color="0.4", linewidth=0.8, label="slope -1/2")
    axes.set(yscale="log", ylabel=r"mean of $\|\nabla f(x_t)\|_V^2$")
    axes.set_ylim(bottom=guide[-1] / 8)  # room for the legend
    plain_ticks(axes, (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1))
    axes.legend(fontsize=7, loc="lower left", handlelength=1.5)


def draw_terms(axes: Axes, chosen: pd.DataFrame) -> None:
    """The three terms of the bound and their sum."""
    points = chosen.drop_duplicates("workers")
    names = (r"$\sigma / \sqrt{nT}$", r"$\varepsilon^{2/3} / T^{2/3}$", r"$1 / T$")
    styles = (("#000000", "-", "o"), ("#CC79A7", "--", "D"), ("#009E73", ":", "^"))
    for name, values, (colour, line, marker) in zip(names, bound_terms(points).T, styles):
        style = {"color": colour, "linestyle": line, "marker": marker, "markersize": 4}
        axes.plot(points.workers, values, label=name, **style)
    axes.plot(points.workers, points.bound, color="0.4", linewidth=3, alpha=0.4, label="their sum")
    axes.set_yscale("log")
    axes.legend(loc=(0.03, 0.1))


NOTE = (
    "f(x) = sum_j L w^2/2 u_j^2/(1 + u_j^2), u = Qx/w, "
    f"d = {PROBLEM.dimension}, L = {PROBLEM.L:g}, w = {PROBLEM.width:g}; Gaussian noise, "
    f"sigma = {PROBLEM.sigma:g}; v from 1 to {PROBLEM.v_max:g}, beta = 0.9; the learning rate is "
    "Corollary 1's for each W and T. In the legend: the fitted exponent and its 95% interval over "
    "the seeds. 1-bit Adam: its second stage, v given. Own rate: Corollary 1's for eps = 0, the "
    "price of compression left out."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The numbers of workers and of steps, and the seeds."""
    for name, default in (("workers", WORKERS), ("steps", STEPS), ("seeds", SEEDS)):
        parser.add_argument(f"--{name}", type=positive(int), nargs="+", default=default)


MEASUREMENT = TheoryMeasurement(
    name="linear_speedup",
    description=__doc__,
    add_options=add_options,
    quick={"workers": (1, 4), "steps": (100, 200), "seeds": (1, 2, 3)},
    recorded=("workers", "steps", "seeds"),
    constants={
        "pilot_steps": PILOT_STEPS,
        "pilot_seeds": PILOT_SEEDS,
        "problem": asdict(PROBLEM),
    },
    measure=measure,
    plot=plot,
    note=lambda rows, facts: NOTE,
    rules=linear_speedup_rules,
)

if __name__ == "__main__":
    MEASUREMENT.main()
