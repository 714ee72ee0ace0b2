"""Train one task with one optimizer over real ranks, and record it.

    python -m onebit.lab.train experiment=figure_04 profile=smoke optimizer=onebit_adam comm=gloo workers=3 seed=0

conf/config.yaml says what the options are; `--cfg job` prints their values. Exit code 0: the run finished, or it diverged
and is recorded as such; 1: an error.
"""

import math
import os
import sys
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import hydra
import numpy as np
import torch
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from onebit.comm import Communicator
from onebit.lab.checkpoint import Checkpoints
from onebit.lab.launch import WorkerError
from onebit.lab.options import CONF, wrong_override
from onebit.lab.precision import DTYPES, LossScale
from onebit.lab.record import Recorder, check_folder, read_run
from onebit.lab.run import Run, micro_batches, run_from


def train(run: Run, communicator: Communicator, turn: AbstractContextManager) -> None:
    """What each worker does. `turn` is held where torch's random state is used, which workers in threads share."""
    rank, device = communicator.rank, worker_device(run.device)
    plan, scale = Plan(run.phases), LossScale(run.precision)
    with turn:
        seed_torch(device, run.seed)
        model = run.task.model().to(device).train()
    # The base rate is 1, since LambdaLR multiplies it by the plan's.
    optimizer = run.optimizer(decayed_and_not(model), lr=1.0, communicator=communicator)
    scheduler = LambdaLR(optimizer, plan.lr)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scale": scale}
    checkpoints = Checkpoints(run.folder / "checkpoints", communicator)
    recorder = Recorder(run, communicator) if rank == 0 else None
    start = begin(run, parts, checkpoints, recorder)
    ...
