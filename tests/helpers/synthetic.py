"""Made-up runs in the shape of results/runs, with known answers."""

import json
from functools import cache
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from omegaconf import OmegaConf

from onebit.lab.config import composed
from onebit.lab.report.artifact import overrides_of

STEPS, WARMUP, WINDOW = 200, 40, 10


def rows(optimizer, seed, loss, ratio=1.0, compressed_share=1 / 32, steps=STEPS):
    """One run: the loss falls to `loss` and stays there.

    ||v||_1 changes by `ratio` in every window of 10 steps.
    """
    step = np.arange(1, steps + 1)
    bits = {
        "onebit_adam": np.where(step > WARMUP, compressed_share, 1),
        "naive_onebit_adam": np.full(steps, compressed_share),
    }
    variance = ratio ** (step / WINDOW)
    return pd.DataFrame(
        {
            "experiment": "figure_04",
            "profile": "laptop",
            "optimizer": optimizer,
            "seed": seed,
            "commit": "0123456",
            "step": step,
            "samples": 32 * step,
            "seconds": 0.1 * step,
            "loss": loss + np.where(step > 0.8 * steps, 0, 4 * (1 - step / (0.8 * steps))),
            "lr": 1e-3,
            "phase": np.where(
                (optimizer in ("onebit_adam", "onebit_adam_32bit")) & (step >= WARMUP),
                "compressed",
                "warmup",
            ),
            "variance_l1": variance,
            "variance_l2": 1e-3 * variance,
            "variance_ratio": np.where(step > WINDOW, ratio, np.nan),
            "bytes_sent": np.cumsum(3.2e6 * bits.get(optimizer, np.ones(steps))).astype(int),
            "bytes_received": 0,
            "calls": step,
        }
    )


def evaluation(optimizer, seed, accuracy, steps=STEPS):
    """evaluation.csv of a run of figure_06: after every 20 steps.

    From 0.8 of the run on the accuracy is `accuracy`.
    """
    step = np.arange(20, steps + 1, 20)
    return pd.DataFrame(
        {
            "experiment": "figure_06",
            "profile": "laptop",
            "optimizer": optimizer,
            "seed": seed,
            "commit": "0123456",
            "step": step,
            "samples": 32 * step,
            "metric": "test_accuracy",
            "value": np.where(step > 0.8 * steps, accuracy, 10 + step / steps),
        }
    )


@cache
def config(optimizer, experiment="figure_04"):
    """The configuration of a run at profile laptop."""
    chosen = overrides_of(optimizer)
    options = [f"experiment={experiment}", "profile=laptop", *chosen, "workers=4"]
    if optimizer == "zero_one_adam":  # so that there are steps without an exchange
        options.append("optimizer.local_step_scaler=20")
    return OmegaConf.to_container(composed(options), resolve=True)


def record(optimizer, seed, status="finished", experiment="figure_04", **changes):
    """run.json of such a run."""
    data = (
        {
            "data": {"train": {"images": 5000}, "test": {"images": 10000}},
            "summary": "a small ResNet",
        }
        if experiment == "figure_06"
        else {}
    )
    if experiment == "zero_one_adam_gpt2":
        data = {"summary": "a small GPT-2", "evaluated": "Validation: on 9 blocks."}
    return {
        "experiment": experiment,
        "profile": "laptop",
        "optimizer": optimizer,
        "seed": seed,
        "commit": "0123456",
        "config": config(optimizer, experiment) | {"seed": seed},
        "workers": 4,
        "environment": {},
        **data,
        "warmup_steps": WARMUP,
        "total_steps": STEPS,
        "status": status,
        "final": {},
        **changes,
    }


def write(
    root,
    optimizer,
    seed,
    loss,
    status="finished",
    changes=None,
    experiment="figure_04",
    accuracy=None,
    **options,
):
    """Write one run under root/runs; with evaluations if an accuracy is given."""
    folder = Path(root) / "runs" / experiment / "laptop" / optimizer / f"seed-{seed}"
    folder.mkdir(parents=True)
    curve = rows(optimizer, seed, loss, **options).assign(experiment=experiment)
    curve.to_csv(folder / "curve.csv", index=False)
    if accuracy is not None:
        evaluation(optimizer, seed, accuracy, options.get("steps", STEPS)).to_csv(
            folder / "evaluation.csv", index=False
        )
    final = {"step": int(curve.step.iloc[-1])}
    (folder / "run.json").write_text(
        json.dumps(
            record(optimizer, seed, status, experiment, **{"final": final, **(changes or {})})
        )
    )


def write_all(root, seeds=(1, 2, 3), **losses):
    """One run of every optimizer for every seed.

    Seed s multiplies every loss by s, which pairing takes out.
    """
    final = {
        "adam": 4.0,
        "onebit_adam": 4.0,
        "onebit_adam_32bit": 4.0,
        "naive_onebit_adam": 5.2,
        **losses,
    }
    for optimizer, loss in final.items():
        for seed in seeds:
            write(root, optimizer, seed, loss * seed)


# The errors (100 - accuracy) that the paper's figures end with, as multiples of Adam's.
ERRORS = {
    "adam": 1.0,
    "onebit_adam": 0.97,
    "onebit_adam_32bit": 0.97,
    "naive_onebit_adam": 1.21,
    "sgd": 0.91,
    "double_squeeze": 0.99,
    "local_sgd": 0.91,
    "momentum_sgd": 0.85,
    "ef_momentum_sgd": 0.71,
    "local_momentum_sgd": 0.74,
    "adam_variance_16bit": 1.18,
    "adam_variance_8bit": 2.25,
    "adam_variance_4bit": 2.25,
    "lazy_variance_3": 1.23,
    "lazy_variance_5": 1.3,
}


def write_images(root, seeds=(1, 2, 3), **errors):
    """The same of figure_06: Adam ends with an error of 40 % and a little more at each seed,
    which pairing takes out.
    """
    for optimizer, times in {**ERRORS, **errors}.items():
        for seed in seeds:
            write(
                root,
                optimizer,
                seed,
                1.0,
                experiment="figure_06",
                accuracy=100 - times * (40 + seed / 10),
            )


# What both optimizers end with in made-up runs of figure_08.
FACES = {"loss_discriminator": 0.8, "loss_generator": 2.4, "sliced_wasserstein": 0.06}


def write_faces(root, seeds=(1, 2, 3), **times):
    """The same of figure_08: seed s adds a little to what both end with; times: factors of
    1-bit Adam's, by metric.
    """
    told = {"summary": "a small DCGAN", "evaluated": "Distance: made up."}
    for optimizer, seed in (
        (optimizer, seed) for optimizer in ("adam", "onebit_adam") for seed in seeds
    ):
        write(root, optimizer, seed, 3.2, experiment="figure_08", changes=told)
        folder = Path(root) / "runs/figure_08/laptop" / optimizer / f"seed-{seed}"
        ends = {
            metric: end
            * (1 + seed / 10)
            * (times.get(metric, 1) if optimizer == "onebit_adam" else 1)
            for metric, end in FACES.items()
        }
        rows = [
            evaluation(optimizer, seed, end).assign(experiment="figure_08", metric=metric)
            for metric, end in ends.items()
        ]
        pd.concat(rows).to_csv(folder / "evaluation.csv", index=False)
        plt.imsave(folder / "samples.png", np.full((16, 16, 3), seed / 10))


# What the papers say: the losses at the end, as multiples of the first optimizer's.
LOSSES = {
    "zero_one_adam": {"adam": 1.0, "onebit_adam": 1.0, "zero_one_adam": 1.0},
    "zero_one_adam_gpt2": {"adam": 1.0, "onebit_adam": 1.0, "zero_one_adam": 1.0},
    "lamb": {"lamb": 1.0, "onebit_lamb": 0.995, "lamb_basic_onebit": 1.03},
}
TENSORS = ("embeddings.weight", "layer.dense.weight", "layer.dense.bias", "key.bias")


def watched(optimizer, experiment, seed):
    """tensors.csv: c at levels a factor of 10 apart.

    Variances fall by 4, 3 and 2 after T_w, and r follows; the change of v is least at T_w, 1/20.
    """
    step = np.arange(5, STEPS + 1, 5)
    identity = {
        "profile": "laptop",
        "optimizer": optimizer,
        "seed": seed,
        "commit": "0123456",
        "samples": 32 * step,
        "step": step,
    }
    empty = {"coefficient": np.nan, "ratio": np.nan, "variance": np.nan, "variance_change": np.nan}
    if experiment == "zero_one_adam":
        change = np.select([step < WARMUP - 5, step <= WARMUP], [1.0, 0.05], 0.5)
        return pd.DataFrame(
            {
                "experiment": experiment,
                **identity,
                **empty,
                "tensor": "all",
                "variance_change": change,
            }
        )
    parts = []
    for number, tensor in enumerate(TENSORS):
        fall = np.where(step > WARMUP, 4.0 - number, 1.0)
        ratio = fall if optimizer == "onebit_lamb" else np.nan
        parts.append(
            pd.DataFrame(
                {
                    "experiment": experiment,
                    **identity,
                    **empty,
                    "tensor": tensor,
                    "coefficient": 0.3 / 10**number,
                    "ratio": ratio,
                    "variance": 1 / fall,
                }
            )
        )
    return pd.concat(parts)


def write_language_models(root, seeds=(1, 2, 3), **losses):
    """Runs of the experiments of 0/1 Adam and 1-bit LAMB that say what the papers say.

    `losses` as multiples, by optimizer.
    """
    for experiment, multiples in LOSSES.items():
        for optimizer, times in (
            multiples | {name: times for name, times in losses.items() if name in multiples}
        ).items():
            for seed in seeds:
                write(root, optimizer, seed, 4.0 * seed * times, experiment=experiment)
                folder = Path(root) / "runs" / experiment / "laptop" / optimizer / f"seed-{seed}"
                curve = pd.read_csv(folder / "curve.csv")
                share = {
                    "zero_one_adam": 0.02,
                    "onebit_adam": WARMUP / STEPS,
                    "onebit_lamb": WARMUP / STEPS + (1 - WARMUP / STEPS) / 32,
                }
                curve["bytes_sent"] = (3.2e6 * curve.step * share.get(optimizer, 1)).astype(int)
                curve["calls"] = curve.step if optimizer != "zero_one_adam" else curve.step // 2
                curve.to_csv(folder / "curve.csv", index=False)
                if experiment == "zero_one_adam_gpt2":
                    validation_losses(seed, times, curve).to_csv(
                        folder / "evaluation.csv", index=False
                    )
                else:
                    watched(optimizer, experiment, seed).to_csv(folder / "tensors.csv", index=False)


def validation_losses(seed, times, curve):
    """evaluation.csv: the training loss and a little more, every 20 steps."""
    rows = curve[curve.step % 20 == 0].iloc[:, :7].drop(columns="seconds", errors="ignore")
    return rows.assign(metric="validation_loss", value=curve.loss[rows.index] + 0.1 * seed * times)
