"""What a run is told: the configuration, as objects."""

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

# Options that only other options read, as ${...}.
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


@dataclass(frozen=True, kw_only=True)
class Run:
    """The options of conf/config.yaml, which says what they are, as objects; `config` is all of them as plain values.

    evaluate_every: steps from one evaluation to the next, the last of which comes at the end; the scale of a task that can be
        evaluated sets it. None: never.
    watch: what is recorded of the optimizer's state; None: nothing.
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
        _require_one_of("wandb", self.wandb, ("disabled", "offline", "online"))
        for name, least in (
            ("seed", 0),
            ("batch", 1),
            ("record_every", 1),
            ("checkpoint_every", 0),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number, at least {least}, not {value!r}.")
        self._check_evaluation()
        if self.watch and self.watch.every % self.record_every:
            raise ValueError(
                f"watch.every must be a multiple of record_every={self.record_every}, not {self.watch.every}."
            )
        if self.window and self.window % self.record_every:
            raise ValueError(
                f"record_every={self.record_every} does not divide 1 / (1 - beta2) = {self.window} steps, over which the ratio of the variance is "
                f"taken: choose a divisor of {self.window}."
            )
        for phase in self.phases.values():
            self.micro_batches(phase, self.comm.workers)
            phase.lr(0)
        worker_device(self.device)
        with torch.device("meta"):
            self.task.model()
        self.optimizer(
            [torch.nn.Parameter(torch.empty(1))], lr=1.0, communicator=Single()
        )  # it checks its own options

    def _check_evaluation(self) -> None:
        every = self.evaluate_every
        if every is None:
            return
        if not isinstance(every, int) or every < 1 or every % self.record_every:
            raise ValueError(
                f"evaluate_every must be a multiple of record_every={self.record_every}, or null, not {every!r}."
            )
        if not self.task.evaluates:
            raise ValueError(
                f"{type(self.task).__name__} has nothing to evaluate: leave evaluate_every at null."
            )

    def evaluates_at(self, step: int, last: int) -> bool:
        """Whether the model is evaluated after this step."""
        return self.evaluate_every is not None and (step % self.evaluate_every == 0 or step == last)

    @property
    def folder(self) -> Path:
        return Path(self.output).expanduser()

    @property
    def window(self) -> int | None:
        """The memory of the variance, 1 / (1 - beta2) steps; None for an optimizer without one."""
        betas = self.optimizer.keywords.get("betas")
        return betas and round(1 / (1 - betas[1]))

    @property
    def warmup_steps(self) -> int:
        """T_w; where a policy is to choose it, the experiment's."""
        warmup = self.optimizer.keywords.get("warmup")
        return warmup if isinstance(warmup, int) else next(iter(self.phases.values())).warmup

    def micro_batches(self, phase: Phase, workers: int) -> tuple[int, int]:
        """(number, size) of the micro-batches that make a worker's part of the batch."""
        part, rest = divmod(self.batch, workers)
        number = -(-part // phase.micro_batch)
        if rest or part % number:
            raise ValueError(
                f"A batch of {self.batch} cannot be divided among {workers} workers in equal micro-batches of at most "
                f"{phase.micro_batch}: choose workers=N or batch=N so that it can, for example "
                f"batch={workers * phase.micro_batch * max(1, round(self.batch / workers / phase.micro_batch))}."
            )
        return number, part // number

    def warnings(self) -> list[str]:
        """What is allowed, but hardly meant."""
        if "warmup" not in self.optimizer.keywords:
            return []
        warmups = [self.warmup_steps, *(phase.warmup for phase in list(self.phases.values())[1:])]
        return [
            f"the warm-up is longer than the run: T_w = {warmup} steps, and phase {name} has {phase.steps}, so nothing will be "
            "compressed in it. Lower warmup_steps (15 to 25 % of the steps is usual)."
            for warmup, (name, phase) in zip(warmups, self.phases.items(), strict=True)
            if warmup >= phase.steps
        ]


def worker_device(name: str | None) -> torch.device:
    """`name`, or a GPU if there is one: the one that the launcher has bound this worker to."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise RuntimeError(
            f"device={name}, but this process sees no GPU: leave device out, or take device=cpu."
        )
    return (
        torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(name)
    )


def run_from(config: DictConfig) -> Run:
    """The objects that a configuration describes. A key that nobody reads is a TypeError."""
    objects = instantiate(config, _convert_="all")
    options = {key: value for key, value in objects.items() if key not in REFERRED_TO}
    return Run(**options, config=OmegaConf.to_container(config, resolve=True))


def _require_one_of(option: str, value: str, choices) -> None:
    if value not in choices:
        near = get_close_matches(str(value), choices, 1)
        guess = f" Did you mean {near[0]}?" if near else ""
        raise ValueError(f"{option} is one of {', '.join(choices)}, not {value}.{guess}")
