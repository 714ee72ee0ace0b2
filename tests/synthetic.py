"""Made-up runs in the shape of results/runs, with known answers."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
from omegaconf import OmegaConf

from onebit.lab.options import composed

STEPS, WARMUP, WINDOW = 200, 40, 10


def rows(optimizer, seed, loss, ratio=1.0, compressed_share=1 / 32, steps=STEPS):
    """One run: the loss falls to `loss` and stays there; ||v||_1 changes by `ratio` in every window of 10 steps."""
    step = np.arange(1, steps + 1)
    bits = {"onebit_adam": np.where(step > WARMUP, compressed_share, 1), "naive_onebit_adam": np.full(steps, compressed_share)}
    variance = ratio ** (step / WINDOW)
    return pd.DataFrame({
        "experiment": "figure_04", "profile": "laptop", "optimizer": optimizer, "seed": seed, "commit": "0123456",
        "step": step, "samples": 32 * step, "seconds": 0.1 * step,
        "loss": loss + np.where(step > 0.8 * steps, 0, 4 * (1 - step / (0.8 * steps))), "lr": 1e-3,
        "phase": np.where((optimizer in ("onebit_adam", "onebit_adam_32bit")) & (step >= WARMUP), "compressed", "warmup"),
        "variance_l1": variance, "variance_l2": 1e-3 * variance, "variance_ratio": np.where(step > WINDOW, ratio, np.nan),
        "bytes_sent": np.cumsum(3.2e6 * bits.get(optimizer, np.ones(steps))).astype(int),
        "bytes_received": 0, "calls": step,
    })


@cache
def config(optimizer):
    """The configuration of a run at profile laptop."""
    return OmegaConf.to_container(composed(["profile=laptop", f"optimizer={optimizer}", "workers=4"]), resolve=True)


def record(optimizer, seed, status="finished", **changes):
    """run.json of such a run."""
    return {"experiment": "figure_04", "profile": "laptop", "optimizer": optimizer, "seed": seed, "commit": "0123456",
            "config": config(optimizer) | {"seed": seed}, "workers": 4, "environment": {},
            "warmup_steps": WARMUP, "total_steps": STEPS, "status": status, "final": {}, **changes}


def write(root, optimizer, seed, loss, status="finished", changes=None, **options):
    """Write one run under root/runs."""
    folder = Path(root) / "runs" / "figure_04" / "laptop" / optimizer / f"seed-{seed}"
    folder.mkdir(parents=True)
    rows(optimizer, seed, loss, **options).to_csv(folder / "curve.csv", index=False)
    (folder / "run.json").write_text(json.dumps(record(optimizer, seed, status, **(changes or {}))))


def write_all(root, seeds=(1, 2, 3), **losses):
    """One run of every optimizer for every seed; seed s multiplies every loss by s, which pairing takes out."""
    final = {"adam": 4.0, "onebit_adam": 4.0, "onebit_adam_32bit": 4.0, "naive_onebit_adam": 5.2, **losses}
    for optimizer, loss in final.items():
        for seed in seeds:
            write(root, optimizer, seed, loss * seed)
