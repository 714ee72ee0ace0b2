"""Sweeps: what varies is what the ticks say, and what is drawn is the difference from Adam."""

import matplotlib.pyplot as plt
import pytest
from helpers import synthetic
from helpers.cases import holds_for_each

from onebit.lab import plan
from onebit.lab.config import composed, plain
from onebit.lab.report.artifact import load_artifact, names, overrides_of, sweep_overrides
from onebit.lab.report.style import LOOKS
from onebit.lab.reproduce import runs_of
from onebit.lab.runs import load as results
from onebit.lab.runs.compare import differing
from onebit.lab.training.run import run_from

NAMES = [name for name in names() if name.startswith("sweep_")]


def run_of(optimizer, profile="laptop"):
    return run_from(
        composed(
            ["experiment=figure_04", f"profile={profile}", *overrides_of(optimizer), "comm=threads"]
        )
    )


def variants(name):
    return load_artifact(name).labels.items()


@pytest.mark.parametrize("profile", ["smoke", "laptop"])
def test_the_share_of_warm_up_is_that_of_the_tick(profile):
    for optimizer, label in variants("sweep_warmup"):
        run = run_of(optimizer, profile)
        steps = run.phases["seq128"].steps
        assert (
            run.optimizer.keywords["warmup"]
            == run.warmup_steps
            == pytest.approx(steps * float(label[:-1]) / 100, abs=max(0.6, 0.002 * steps))
        )


def test_the_compressor_is_that_of_the_tick():
    found = {}
    for optimizer, label in variants("sweep_compressor"):
        keywords = run_of(optimizer).optimizer.keywords
        compressor = keywords.get("compressor")
        name = compressor.func.__name__ if compressor else "Sign"
        found[label] = (
            name,
            *(compressor.keywords.values() if compressor else ()),
            keywords.get("scale", "tensor"),
        )
    assert found == {
        "1 bit": ("Sign", "tensor"),
        "1 bit, one scale": ("Sign", "fused"),
        "2 bits": ("Quantize", 2, "tensor"),
        "4 bits": ("Quantize", 4, "tensor"),
        "8 bits": ("Quantize", 8, "tensor"),
        "32 bits": ("Identity", "tensor"),
        "top 1/64": ("TopK", 1 / 64, "tensor"),
    }


def test_the_floor_is_that_of_the_tick():
    floors = {
        label: run_of(optimizer).optimizer.keywords.get("variance_floor", 0)
        for optimizer, label in variants("sweep_mask")
    }
    assert floors == {label: float(label) if label != "mask" else 0 for label in floors}


def test_one_scale_for_all_is_1_bit_adam_but_for_the_scale():
    """1-bit LAMB whose coefficients are all 1 is 1-bit Adam, see test_lamb.py.

    All other options are 1-bit Adam's.
    """
    fused, plain = (
        dict(run_of(name).optimizer.keywords) for name in ("onebit_adam_fused", "onebit_adam")
    )
    lamb = {
        "coefficient_bounds": [1, 1],
        "ratio_bounds": [1, 1],
        "coefficient_beta": 0,
        "scale": "fused",
    }
    assert fused == plain | lamb


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Three seeds of each variant, the i-th 1 % further above Adam than the one before.

    A run of top-k diverged.
    """
    root = tmp_path_factory.mktemp("results")
    names = dict.fromkeys(optimizer for name in NAMES for optimizer in load_artifact(name).variants)
    for seed in (1, 2, 3):
        synthetic.write(root, "adam", seed, 4.0 * seed)
        for i, optimizer in enumerate(names):
            status = "diverged" if optimizer == "onebit_adam_topk" and seed == 2 else "finished"
            synthetic.write(root, optimizer, seed, 4.0 * seed * (1 + 0.01 * i), status)
    yield root, {optimizer: 0.01 * i for i, optimizer in enumerate(names)}
    plt.close("all")


@pytest.mark.parametrize("name", NAMES)
def test_every_variant_is_drawn_with_its_difference_from_adam(name, root):
    folder, gaps = root
    module = load_artifact(name)
    drawing = module.plot(results.load(folder, "figure_04", "laptop", module.optimizers))
    legend = [text.get_text() for text in drawing.legends[0].get_texts()]
    seeds = [
        "n = 2 seeds, 1 of 3 diverged" if optimizer == "onebit_adam_topk" else "n = 3 seeds"
        for optimizer in module.optimizers
    ]
    assert legend == [
        f"{label}, {n}" for label, n in zip(["Adam", *module.labels.values()], seeds, strict=True)
    ]
    middle = drawing.axes[1]
    assert [tick.get_text() for tick in middle.get_xticklabels()] == list(module.labels.values())
    means = [container.lines[0].get_ydata()[0] for container in middle.containers]
    assert means == pytest.approx([gaps[optimizer] for optimizer in module.variants], abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_no_two_curves_of_a_sweep_look_alike_and_known_ones_look_as_ever(name, root):
    module = load_artifact(name)
    drawing = module.plot(results.load(root[0], "figure_04", "laptop", module.optimizers))
    lines = drawing.axes[0].lines
    assert (
        len({(line.get_color(), line.get_linestyle()) for line in lines})
        == len(lines)
        == len({line.get_marker() for line in lines})
    )
    for optimizer, line in zip(module.optimizers, lines, strict=True):
        if optimizer in LOOKS:
            assert line.get_color() == LOOKS[optimizer][1]


def test_a_sweep_is_saved_with_a_caption_of_its_own(root):
    module = load_artifact("sweep_warmup")
    assert module.save("laptop", root[0]).name == "sweep_warmup.png"
    records = results.load_records(root[0], "figure_04", "laptop", module.optimizers)
    text = module.caption(results.load_rows(records), records)
    assert "paired by seed" in text and "2 layers" in text and "The paper (curves" not in text


def test_a_sweep_without_runs_says_how_to_make_them(tmp_path):
    with pytest.raises(FileNotFoundError, match="make reproduce-sweep-mask PROFILE=laptop"):
        load_artifact("sweep_mask").save("laptop", tmp_path)


def test_a_live_run_is_not_mixed_with_committed_ones(root):
    module = load_artifact("sweep_mask")
    with pytest.raises(ValueError, match="leave --live out"):
        module.plot(
            results.load(root[0], "figure_04", "laptop", module.optimizers).assign(live=True)
        )


def test_a_sweep_has_a_plan():
    text = plan.describe("sweep_warmup", "laptop", plan.MACHINES["laptop"])
    assert "onebit_adam_warmup_50" in text and "make reproduce-sweep-warmup" in text


def test_a_seed_that_one_of_a_sweep_lacks_is_shown_of_none(root):
    module = load_artifact("sweep_warmup")
    rows = results.load(root[0], "figure_04", "laptop", module.optimizers)
    drawing = module.plot(rows[(rows.optimizer != "onebit_adam_warmup_5") | (rows.seed > 1)])
    legend = [text.get_text() for text in drawing.legends[0].get_texts()]
    assert all(text.endswith("n = 2 seeds") for text in legend)


def test_the_profile_smoke_trains_some_of_the_compressors_only():
    module = load_artifact("sweep_compressor")
    assert runs_of([module], "smoke") == [("figure_04", name) for name in module.smoke_optimizers]
    assert (
        set(module.smoke_optimizers)
        < set(module.optimizers)
        == {name for _, name in runs_of([module], "laptop")}
    )


@holds_for_each([(method,) for method in sweep_overrides()])
def test_a_variant_is_configured_as_its_committed_runs_were(method):
    options = ["experiment=figure_04", "profile=laptop", *overrides_of(method), "comm=gloo"]
    asked = {"optimizer": method, "workers": 4, "config": plain(composed(options))}
    committed = results.load_records(results.RESULTS, "figure_04", "laptop", (method,))
    assert asked["config"]["method"] == method
    assert committed and all(differing(record, asked) == [] for record in committed)
