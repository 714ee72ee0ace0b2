"""Train one task with one optimizer over real ranks, and record it.

    python -m onebit.lab.train experiment=figure_04 profile=smoke optimizer=onebit_adam comm=gloo workers=3 seed=1

conf/config.yaml says what the options are; `--cfg job` prints their values. Exit code 0: the run finished, or it diverged
and is recorded as such; 1: an error.
"""

import math
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import hydra
import numpy as np
import torch
from hydra.errors import HydraException, InstantiationException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from tqdm import tqdm

from onebit.comm import Communicator
from onebit.lab.checkpoint import Checkpoints
from onebit.lab.evaluate import mean_model
from onebit.lab.facts import ENDED, PLACES, check_folder, without
from onebit.lab.launch import WorkerError, hold
from onebit.lab.options import CONF, wrong_override
from onebit.lab.players import Player
from onebit.lab.precision import DTYPES
from onebit.lab.record import Recorder
from onebit.lab.run import Run, run_from, worker_device
from onebit.lab.schedule import Plan
from onebit.lab.watch import Watcher


def train(run: Run, communicator: Communicator, turn: AbstractContextManager) -> None:
    """What each worker does. It holds `turn` where it uses torch's random state, which workers in threads share."""
    rank, device, plan = communicator.rank, worker_device(run.device), Plan(run.phases)
    with turn:
        seed_torch(device, run.seed)
        model = run.task.model().to(device).train()
    players = [
        Player(name, loss, run.optimizer(decayed_and_not(part), lr=1.0, communicator=communicator), plan.lr, run.precision)
        for name, (part, loss) in run.task.players(model).items()
    ]
    optimizers = [player.optimizer for player in players]
    parts = {"weights": model} | {player.name: player for player in players}
    checkpoints = Checkpoints(run.folder / "checkpoints", communicator)
    recorder = Recorder(run.folder, facts_of(run, communicator), run.wandb) if rank == 0 else None
    watcher = Watcher(run.watch, model, optimizers) if run.watch and recorder else None
    start = done = begin(run, parts, checkpoints, recorder)

    diverged = False
    bar = tqdm(
        total=plan.steps, initial=start, desc=f"{run.method} seed {run.seed}", unit="step", dynamic_ncols=True,
        disable=rank > 0 or not run.progress, mininterval=0.5 if sys.stderr.isatty() else 15,
    )  # fmt: skip
    for step in range(start, plan.steps):
        name, phase, phase_start = plan.at(step)
        if step == phase_start > 0:
            for optimizer in optimizers:
                optimizer.restart_warmup(phase.warmup)
        optimizer_phase, lr = optimizers[0].phase, players[0].scheduler.get_last_lr()[0]

        number, size = run.micro_batches(phase, communicator.size)
        examples = run.task.batch(run.seed, step, rank, number * size, phase.length)
        if watcher:
            watcher.before(step + 1)
        losses = {}
        for player in players:
            losses[player.name] = loss = torch.zeros((), device=device)
            for micro in range(number):
                batch = {key: tensor[micro * size : (micro + 1) * size].to(device) for key, tensor in examples.items()}
                accumulates = nullcontext() if micro == number - 1 else player.optimizer.no_sync()
                with turn, accumulates:
                    seed_torch(device, run.seed, step, rank, micro)
                    with torch.autocast(device.type, DTYPES[run.precision], enabled=run.precision != "fp32"):
                        part = player.loss(model, batch) / number
                    (part * player.scale.value).backward()
                loss += part.detach()
            player.step()

        diverged = any(player.diverged for player in players)
        done = step + 1
        if done % run.record_every == 0 or done == plan.steps or diverged:
            losses = {name: mean_over_ranks(communicator, loss.item()) for name, loss in losses.items()}
            diverged = diverged or not all(math.isfinite(losses[player.name]) or player.skipped for player in players)
            if recorder:
                recorder.row(optimizers, losses, step=done, samples=done * run.batch, lr=lr, phase=optimizer_phase)
            if watcher:
                recorder.tensors(watcher.after(done), step=done, samples=done * run.batch)
            sent = tqdm.format_sizeof(sum(optimizer.communication.bytes_sent for optimizer in optimizers), "B")
            bar.set_postfix_str(f"loss {sum(losses.values()):.3f}, {name}, {optimizer_phase}, sent {sent}", refresh=False)
        bar.update()
        if diverged:
            break
        if run.evaluates_at(done, plan.steps):
            evaluate(run, model, communicator, turn, recorder, step=done)
        if run.checkpoint_every and (done % run.checkpoint_every == 0 or done == plan.steps):
            checkpoints.save(done, state_of(parts, done, recorder and recorder.state_dict(optimizers)))
    bar.close()
    if recorder:
        recorder.finish("diverged" if diverged else "finished", done, optimizers)


def evaluate(
    run: Run, model: torch.nn.Module, communicator: Communicator, turn: AbstractContextManager, recorder: Recorder | None, *, step: int
) -> None:
    """Record how good the mean of the workers' models is.

    Rank 0 evaluates alone. The others go on and wait for it in the next collective, for as long as the launcher lets them (`launch.TIMEOUT`).
    """
    averaged = mean_model(model, communicator)
    if recorder:
        with turn:
            device = next(averaged.parameters()).device
            metrics = run.task.evaluate(averaged.eval(), device)
            run.task.illustrate(averaged, device, run.folder)
        recorder.evaluation(metrics, step=step, samples=step * run.batch)


def begin(run: Run, parts: dict, checkpoints: Checkpoints, recorder: Recorder | None) -> int:
    """The number of steps done before: 0, or those of the newest checkpoint, which is loaded into `parts`."""
    if recorder:
        for warning in run.warnings():
            print(f"warning: {warning}", file=sys.stderr)
        if not run.resume:
            checkpoints.delete()
    saved = checkpoints.load() if run.resume else None
    if saved:
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    if recorder:
        if run.resume:
            where = f"goes on at step {saved['step']}" if saved else f"no checkpoint in {run.folder}: from the start"
            print(f"resume: {where}", file=sys.stderr)
        recorder.start(saved and saved["recorder"])
    return saved["step"] if saved else 0


def state_of(parts: dict, step: int, records: dict | None) -> dict:
    """A rank's checkpoint. Data and dropout need no state: they follow from the step."""
    return {name: part.state_dict() for name, part in parts.items()} | {"step": step, "recorder": records}


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
    """Parameter groups of what is trained: no weight decay on biases and normalisations, which are the vectors among the parameters."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [(name, p) for name, p in named if p.ndim > 1]},
        {"params": [(name, p) for name, p in named if p.ndim <= 1], "weight_decay": 0.0},
    ]


def seed_torch(device: torch.device, *coordinates: int) -> None:
    """Make torch's random state on `device` a function of the coordinates (seed, or seed, step, rank, micro-batch)."""
    seed = int(np.random.SeedSequence(coordinates).generate_state(1, np.uint64)[0])
    generator = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]
    generator.manual_seed(seed)


def mean_over_ranks(communicator: Communicator, value: float) -> float:
    """Added in rank order, so that all backends give the same bits."""
    gathered = communicator.all_gather(torch.tensor([value], dtype=torch.float64).view(torch.uint8))
    return sum(gathered.view(torch.float64).flatten().tolist()) / communicator.size


@hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")
def launch(config: DictConfig) -> None:
    try:
        # Before the workers meet, since the first to go on writes into the folder.
        status = check_folder(config)
        if status in ENDED and config.resume:
            print(f"{config.output} holds a run that has {status}: nothing to do.", file=sys.stderr)
            return
        run = run_from(config)
        run.task.prepare()
        held = hold(run.folder) if run.comm.leads else nullcontext()
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    with held:
        run.comm.run(partial(train, run))


def main() -> None:
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come here as they are
    try:
        launch()
    except SystemExit as end:
        # 2: from argparse, which has said only that it does not know an argument.
        raise SystemExit(wrong_override(sys.argv[1:]) if end.code == 2 else end.code) from None
    except InstantiationException as error:
        raise SystemExit(f"error: {error.__cause__ or error}") from None
    except (HydraException, OmegaConfBaseException) as error:
        raise SystemExit(f"error: {wrong_override(sys.argv[1:]) or error}") from None
    except WorkerError as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        print("\nInterrupted; resume=true goes on from the newest checkpoint.", file=sys.stderr, flush=True)
        os._exit(130)  # workers that are threads cannot be ended otherwise


if __name__ == "__main__":
    main()
