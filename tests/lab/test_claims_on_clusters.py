"""Claims that a laptop's runs cannot tell, and those on measurements: made-up rows meet and refute
each rule.
"""

from math import inf

import numpy as np
import pandas as pd
import pytest
from helpers import synthetic

from onebit.lab.claims import CLAIMS
from onebit.lab.claims.bert import COMPRESSORS
from onebit.lab.claims.judge import judge
from onebit.lab.claims.speed import per_step
from onebit.lab.runs import measurements as measured
from onebit.lab.runs.compare import require_alike
from onebit.lab.runs.load import RESULTS, load

BY_NAME = {claim.name: claim for claim in CLAIMS}
STEPS, WARMUP = 200, 40


def made(loss=4.0, warmup=1.0, compressed=1.0, batch=4096, sent=1.0, **metrics):
    """A run of 200 steps: seconds per step in both stages, bytes per step, and what it is
    evaluated to at the end.
    """
    step = np.arange(1, STEPS + 1)
    rows = pd.DataFrame(
        {
            "step": step,
            "samples": batch * step,
            "loss": loss,
            "phase": np.where(step <= WARMUP, "warmup", "compressed"),
            "seconds": np.cumsum(np.where(step <= WARMUP, warmup, compressed)),
            "bytes_sent": 1e6 * sent * step,
            "calls": step,
        }
    )
    return rows.assign(
        **{name: np.where(step == STEPS, value, np.nan) for name, value in metrics.items()}
    )


def rows_of(runs):
    """Three seeds of each optimizer; what a seed multiplies, pairing takes out."""
    frames = [
        run.assign(
            optimizer=name,
            seed=seed,
            loss=run.loss * seed,
            status="finished",
            live=False,
            warmup_steps=WARMUP,
            total_steps=STEPS,
        )
        for name, run in runs.items()
        for seed in (1, 2, 3)
    ]
    return pd.concat(frames, ignore_index=True)


def pair(reference, name, **changes):
    """Of these two, the second differs in `changes`: metric -> (the first's, the second's)."""
    return {
        reference: made(**{key: one for key, (one, _) in changes.items()}),
        name: made(**{key: two for key, (_, two) in changes.items()}),
    }


def stages(name, gain, **options):
    return {name: made(warmup=gain, **options)}


# Runs that meet the rule, and runs that refute it.
CASES = {
    "C7": (
        pair("adam", "onebit_adam", compressed=(3.2, 1.0), warmup=(3.2, 1.0)),
        pair("adam", "onebit_adam", warmup=(2.8, 1), compressed=(2.8, 1)),
    ),
    "C25": (pair("adam", "onebit_adam", loss=(4, 4.1)), pair("adam", "onebit_adam", loss=(4, 4.2))),
    "C26": (pair("adam", "onebit_adam", loss=(4, 3.9)), pair("adam", "onebit_adam", loss=(4, 3.8))),
    "L7": (
        pair("lamb", "onebit_lamb", warmup=(2.1, 1), compressed=(2.1, 1)),
        pair("lamb", "onebit_lamb", warmup=(1.9, 1), compressed=(1.9, 1)),
    ),
    "L8": (pair("lamb", "onebit_adam", loss=(4, 4.1)), pair("lamb", "onebit_adam", loss=(4, 4.05))),
    "S4": (stages("onebit_adam", 4.5, batch=1024), stages("onebit_adam", 4.3, batch=1024)),
    "S5": (stages("onebit_adam", 3.5), stages("onebit_adam", 3.3)),
    "S6": (stages("onebit_adam", 9), stages("onebit_adam", 9, compressed=1.5)),
    "S7": (stages("onebit_adam", 9, compressed=0.95), stages("onebit_adam", 9, compressed=1.0)),
    "S8": (stages("onebit_adam", 5, batch=96), stages("onebit_adam", 4.8, batch=96)),
    "S9": (
        pair("adam", "onebit_adam", warmup=(2.4, 1), compressed=(2.4, 1)),
        pair("adam", "onebit_adam", warmup=(2.2, 1), compressed=(2.2, 1)),
    ),
    "S10": (stages("onebit_adam", 2.1), stages("onebit_adam", 1.9)),
    "S11": (stages("onebit_lamb", 2.0), stages("onebit_lamb", 1.9)),
    "S14": (stages("onebit_lamb", 3.7, batch=8192), stages("onebit_lamb", 3.5, batch=8192)),
    "S15": (
        pair("lamb", "onebit_lamb", warmup=(2.3, 1), compressed=(2.3, 1), batch=(8192, 8192)),
        pair("lamb", "onebit_lamb", warmup=(2.2, 1), compressed=(2.2, 1), batch=(8192, 8192)),
    ),
    "S16": (
        stages("onebit_lamb", 2, batch=8192),
        stages("onebit_lamb", 2, compressed=1.1, batch=8192),
    ),
    "T2": (pair("adam", "onebit_adam", f1=(93, 92.6)), pair("adam", "onebit_adam", f1=(93, 92.4))),
    "T6": (
        pair("adam", "onebit_adam", matthews=(80, 78.1)),
        pair("adam", "onebit_adam", matthews=(80, 82.1)),
    ),
    **dict.fromkeys(
        ("T5", "T7", "T8", "T9", "T10"),
        (
            pair("adam", "onebit_adam", accuracy=(80, 78.1)),
            pair("adam", "onebit_adam", accuracy=(80, 82.1)),
        ),
    ),
    "T11": (
        pair("adam", "onebit_adam", glue_rte=(83, 83.9)),
        pair("adam", "onebit_adam", glue_rte=(83, 81.9)),
    ),
    "T12": (
        pair("adam", "zero_one_adam", glue_rte=(83, 82.1)),
        pair("adam", "zero_one_adam", glue_rte=(83, 81.9)),
    ),
    "T13": (
        pair("lamb", "onebit_lamb", glue_rte=(83, 83.1)),
        pair("lamb", "onebit_lamb", glue_rte=(83, 84.1)),
    ),
    "T14": (
        pair("lamb", "lamb_basic_onebit", glue_rte=(83, 81.9)),
        pair("lamb", "lamb_basic_onebit", glue_rte=(83, 82.1)),
    ),
    "T15": (
        pair("lamb", "onebit_lamb", squad=(90, 90.4)),
        pair("lamb", "onebit_lamb", squad=(90, 89.4)),
    ),
    "Z6": (
        pair("onebit_adam", "zero_one_adam", warmup=(1.6, 1), compressed=(1.6, 1)),
        pair("onebit_adam", "zero_one_adam", warmup=(1.4, 1), compressed=(1.4, 1)),
    ),
    "Z7": (
        pair("adam", "zero_one_adam", test_accuracy=(70, 68)),
        pair("adam", "zero_one_adam", test_accuracy=(70, 66)),
    ),
}


def test_each_claim_that_no_laptop_can_tell_has_its_case():
    assert set(CASES) == {c.name for c in CLAIMS if c.profile in ("paper", "workstation")}


def judged_of_cluster(name):
    """The verdicts on runs that meet the rule, on runs that refute it, and on none."""
    claim, (meets, refutes) = BY_NAME[name].at("paper"), map(rows_of, CASES[name])
    judgements = [judge(claim, rows) for rows in (meets, refutes)]
    assert all("nan" not in judgement.detail for judgement in judgements)
    return [judgement.verdict for judgement in (*judgements, judge(claim, meets.iloc[:0]))]


def test_claims_of_a_cluster_are_judged_by_their_runs_and_need_them():
    expected = ["reproduced", "not reproduced", "needs a cluster"]
    found = {name: judged_of_cluster(name) for name in CASES}
    assert found == dict.fromkeys(CASES, expected)


def test_the_speed_of_a_stage_is_that_between_its_own_steps_and_of_its_batch():
    """Step 41 begins the compressed stage, so that its seconds belong to it.

    A pause of one step changes no median.
    """
    run = made(warmup=5.0, compressed=1.0)
    run.loc[100:, "seconds"] += 1000
    assert [per_step(run, phase) for phase in ("warmup", "compressed")] == [5.0, 1.0]
    assert judge(BY_NAME["S4"], rows_of({"onebit_adam": run})).verdict == "needs a cluster"


def test_lambs_rate_is_in_other_units_than_adams(tmp_path):
    """So that 1-bit Adam can be judged at a rate of its own beside LAMB; two of LAMB's
    relatives cannot.
    """
    adam, lamb, onebit_lamb, fused = (
        {"optimizer": name, "workers": 4, "config": synthetic.config(name, "lamb")}
        for name in ("onebit_adam", "lamb", "onebit_lamb", "onebit_adam_fused")
    )
    other = {**adam, "config": adam["config"] | {"lr": 1e-4}}
    require_alike([lamb, other])
    for reference in (onebit_lamb, fused):
        changed = {**reference, "config": reference["config"] | {"lr": 1e-4}}
        with pytest.raises(ValueError, match="differ in lr"):
            require_alike([lamb if reference is onebit_lamb else adam, changed])


# ---- runs of the laptop


def judged(root, name):
    return judge(BY_NAME[name], load(root, "figure_04", "laptop"))


@pytest.mark.parametrize(
    ("settles", "warmup", "expected"),
    [
        (210, 240, "reproduced"),
        (210, 400, "not reproduced"),
        (290, 210, "not reproduced"),
        (999, 240, "not reproduced"),
    ],
)
def test_the_rule_is_to_find_about_the_step_that_was_chosen_by_hand(
    tmp_path, settles, warmup, expected
):
    """The learning rate rises for 12500 / 60 = 208 steps, in which a ratio that has settled
    does not count.
    """
    for seed in (1, 2, 3):
        for name in ("adam", "onebit_adam"):
            synthetic.write(
                tmp_path,
                name,
                seed,
                4.0,
                steps=300,
                changes={"warmup_steps": warmup, "total_steps": 300},
            )
        path = tmp_path / f"runs/figure_04/laptop/adam/seed-{seed}/curve.csv"
        curve = pd.read_csv(path)
        curve["variance_ratio"] = np.where((curve.step < 100) | (curve.step >= settles), 0.97, 0.9)
        curve.to_csv(path, index=False)
    judgement = judged(tmp_path, "C23")
    assert judgement.verdict == expected
    assert judgement.interval.mean == pytest.approx(settles / warmup if settles < 300 else inf)


@pytest.mark.parametrize(("worst", "expected"), [(4.1, "reproduced"), (4.2, "not reproduced")])
def test_robust_to_compressors_is_judged_by_the_worst_of_them(tmp_path, worst, expected):
    synthetic.write_all(tmp_path, **dict.fromkeys(COMPRESSORS, 4.0) | {COMPRESSORS[-1]: worst})
    assert judged(tmp_path, "C24").verdict == expected


def test_without_one_of_the_compressors_robustness_is_not_judged(tmp_path):
    synthetic.write_all(tmp_path, **dict.fromkeys(COMPRESSORS[1:], 4.0))
    assert judged(tmp_path, "C24").verdict == "not judged"


@pytest.mark.parametrize(
    ("loss", "expected"), [(4.1, "reproduced"), (4.2, "not reproduced"), (3.8, "not reproduced")]
)
def test_one_scale_is_to_do_as_well_as_one_for_each_tensor(tmp_path, loss, expected):
    synthetic.write_all(tmp_path, onebit_adam_fused=loss)
    assert judged(tmp_path, "L9").verdict == expected


@pytest.mark.parametrize("name", ["C2", "C24", "L9"])
def test_losses_that_stand_side_by_side_are_of_the_same_seeds(tmp_path, name):
    """One seed more of what is compared with, far off, changes nothing: nothing is paired with
    it.
    """
    synthetic.write_all(tmp_path, **dict.fromkeys((*COMPRESSORS, "onebit_adam_fused"), 4.0))
    told = judged(tmp_path, name).detail
    for optimizer in ("adam", "onebit_adam"):
        synthetic.write(tmp_path, optimizer, 9, 80.0)
    assert judged(tmp_path, name).detail == told


# ---- measurements


def overlap(compute, slow, fast):
    """Shares of a step of Adam: of the computation and of a compressed step, at 200 Mbit/s and
    at 1 Gbit/s; 5% up and down.
    """
    cells = [("compute", 1000, compute), ("no_overlap", 200, slow), ("no_overlap", 1000, fast)]
    return pd.DataFrame(
        [
            {
                "contender": name,
                "computed": computed,
                "rate_mbit": rate,
                "ratio": share,
                "ratio_low": 0.95 * share,
                "ratio_high": 1.05 * share,
                "rounds": 9,
            }
            for name, rate, value in cells
            for computed, share in (("elsewhere", value), ("here", 0.5))
        ]
    )


@pytest.mark.parametrize(
    ("cells", "verdicts"),
    [
        ((0.2, 0.07, 0.25), ["reproduced"] * 3),
        ((0.6, 0.6, 0.5), ["not reproduced"] * 3),
        ((0.49, 0.24, 0.25), ["partly", "reproduced", "partly"]),
    ],
)
def test_a_measured_step_is_judged_by_its_median_between_its_percentiles(cells, verdicts):
    found = [judge(BY_NAME[name], overlap(*cells)) for name in ("S1", "S2", "S3")]
    assert [judgement.verdict for judgement in found] == verdicts
    gain = found[1].interval
    assert (gain.mean, gain.low, gain.high, gain.n) == pytest.approx(
        (1 / cells[2], 1 / cells[2] / 1.05, 1 / cells[2] / 0.95, 9)
    )


def feedback(power, kept, lost, quadratic):
    """error_feedback.csv of two marks: what the errors grow with, f with and without feedback,
    and the quadratic term.
    """
    values = {
        ("sums", "none", "errors"): (1.0, 10.0**power),
        ("sums", "exact", "f"): (1, 1),
        ("sums", "feedback", "f"): (1, kept),
        ("sums", "none", "f"): (1, lost),
        ("terms", "naive", "quadratic"): (9, quadratic),
        ("terms", "naive", "squared gradient"): (9, 1),
    }
    return pd.DataFrame(
        [
            {
                "part": part,
                "setting": setting,
                "quantity": quantity,
                "step": step,
                "seed": seed,
                "value": seed * value,
            }
            for (part, setting, quantity), pair in values.items()
            for step, value in zip((100, 1000), pair)
            for seed in (1, 2, 3)
        ]
    )


@pytest.mark.parametrize(
    ("made_up", "expected"),
    [((0.6, 1.9, 11, 1.1), "reproduced"), ((0.4, 2.1, 9, 0.9), "not reproduced")],
)
def test_error_feedback_is_judged_seed_by_seed(made_up, expected):
    found = [judge(BY_NAME[name], feedback(*made_up)) for name in ("F1", "F2", "F3", "F4")]
    assert {judgement.verdict for judgement in found} == {expected}
    assert [judgement.interval.mean for judgement in found] == pytest.approx(made_up)


@pytest.mark.parametrize(
    ("onebit", "sgd", "verdicts"),
    [
        (-0.47, -0.5, ["reproduced"] * 2),
        (-0.4, -0.5, ["not reproduced"] * 2),
        (-0.4, -0.4, ["not reproduced", "reproduced"]),
    ],
)
def test_linear_speedup_is_judged_by_the_exponent_at_the_largest_number_of_steps(
    onebit, sgd, verdicts
):
    rows = pd.DataFrame(
        [
            {
                "method": method,
                "workers": n,
                "steps": steps,
                "seed": seed,
                "error": seed * n ** (power if steps == 8 else 1.0),
            }
            for method, power in (("onebit_adam", onebit), ("momentum_sgd", sgd))
            for n in (1, 4, 16)
            for steps in (4, 8)
            for seed in (1, 2, 3)
        ]
    )
    assert [judge(BY_NAME[name], rows).verdict for name in ("F5", "F6")] == verdicts


def test_claims_on_measurements_read_what_is_committed():
    for claim in [claim for claim in CLAIMS if claim.folder != "runs"]:
        rows, facts = measured.read(RESULTS, claim.folder, claim.experiment)
        assert facts["experiment"] == claim.experiment and claim.profile == "measured", claim.name
        assert judge(claim, rows).interval.n >= 3, claim.name
