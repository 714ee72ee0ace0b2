"""The experiments on the theory: the problem is as stated, the simulation is 1-bit Adam, errors
telescope, the numbers follow from the CSV.
"""

import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.colors import to_hex

import onebit
from onebit import reference
from onebit.lab.bench import theory
from onebit.lab.bench.theory import Problem, Sample
from onebit.lab.claims.statistics import Interval
from onebit.lab.claims.theory import METHODS
from onebit.lab.claims.theory_statistics import exponent, overlap
from onebit.lab.report.artifact import load_module
from onebit.lab.runs import measurements as measured
from onebit.lab.runs.load import RESULTS
from onebit.lab.runs.metadata import ROOT

EXPERIMENTS = ("linear_speedup", "error_feedback")
PROBLEMS = [Problem(), Problem(rare=0.1, dimension=7, sigma=3.0)]
BETA = 0.9


@pytest.fixture(scope="module")
def speedup():
    return load_module("linear_speedup")


@pytest.fixture(scope="module")
def feedback():
    return load_module("error_feedback")


# ---- the problem is as stated


@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_gradient_is_that_of_finite_differences(problem):
    x, h = problem.start(1), 1e-5
    differences = [
        (problem.value(x + h * e) - problem.value(x - h * e)) / (2 * h)
        for e in np.eye(problem.dimension)
    ]
    np.testing.assert_allclose(problem.gradient(x), differences, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_L_bounds_the_change_of_the_gradient_and_is_reached_at_the_minimum(problem):
    random = np.random.default_rng(0)
    x = (
        problem.width
        * random.standard_normal((20000, problem.dimension))
        * random.choice([0.01, 1, 10], (20000, 1))
    )
    y = x + problem.width * random.standard_normal(x.shape) * random.choice(
        [1e-4, 0.1, 1], (20000, 1)
    )
    ratio = np.linalg.norm(problem.gradient(x) - problem.gradient(y), axis=1) / np.linalg.norm(
        x - y, axis=1
    )
    assert 0.99 * problem.L < ratio.max() <= problem.L * (1 + 1e-9)


def test_the_problem_is_not_convex_where_runs_start():
    problem, h = Problem(), 1e-4
    for seed in range(1, 9):
        x = problem.start(seed)
        along = [
            (e @ (problem.gradient(x + h * e) - problem.gradient(x - h * e))) / (2 * h)
            for e in problem.rotation
        ]
        assert min(along) < -0.2 * problem.L


@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_noise_has_mean_zero_and_variance_sigma_squared(problem):
    noise = problem.noise(np.random.default_rng(0), (200000, problem.dimension))
    assert (noise**2).sum(1).mean() == pytest.approx(problem.sigma**2, rel=0.02)
    assert np.abs(noise.mean(0)).max() < 0.02 * problem.sigma


def test_the_learning_rate_is_corollary_1s():
    """1 / (4 L + sigma sqrt(T / n) + eps^(2/3) T^(1/3)) = 1 / (8 + 3 * 4 + 4 * 4)."""
    assert Problem(L=2.0, sigma=3.0).learning_rate(workers=4, steps=64, eps=8.0) == pytest.approx(
        1 / 36
    )
    assert Problem().v.min() == 1.0


def test_rare_noise_has_a_median_beside_its_mean():
    assert (
        Problem(rare=0.1).noise(np.random.default_rng(0), (10000, 1)) < 0
    ).mean() == pytest.approx(0.9, abs=0.02)


def test_seeds_do_not_depend_on_the_seeds_beside_them():
    together, alone = (
        list(theory.momentum_sgd(Sample(Problem(), 2, seeds), 40, 0.01, True))
        for seeds in ((1, 2, 3), (2,))
    )
    np.testing.assert_allclose(together[-1].gradient[1], alone[-1].gradient[0], rtol=1e-12)
    np.testing.assert_allclose(together[-1].error[1], alone[-1].error[0], rtol=1e-12)


def test_one_bit_by_seed_is_one_bit_with_each_seed_a_segment():
    x, active = np.random.default_rng(0).standard_normal((4, 15)), np.ones(15, bool)
    expected = reference.one_bit(x, [slice(0, 5), slice(5, 10), slice(10, 15)], active)
    assert np.array_equal(theory.one_bit_by_seed(5)(x, (), active), expected)


# ---- the simulation is 1-bit Adam


def test_the_second_stage_of_onebit_adam_is_momentum_sgd_under_a_fixed_preconditioner():
    """From the m and v at the freeze it takes the steps that one_bit_adam takes, errors
    included.
    """
    problem, n, T_w = Problem(sigma=1.0), 3, 10
    segments = [slice(0, problem.dimension)], [slice(0, 10), slice(10, problem.dimension)]
    whole = reference.one_bit_adam(
        problem.start(1),
        Sample(problem, n, (1,)),
        n,
        lambda t: 0.01,
        segments,
        T_w,
        eta=0.0,
        bias_correction=False,
        C=reference.one_bit,
        bound_steps=False,
    )
    states = [next(whole) for _ in range(T_w + 50)]
    frozen, sample = states[T_w - 1], Sample(problem, n, (1,))
    for t in range(1, T_w + 1):
        sample(t, frozen.x)
    stage = reference.preconditioned_momentum_sgd(
        frozen.x,
        lambda t, x: sample(t + T_w, x),
        n,
        lambda t: 0.01,
        segments,
        v=frozen.v,
        m=frozen.m,
        beta=BETA,
        C=reference.one_bit,
    )
    for expected, state in zip(states[T_w:], stage):
        for a, b in zip(state, expected):
            np.testing.assert_allclose(a, b, rtol=1e-12)


def as_rank(communicator, problem, steps, gamma):
    """x after each step of `OneBitAdam` on this rank.

    Two steps at learning rate 0 and beta2 = 0 set the state in which the simulation starts: v as
    given, m = 0.
    """
    sample = Sample(problem, communicator.size, (1,), stream=steps)
    p = torch.nn.Parameter(torch.tensor(problem.start(1)))
    optimizer = onebit.OneBitAdam(
        [p],
        lr=0.0,
        betas=(BETA, 0.0),
        eps=0.0,
        warmup=2,
        bias_correction=False,
        communicator=communicator,
    )
    history = []
    for t in range(-1, steps + 1):
        root = torch.tensor(problem.v).sqrt()
        p.grad = {-1: root / BETA, 0: -root}.get(t)
        if t > 0:
            optimizer.param_groups[0]["lr"] = gamma
            p.grad = torch.tensor(sample(t, p.detach().numpy())[communicator.rank])
        optimizer.step()
        if t > 0:
            history.append(
                (p.detach().numpy().copy(), optimizer.state[p]["worker_error"].numpy().copy())
            )
    return history


def test_four_thread_ranks_take_the_simulations_steps(speedup):
    """W = 4 with the experiment's own problem and learning rate: x and every worker's error, in
    float64, step by step.
    """
    problem, n, steps = speedup.PROBLEM, 4, 300
    gamma = problem.learning_rate(n, steps, speedup.measured_eps(n, steps))
    ranks = onebit.comm.run_threads(n, lambda c: as_rank(c, problem, steps, gamma))
    simulated = theory.momentum_sgd(
        Sample(problem, n, (1,), stream=steps), steps, gamma, compressed=True
    )
    for t, step in enumerate(simulated):
        for rank in range(n):
            x, delta = ranks[rank][t]
            np.testing.assert_allclose(x, step.state.x, rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(delta, step.state.delta[rank], rtol=1e-9, atol=1e-9)


# ---- what the theory says of every run


@pytest.mark.parametrize("reset_every", [1, 10, None])
def test_what_sgd_has_not_taken_of_its_gradients_is_the_errors_and_what_was_forgotten(
    feedback, reset_every
):
    """Section 4.1: x_t = x_0 - gamma (sum of mean gradients) + gamma (forgotten errors + the
    last), exactly.
    """
    problem, gamma, seeds = Problem(rare=0.1, v_max=1.0), 0.01, (1, 2)
    run = theory.momentum_sgd(
        Sample(problem, 3, seeds), 65, gamma, True, beta=0.0, reset_every=reset_every
    )
    gradients = 0.0
    for t, step, kept in feedback.withheld(run, reset_every):
        gradients = gradients + step.mean
        expected = np.stack([problem.start(seed) for seed in seeds]) - gamma * (gradients - kept)
        np.testing.assert_allclose(step.state.x.reshape(2, -1), expected, rtol=1e-10, atol=1e-12)
        if reset_every is None:
            assert np.array_equal(kept, step.error)


def test_momentum_and_errors_move_a_point_by_plain_gradient_steps():
    """Supplement 11: y_t = x_t - gamma / ((1 - beta) sqrt(v)) (m_t beta + delta_t) gives
    y_{t+1} = y_t - gamma g_t / sqrt(v).
    """
    problem, gamma = Problem(), 0.01
    y = problem.start(1)
    for step in theory.momentum_sgd(Sample(problem, 3, (1,)), 50, gamma, True, BETA):
        y = y - gamma * step.mean[0] / np.sqrt(problem.v)
        ahead = step.state.x - gamma / np.sqrt(problem.v) * (
            BETA * step.state.m + step.error[0]
        ) / (1 - BETA)
        np.testing.assert_allclose(ahead, y, rtol=1e-10, atol=1e-12)


def test_the_three_terms_add_up_to_the_square_of_the_compressed_gradient(feedback):
    """Section 4.2, by Adam's own variance: with v_0 = 0 the first step's v is (1 - beta2) times
    the square that it took in.
    """
    rows = pd.DataFrame(feedback.terms("naive", (1, 2), 1))
    C = theory.one_bit_by_seed(feedback.PROBLEM.dimension)
    sample = Sample(feedback.PROBLEM, feedback.WORKERS, (1, 2))
    (step,) = theory.steps_of(
        reference.naive_one_bit_adam,
        sample,
        1,
        lambda t: feedback.ADAM_GAMMA,
        ((), ()),
        beta2=0.999,
        C=C,
    )
    np.testing.assert_allclose(
        rows.groupby("seed").value.sum(), step.state.v.reshape(2, -1).sum(1) / 0.001
    )


# ---- exponents, intervals and rules


def made_up(speedup, slope, compressed_slope=None):
    """Rows with known exponents: every method's error falls with n by `slope`, 1-bit Adam's by
    its own; seeds spread evenly around it.
    """
    settings = {(n, 64000) for n in speedup.WORKERS} | {(speedup.AT, T) for T in speedup.STEPS}
    rows = []
    for method in METHODS:
        own = (
            compressed_slope if method == "onebit_adam" and compressed_slope is not None else slope
        )
        for seed, tilt in enumerate(np.linspace(-0.01, 0.01, 8), start=1):
            rows += [
                {
                    "method": method,
                    "workers": n,
                    "steps": T,
                    "seed": seed,
                    "error": n ** (own + tilt) * T**-0.5,
                    "eps": 0.0,
                    "seconds": 9.0,
                }
                for n, T in settings
            ]
    return pd.DataFrame(rows)


def verdicts(module, rows):
    found = module.MEASUREMENT.rules(rows)
    return dict(zip(found.what, found.holds))


def test_exponents_are_those_that_were_put_in(speedup):
    found = exponent(made_up(speedup, -0.4), "momentum_sgd", "workers")
    half = (
        2.3646 * np.std(np.linspace(-0.01, 0.01, 8), ddof=1) / 8**0.5
    )  # t with 7 degrees of freedom
    assert (found.mean, found.low, found.high, found.n) == pytest.approx(
        (-0.4, -0.4 - half, -0.4 + half, 8), rel=1e-4
    )
    assert exponent(made_up(speedup, -0.4), "momentum_sgd", "steps").mean == pytest.approx(-0.5)


def test_each_rule_of_the_speedup_can_fail(speedup):
    same, near = "1-bit Adam's exponent in W - momentum SGD's", "1-bit Adam: exponent in W"
    good = verdicts(speedup, made_up(speedup, -0.5))
    assert set(good.values()) == {"yes", ""}
    assert verdicts(speedup, made_up(speedup, -0.5, compressed_slope=-0.45))[same] == "NO"
    assert verdicts(speedup, made_up(speedup, -0.4))[near] == "NO"
    assert (
        verdicts(speedup, made_up(speedup, -0.5).assign(seconds=301.0))[
            "longest run, time of a core"
        ]
        == "NO"
    )


def test_each_rule_of_error_feedback_can_fail(feedback):
    """The committed rows, spoilt."""
    rows = committed("error_feedback")
    compressed = rows.part.isin(["sums", "resets"]) & (rows.setting.astype(str) != "exact")
    flat = rows.assign(value=np.where(rows.quantity == "errors", rows.step % 7 + 1.0, rows.value))
    growing = rows.assign(value=np.where(rows.quantity == "errors", rows.step, rows.value))
    worse = rows.assign(value=np.where(compressed & (rows.quantity == "f"), 0.5, rows.value))
    harmless = rows.assign(
        value=np.where((rows.setting == "none") & (rows.quantity == "f"), 1e-3, rows.value)
    )
    small = rows.assign(value=np.where(rows.quantity == "quadratic", 1e-3, rows.value))
    failed = set()
    for spoilt in (flat, growing, worse, harmless, small):
        failed |= {what for what, holds in verdicts(feedback, spoilt).items() if holds == "NO"}
    assert failed == set(verdicts(feedback, rows))


def test_intervals_overlap_if_they_have_a_number_in_common():
    a, b, c = (Interval((low + high) / 2, low, high, 5) for low, high in ((0, 2), (1, 3), (2.5, 4)))
    assert overlap(a, b) and overlap(b, c) and not overlap(a, c) and not overlap(c, a)


def test_theorem_1_applies_at_every_learning_rate_of_the_experiment(speedup):
    """The factor in front of its sum is positive, eps bounds the errors, the noise is the
    larger part of 1 / gamma, the descent is over.
    """
    rows = committed("linear_speedup")
    x = rows.gamma * speedup.PROBLEM.L
    assert (1 - x - 2 * x**2 / (1 - BETA) ** 2 > 0).all()
    assert (rows.eps_rms <= rows.eps)[rows.method == "onebit_adam"].all()
    assert (rows.noise_share > 0.5).all()
    start = np.mean([speedup.PROBLEM.value(speedup.PROBLEM.start(seed)) for seed in speedup.SEEDS])
    assert (rows[rows.method != "no_feedback"].f_end < 0.1 * start).all()


# ---- the committed measurements


def committed(name):
    return measured.read(RESULTS, "theory", name)[0]


def test_the_figure_prints_the_exponents_of_the_committed_csv(speedup):
    """Recomputed here from the CSV by the textbook formulas."""
    rows = committed("linear_speedup")
    drawing = speedup.plot(rows)
    for axes, along, keep in (
        (drawing.axes[0], "workers", rows.steps == rows.steps.max()),
        (drawing.axes[1], "steps", rows.workers == speedup.AT),
    ):
        legend = " ".join(text.get_text() for text in axes.get_legend().get_texts())
        for method in METHODS:
            slopes = []
            for _, own in rows[keep & (rows.method == method)].groupby("seed"):
                x, y = np.log(own[along]), np.log(own.error)
                slopes.append(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())
            half = (
                2.3646 * np.std(slopes, ddof=1) / len(slopes) ** 0.5
            )  # t with 7 degrees of freedom
            assert len(slopes) == 8
            assert (
                f"{np.mean(slopes):.3f} "
                f"[{np.mean(slopes) - half:.3f}, {np.mean(slopes) + half:.3f}]" in legend
            )


def test_the_committed_errors_are_what_the_simulation_gives(speedup):
    rows = committed("linear_speedup")
    T = int(rows.steps.min())
    kept = rows[(rows.method == "onebit_adam") & (rows.workers == speedup.AT) & (rows.steps == T)]
    again = pd.DataFrame(speedup.rows_of("onebit_adam", speedup.AT, T, tuple(kept.seed)))
    # another CPU may round a sign the other way, after which the paths part
    np.testing.assert_allclose(again.error, kept.error, rtol=0.02)
    np.testing.assert_allclose(again.gamma, kept.gamma, rtol=0.02)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_all_rules_hold_for_the_committed_measurements(name):
    assert "NO" not in verdicts(load_module(name), committed(name)).values()
    assert (RESULTS / "figures" / f"{name}.png").exists()


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_runs_from_measuring_to_its_figure(name, tmp_path, monkeypatch):
    command = [
        sys.executable,
        f"experiments/{name}.py",
        "--measure",
        "--quick",
        "--results",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    figure = tmp_path / "figures" / f"{name}.png"
    before = figure.read_bytes(), figure.with_suffix(".pdf").read_bytes()
    monkeypatch.setattr(sys, "argv", [name, "--results", str(tmp_path)])
    load_module(name).MEASUREMENT.main()
    assert (figure.read_bytes(), figure.with_suffix(".pdf").read_bytes()) == before


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_methods_differ_in_colour_line_and_marker(name):
    module = load_module(name)
    for methods in (
        [list(METHODS)] if name == "linear_speedup" else [list(module.FEEDBACK), list(module.TERMS)]
    ):
        looks = [module.LOOKS[method] for method in methods]
        assert (
            len({to_hex(look[0]) for look in looks})
            == len({look[1] for look in looks})
            == len({look[2] for look in looks})
            == len(methods)
        )
