"""A run: the configuration as objects, and the checks that they fit together."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from onebit.comm import Single
from onebit.lab.runs.state_log import Watch
from onebit.lab.tasks import Task
from onebit.lab.training.precision import DTYPES
from onebit.lab.training.schedule import Phase

# Options that only other options read, as ${...}. `steps` has been turned into scale.steps_divisor
# by `config.with_total_steps`.
REFERRED_TO = (
    "beta2",
    "cache",
    "data_root",
    "glue",
    "lr",
    "max_grad_norm",
    "micro_batch",
    "scale",
    "warmup_steps",
    "workers",
)
WANDB_MODES = ("disabled", "offline", "online")
# Options that are whole numbers, and the least that each may be.
WHOLE_NUMBERS = {"seed": 0, "batch": 1, "record_every": 1, "checkpoint_every": 0}


@dataclass(frozen=True, kw_only=True)
class Run:
    """The options of conf/config.yaml, which documents them, as objects.

    evaluate_every: evaluate after so many steps each, and at the end; None: never.
    watch: what is recorded of the optimizer's state; None: nothing.
    config: all options as plain values.

    Raises:
        ValueError: an option has a wrong value, or two of them do not fit together.
        RuntimeError: the device is not there.
    """

    experiment: str
    profile: str
    method: str
    seed: int
    task: Task
    phases: dict[str, Phase]
    batch: int
    precision: str
    device: str | None
    optimizer: partial
    comm: object
    record_every: int
    checkpoint_every: int
    output: str
    resume: bool
    overwrite: bool
    wandb: str
    progress: bool
    config: dict
    evaluate_every: int | None = None
    watch: Watch | None = None

    def __post_init__(self):
        _require_one_of("precision", self.precision, DTYPES)
        _require_one_of("wandb", self.wandb, WANDB_MODES)
        for name, least in WHOLE_NUMBERS.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number, at least {least}, not {value!r}.")
        self._check_intervals()
        for phase in self.phases.values():
            self.micro_batches(phase, self.comm.workers)
            phase.lr(0)
        worker_device(self.device)
        with torch.device("meta"):
            self.task.model()
        # The optimizer checks its own options.
        self.optimizer([torch.nn.Parameter(torch.empty(1))], lr=1.0, communicator=Single())

    def _check_intervals(self) -> None:
        """Whatever happens every so many steps falls on steps that are recorded."""
        every = self.evaluate_every
        if every is not None:
            if not isinstance(every, int) or every < 1 or every % self.record_every:
                raise ValueError(
                    f"evaluate_every must be a multiple of record_every={self.record_every}, or "
                    f"null, not {every!r}."
                )
            if not self.task.evaluates:
                raise ValueError(
                    f"{type(self.task).__name__} has nothing to evaluate: leave evaluate_every at "
                    "null."
                )
        if self.watch and self.watch.every % self.record_every:
            raise ValueError(
                f"watch.every must be a multiple of record_every={self.record_every}, not "
                f"{self.watch.every}."
            )
        if self.window and self.window % self.record_every:
            raise ValueError(
                f"record_every={self.record_every} does not divide 1 / (1 - beta2) = {self.window} "
                "steps, over which the ratio of the variance is taken: choose a divisor of "
                f"{self.window}."
            )

    def evaluates_at(self, step: int, last: int) -> bool:
        """Whether the model is evaluated after this step, of a run of `last` steps."""
        return self.evaluate_every is not None and (step % self.evaluate_every == 0 or step == last)

    @property
    def folder(self) -> Path:
        return Path(self.output).expanduser()

    @property
    def window(self) -> int | None:
        """The memory of the variance, 1 / (1 - beta2) steps; None without a variance."""
        betas = self.optimizer.keywords.get("betas")
        return betas and round(1 / (1 - betas[1]))

    @property
    def has_warmup(self) -> bool:
        """Whether the optimizer has a warm-up with exact averaging, as 1-bit Adam does."""
        return "warmup" in self.optimizer.keywords

    @property
    def warmup_steps(self) -> int:
        """T_w; if a policy chooses it during the run, the experiment's."""
        warmup = self.optimizer.keywords.get("warmup")
        return warmup if isinstance(warmup, int) else next(iter(self.phases.values())).warmup

    def micro_batches(self, phase: Phase, workers: int) -> tuple[int, int]:
        """(number, size) of the equal micro-batches that make up a worker's part of the batch.

        Raises:
            ValueError: the batch cannot be divided so; the message proposes one that can.
        """
        batch = phase.batch or self.batch
        part, rest = divmod(batch, workers)
        number = -(-part // phase.micro_batch)
        if rest or part % number:
            raise ValueError(
                f"A batch of {batch} cannot be divided among {workers} workers in equal "
                f"micro-batches of at most {phase.micro_batch}: choose workers=N or batch=N so "
                f"that it can, for example batch={self._nearest_batch(phase, workers)}."
            )
        return number, part // number

    def _nearest_batch(self, phase: Phase, workers: int) -> int:
        return workers * phase.micro_batch * max(1, round(self.batch / workers / phase.micro_batch))

    def warnings(self) -> list[str]:
        """What is allowed, but is probably not what was meant."""
        found = []
        if self.has_warmup:
            later = [phase.warmup for phase in self.phases.values()][1:]
            found += [
                f"the warm-up is longer than the run: T_w = {warmup} steps, and phase {name} has "
                f"{phase.steps}, so that nothing will be compressed in it. Lower warmup_steps (15 "
                "to 25 % of the steps is usual)."
                for warmup, (name, phase) in zip(
                    [self.warmup_steps, *later], self.phases.items(), strict=True
                )
                if warmup >= phase.steps
            ]
        mode = os.environ.get("WANDB_MODE", "disabled")
        if self.wandb == "disabled" and mode in ("online", "offline", "run", "dryrun"):
            found.append(
                f"WANDB_MODE={mode} has no effect by itself: add wandb=online or wandb=offline to "
                "record this run in Weights & Biases."
            )
        return found


def worker_device(name: str | None) -> torch.device:
    """The device of this name; by default the GPU that belongs to this worker, if there is one.

    Raises:
        RuntimeError: a GPU was asked for, and this process sees none.
    """
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise RuntimeError(
            f"device={name}, but this process sees no GPU: leave device out, or use device=cpu."
        )
    return (
        torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(name)
    )


def run_from(config: DictConfig) -> Run:
    """The objects that a configuration describes. A key that nothing reads is a TypeError."""
    objects = instantiate(config, _convert_="all")
    options = {key: value for key, value in objects.items() if key not in (*REFERRED_TO, "steps")}
    return Run(**options, config=OmegaConf.to_container(config, resolve=True))


def _require_one_of(option: str, value: str, choices: Iterable[str]) -> None:
    if value not in choices:
        near = get_close_matches(str(value), choices, 1)
        guess = f" Did you mean {near[0]}?" if near else ""
        raise ValueError(f"{option} is one of {', '.join(choices)}, not {value}.{guess}")
