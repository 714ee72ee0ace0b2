"""Linear speedup: W workers need 1 / W of the steps for the same error, with 1-bit Adam as with uncompressed momentum SGD.

    python experiments/linear_speedup.py             redraw the figure from results/theory/linear_speedup.csv
    python experiments/linear_speedup.py --measure   run it first, 3 to 4 minutes on 2 cores

Corollary 1 of "1-bit Adam" (Tang et al., ICML 2021): with the learning rate

    gamma = 1 / (4 L / v_min + sigma sqrt(T / n) + eps^(2/3) T^(1/3) / v_min)

the error 1 / (T v_min) sum_t ||grad f(x_t)||^2_V, V = diag(1 / v), is at most of the order sigma / sqrt(n T) + eps^(2/3) / T^(2/3) + 1 / T.
It is about the second stage, under a frozen v; here v is given. eps bounds the errors. It enters the theorem only through
E||mean_i delta_i + delta_bar||^2 <= eps^2, so it is measured as the largest such norm in PILOT_STEPS steps of runs with other seeds, at the
learning rate for eps = 0; `eps_rms` and `eps_max` are the root mean square and the largest of the run itself.

Methods. 1-bit Adam and momentum SGD take the same gamma and the same preconditioner, so that they differ in the compression alone.
"Own rate" is momentum SGD with the gamma for eps = 0, which is larger: the price of compression that the corollary itself names.

Rules, written before the committed runs. An exponent is the slope of log error against log n (T = the largest) or log T (n = AT), by least
squares for each seed; its interval is the 95% t-interval over the seeds.
    1. the intervals of 1-bit Adam's exponent in n and of momentum SGD's at the same gamma have a number in common
    2. 1-bit Adam's exponent in n is within MARGIN of that of the corollary's whole bound at the same points
    3. the same in T
    4. no run, with W = 64 neither, takes more than LIMIT seconds of a core; all seeds of one method at one n and T are a run, in one thread
sigma and T were chosen in trial runs, so that the noise's term is the larger part of 1 / gamma everywhere (`noise_share`), and so that the
runs reach the minimum, which the bound takes for granted: gamma L T is 14 or more, and `f_end` is near f* = 0. A first committed-size run
varied T at n = 4; there gamma L T began at 7, the shorter runs ended on the way down, and rule 3 failed (-0.417): hence AT = 16.
"""

import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict

import numpy as np
import pandas as pd

from onebit.lab.bench import theory
from onebit.lab.bench.bars import plain_ticks
from onebit.lab.bench.theory import Problem, Sample
from onebit.lab.claims.judge import mean_interval, show
from onebit.lab.report import figure as figures
from onebit.lab.runs import measurements as measured

NAME = "linear_speedup"
PROBLEM = Problem(sigma=16.0)
WORKERS = (1, 2, 4, 8, 16, 32, 64)
STEPS = (4000, 8000, 16000, 32000, 64000)
AT = 16  # workers, while T varies
SEEDS = tuple(range(1, 9))
PILOT_STEPS, PILOT_SEEDS = 2000, tuple(range(101, 109))
MARGIN, LIMIT = 0.05, 300.0
LABELS = {
    "onebit_adam": "1-bit Adam",
    "momentum_sgd": "momentum SGD",
    "momentum_sgd_own": "momentum SGD, own rate",
    "no_feedback": "1-bit, no feedback",
}
LOOKS = {
    "onebit_adam": figures.LOOKS["onebit_adam"][1:],
    "momentum_sgd": ("#0072B2", "-", "o"),
    "momentum_sgd_own": ("#000000", ":", "X"),
    "no_feedback": ("#E69F00", "-.", "v"),
}
MARKER_SIZES = {
    "onebit_adam": 9,
    "momentum_sgd": 6,
    "momentum_sgd_own": 3,
    "no_feedback": 4,
}  # the first three fall together


def measured_eps(workers, steps):
    """The largest norm of the errors in pilot runs."""
    run = theory.momentum_sgd(
        Sample(PROBLEM, workers, PILOT_SEEDS),
        min(PILOT_STEPS, steps),
        PROBLEM.learning_rate(workers, steps, 0.0),
        True,
    )
    return max(np.linalg.norm(step.error, axis=-1).max() for step in run)


def rows_of(method, workers, steps, seeds):
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


def measure(options):
    """Rows of the CSV: every n at the largest T, every T at AT workers."""
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
            for method in LABELS
        ]
        for task in as_completed(tasks):
            found += task.result()
            print(
                "{method}, W = {workers}, T = {steps}: {seconds:.0f} s".format(**found[-1]),
                flush=True,
            )
    methods = list(LABELS)
    return sorted(
        found,
        key=lambda row: (methods.index(row["method"]), row["workers"], row["steps"], row["seed"]),
    )


# ---- what is found


def bound_terms(rows):
    """Corollary 1's three terms, without constants, [rows, 3]."""
    n, T, eps = (rows[column].to_numpy(float) for column in ("workers", "steps", "eps"))
    return np.stack([PROBLEM.sigma / np.sqrt(n * T), eps ** (2 / 3) / T ** (2 / 3), 1 / T], axis=1)


def sweep(rows, method, along):
    """The rows of a method along n (at the largest T) or along T (at AT workers), with the corollary's `bound`."""
    fixed = rows.workers == AT if along == "steps" else rows.steps == rows.steps.max()
    chosen = rows[(rows.method == method) & fixed]
    return chosen.assign(bound=bound_terms(chosen).sum(1))


def exponent(rows, method, along, value="error"):
    return mean_interval(theory.exponents(sweep(rows, method, along), along, value).to_numpy())


def judge(rows):
    """A line for each exponent, with the rules that it has to keep."""
    lines = []
    for along, name in (("workers", "W"), ("steps", "T")):
        for method, label in LABELS.items():
            found, bound = (
                exponent(rows, method, along),
                exponent(rows, method, along, "bound").mean,
            )
            near = "yes" if abs(found.mean - bound) <= MARGIN else "NO"
            lines.append(
                {
                    "what": f"{label}: exponent in {name}",
                    "found": show(found, ".4f"),
                    "against": f"{bound:.4f}, the bound's",
                    "holds": near if method == "onebit_adam" else "",
                }
            )
    slopes = [
        theory.exponents(sweep(rows, method, "workers"), "workers")
        for method in ("onebit_adam", "momentum_sgd")
    ]
    shared = theory.overlap(*(mean_interval(values.to_numpy()) for values in slopes))
    lines.append(
        {
            "what": "1-bit Adam's exponent in W - momentum SGD's",
            "found": show(mean_interval((slopes[0] - slopes[1]).to_numpy()), ".4f"),
            "against": "their intervals overlap",
            "holds": "yes" if shared else "NO",
        }
    )
    slowest = rows.seconds.max()
    lines.append(
        {
            "what": "longest run, time of a core",
            "found": f"{slowest:.0f} s",
            "against": f"{LIMIT:.0f} s",
            "holds": "yes" if slowest <= LIMIT else "NO",
        }
    )
    return pd.DataFrame(lines)


# ---- the figure


def plot(rows):
    """Error against W and against T, and the terms of the corollary's bound against W."""
    drawing, (by_workers, by_steps, terms) = figures.figure(columns=3)
    draw_sweep(by_workers, rows, "workers")
    by_workers.set(title=f"T = {rows.steps.max():,} steps", xlabel="workers W")
    draw_sweep(by_steps, rows, "steps")
    by_steps.set(title=f"W = {AT} workers", xlabel="steps T")
    draw_terms(terms, sweep(rows, "onebit_adam", "workers"))
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
        axes.set_xticks(
            sorted(values.unique()), [f"{value:,}" for value in sorted(values.unique())]
        )
        axes.minorticks_off()
    return drawing


def draw_sweep(axes, rows, along):
    """Each method's points, the line fitted to them, and a guide of slope -1/2."""
    for method, label in LABELS.items():
        chosen, look = sweep(rows, method, along), LOOKS[method]
        found = exponent(rows, method, along)
        theory.seeds_spread(
            axes,
            chosen,
            along,
            "error",
            f"{label}: {show(found, '.3f')}",
            (look[0], "none", look[2]),
            MARKER_SIZES[method],
        )
        x = np.sort(chosen[along].unique())
        middle, centre = np.log(chosen.error).mean(), np.log(chosen[along]).mean()
        axes.plot(
            x,
            np.exp(middle + found.mean * (np.log(x) - centre)),
            color=look[0],
            linestyle=look[1],
            linewidth=1.2,
        )
    guide = (
        0.6
        * sweep(rows, "momentum_sgd", along).groupby(along).error.mean().iloc[0]
        * (x / x[0]) ** -0.5
    )
    axes.plot(x, guide, color="0.4", linewidth=0.8, label="slope -1/2")
    axes.set(yscale="log", ylabel=r"mean of $\|\nabla f(x_t)\|_V^2$")
    axes.set_ylim(bottom=guide[-1] / 8)  # room for the legend
    plain_ticks(axes, (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1))
    axes.legend(fontsize=7, loc="lower left", handlelength=1.5)


def draw_terms(axes, chosen):
    points = chosen.drop_duplicates("workers")
    names = (r"$\sigma / \sqrt{nT}$", r"$\varepsilon^{2/3} / T^{2/3}$", r"$1 / T$")
    styles = (("#000000", "-", "o"), ("#CC79A7", "--", "D"), ("#009E73", ":", "^"))
    for name, values, (colour, line, marker) in zip(names, bound_terms(points).T, styles):
        axes.plot(
            points.workers,
            values,
            color=colour,
            linestyle=line,
            marker=marker,
            markersize=4,
            label=name,
        )
    axes.plot(points.workers, points.bound, color="0.4", linewidth=3, alpha=0.4, label="their sum")
    axes.set_yscale("log")
    axes.legend(loc=(0.03, 0.1))


NOTE = (
    f"f(x) = sum_j L w^2/2 u_j^2/(1 + u_j^2), u = Qx/w, d = {PROBLEM.dimension}, L = {PROBLEM.L:g}, w = {PROBLEM.width:g}; Gaussian noise, "
    f"sigma = {PROBLEM.sigma:g}; v from 1 to {PROBLEM.v_max:g}, beta = 0.9; the learning rate is Corollary 1's for each W and T. In the "
    "legend: the fitted exponent and its 95% interval over the seeds. 1-bit Adam: its second stage, v given. Own rate: Corollary 1's for "
    "eps = 0, the price of compression left out."
)


def main():
    made = measured.parser(__doc__)
    made.add_argument("--workers", type=measured.positive(int), nargs="+", default=WORKERS)
    made.add_argument("--steps", type=measured.positive(int), nargs="+", default=STEPS)
    made.add_argument("--seeds", type=measured.positive(int), nargs="+", default=SEEDS)
    options = measured.parse(
        made, quick={"workers": (1, 4), "steps": (100, 200), "seeds": (1, 2, 3)}
    )
    if options.measure:
        config = {name: list(getattr(options, name)) for name in ("workers", "steps", "seeds")}
        config |= {
            "pilot_steps": PILOT_STEPS,
            "pilot_seeds": PILOT_SEEDS,
            "problem": asdict(PROBLEM),
        }
        measured.write(options.results, theory.FOLDER, NAME, measure(options), config)
    theory.conclude(NAME, options.results, judge, plot, NOTE)


if __name__ == "__main__":
    main()
