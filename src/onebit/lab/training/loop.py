"""The training loop: what each worker of a run does."""

import math
import sys
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from onebit.comm import Communicator
from onebit.lab.runs.compare import PLACES, without
from onebit.lab.runs.metadata import read_run
from onebit.lab.runs.recorder import Recorder
from onebit.lab.runs.state_log import Watcher
from onebit.lab.training.checkpoint import Checkpoints
from onebit.lab.training.evaluate import mean_model
from onebit.lab.training.player import Player
from onebit.lab.training.precision import DTYPES
from onebit.lab.training.run import Run, worker_device
from onebit.lab.training.schedule import Phase, Plan


def train(run: Run, communicator: Communicator, turn: AbstractContextManager) -> None:
    """What each worker does.

    It holds the lock `turn` while it uses torch's random state, which workers in threads share.
    """
    Training(run, communicator, turn).train()


class Training:
    """A worker's part of a run: its model and players, and on rank 0 the records."""

    def __init__(self, run: Run, communicator: Communicator, turn: AbstractContextManager):
        self.run, self.communicator, self.turn = run, communicator, turn
        self.rank = communicator.rank
        self.device = worker_device(run.device)
        self.plan = Plan(run.phases)
        with turn:
            seed_torch(self.device, run.seed)
            self.model = run.task.model().to(self.device).train()
        self.players = [
            Player(
                name,
                loss,
                run.optimizer(decayed_and_not(part), lr=1.0, communicator=communicator),
                self.plan.lr,
                run.precision,
            )
            for name, (part, loss) in run.task.players(self.model).items()
        ]
        self.optimizers = [player.optimizer for player in self.players]
        self.parts = {"weights": self.model} | {player.name: player for player in self.players}
        self.checkpoints = Checkpoints(run.folder / "checkpoints", communicator)
        self.recorder = self.watcher = None
        if self.rank == 0:
            self.recorder = Recorder(run.folder, facts_of(run, communicator), run.wandb)
            self.watcher = run.watch and Watcher(run.watch, self.model, self.optimizers)

    def train(self) -> None:
        """Train from the newest checkpoint, or from the beginning, to the end."""
        done, diverged = self.begin(), False
        with self.progress(done) as bar:
            while done < self.plan.steps and not diverged:
                phase = self.enter(done)
                facts = {
                    "lr": self.players[0].scheduler.get_last_lr()[0],
                    "phase": self.optimizers[0].phase,
                }
                losses = self.step(done, phase)
                done += 1
                diverged = self.record(done, losses, facts, bar)
                bar.update()
                if not diverged:
                    self.keep(done)
        if self.recorder:
            self.recorder.finish("diverged" if diverged else "finished", done, self.optimizers)

    def progress(self, done: int) -> tqdm:
        """A bar over the steps, shown by rank 0."""
        return tqdm(
            total=self.plan.steps,
            initial=done,
            desc=f"{self.run.method} seed {self.run.seed}",
            unit="step",
            dynamic_ncols=True,
            disable=self.rank > 0 or not self.run.progress,
            mininterval=0.5 if sys.stderr.isatty() else 15,
        )

    def begin(self) -> int:
        """Load the newest checkpoint, if the run resumes; returns the number of its steps, or 0."""
        run = self.run
        if self.recorder and not run.resume:
            self.checkpoints.delete()
        saved = self.checkpoints.load() if run.resume else None
        if saved:
            for name, part in self.parts.items():
                part.load_state_dict(saved[name])
        if self.recorder:
            for warning in run.warnings():
                print(f"warning: {warning}", file=sys.stderr)
            if saved:
                print(f"The run resumes at step {saved['step']}.", file=sys.stderr)
            elif run.resume and read_run(run.folder):
                print(
                    f"{run.folder} has no checkpoint: the run starts from the beginning.",
                    file=sys.stderr,
                )
            self.recorder.start(saved and saved["recorder"])
        return saved["step"] if saved else 0

    def enter(self, step: int) -> Phase:
        """The phase of the plan that `step`, counted from 0, belongs to.

        The first step of each phase but the first begins a new warm-up.
        """
        _, phase, phase_start = self.plan.at(step)
        if step == phase_start > 0:
            for optimizer in self.optimizers:
                optimizer.restart_warmup(phase.warmup)
        return phase

    def step(self, step: int, phase: Phase) -> dict[str, Tensor]:
        """Each player takes a step; returns their losses on the worker's part of the batch."""
        number, size = self.run.micro_batches(phase, self.communicator.size)
        examples = self.run.task.batch(self.run.seed, step, self.rank, number * size, phase.length)
        if self.watcher:
            self.watcher.before(step + 1)
        losses = {}
        for player in self.players:
            losses[player.name] = loss = torch.zeros((), device=self.device)
            for micro in range(number):
                batch = {
                    key: tensor[micro * size : (micro + 1) * size].to(self.device)
                    for key, tensor in examples.items()
                }
                with nullcontext() if micro == number - 1 else player.optimizer.no_sync():
                    loss += self.backward(player, batch, number, (step, self.rank, micro))
            player.step()
        return losses

    def backward(
        self,
        player: Player,
        batch: dict[str, Tensor],
        number: int,
        coordinates: tuple[int, int, int],
    ) -> Tensor:
        """Add the gradient of one of `number` micro-batches to those of the player's parameters.

        Returns the loss on it, divided by `number`, so that the sum over all of them is a mean.
        """
        precision = self.run.precision
        with self.turn:
            seed_torch(self.device, self.run.seed, *coordinates)
            with torch.autocast(self.device.type, DTYPES[precision], enabled=precision != "fp32"):
                loss = player.loss(self.model, batch) / number
            (loss * player.scale.value).backward()
        return loss.detach()

    def record(self, done: int, losses: dict[str, Tensor], facts: dict, bar: tqdm) -> bool:
        """Record a row if one is due after `done` steps; returns whether the run has diverged."""
        run = self.run
        diverged = any(player.diverged for player in self.players)
        if not (done % run.record_every == 0 or done == self.plan.steps or diverged):
            return False
        means = {
            name: mean_over_ranks(self.communicator, loss.item()) for name, loss in losses.items()
        }
        diverged = diverged or not all(
            math.isfinite(means[player.name]) or player.skipped for player in self.players
        )
        samples = self.plan.samples(done, run.batch)
        if self.recorder:
            self.recorder.row(self.optimizers, means, step=done, samples=samples, **facts)
            if self.watcher:
                self.recorder.tensors(self.watcher.after(done), step=done, samples=samples)
            bar.set_postfix_str(self.progress_text(done, means, facts["phase"]), refresh=False)
        return diverged

    def progress_text(self, done: int, losses: dict[str, float], phase: str) -> str:
        """What the bar says: the loss, the phases, and the bytes that the whole run has sent."""
        name, *_ = self.plan.at(done - 1)
        shown = [f"loss {sum(losses.values()):.3f}", name]
        if self.run.has_warmup:
            shown.append(phase)
        sent = tqdm.format_sizeof(self.recorder.traffic(self.optimizers)["bytes_sent"], "B")
        return ", ".join([*shown, f"sent {sent}"])

    def keep(self, done: int) -> None:
        """Evaluate, and save a checkpoint, if they are due."""
        run = self.run
        if run.evaluates_at(done, self.plan.steps):
            self.evaluate(done)
        if run.checkpoint_every and (done % run.checkpoint_every == 0 or done == self.plan.steps):
            self.checkpoints.save(done, self.state(done))

    def evaluate(self, done: int) -> None:
        """Record how good the mean of the workers' models is.

        Rank 0 evaluates alone. The others continue, and wait for it in the next collective, for
        `workers.TIMEOUT` seconds at most.
        """
        averaged = mean_model(self.model, self.communicator)
        if self.recorder:
            with self.turn:
                metrics = self.run.task.evaluate(averaged.eval(), self.device)
                self.run.task.illustrate(averaged, self.device, self.run.folder)
            samples = self.plan.samples(done, self.run.batch)
            self.recorder.evaluation(metrics, step=done, samples=samples)

    def state(self, done: int) -> dict:
        """This rank's checkpoint. Data and dropout follow from the step, and have no state."""
        records = self.recorder and self.recorder.state_dict(self.optimizers)
        return {name: part.state_dict() for name, part in self.parts.items()} | {
            "step": done,
            "recorder": records,
        }


def facts_of(run: Run, communicator: Communicator) -> dict:
    """What run.json says before the first step."""
    return {
        "experiment": run.experiment,
        "profile": run.profile,
        "optimizer": run.method,
        "seed": run.seed,
        "config": without(run.config, PLACES),
        "workers": communicator.size,
        "warmup_steps": run.warmup_steps,
        "total_steps": Plan(run.phases).steps,
        **run.task.description(),
    }


def decayed_and_not(model: torch.nn.Module) -> list[dict]:
    """Parameter groups of what is trained.

    Biases and the parameters of normalisation layers, which are the vectors among the parameters,
    have no weight decay.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [(name, p) for name, p in named if p.ndim > 1]},
        {"params": [(name, p) for name, p in named if p.ndim <= 1], "weight_decay": 0.0},
    ]


def seed_torch(device: torch.device, *coordinates: int) -> None:
    """Make torch's random state on `device` a function of the coordinates.

    These are the seed for the initial weights, and (seed, step, rank, micro-batch) for a loss.
    """
    seed = int(np.random.SeedSequence(coordinates).generate_state(1, np.uint64)[0])
    generator = (
        torch.default_generator
        if device.type == "cpu"
        else torch.cuda.default_generators[device.index]
    )
    generator.manual_seed(seed)


def mean_over_ranks(communicator: Communicator, value: float) -> float:
    """The mean of the ranks' values, added in rank order, so that all backends give equal bits."""
    gathered = communicator.all_gather(torch.tensor([value], dtype=torch.float64).view(torch.uint8))
    return sum(gathered.view(torch.float64).flatten().tolist()) / communicator.size
