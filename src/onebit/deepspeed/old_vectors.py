"""Each number of the removed optimizers' state in the units that it has here."""

from math import log2
from typing import Any

import torch

from onebit.deepspeed import internals
from onebit.deepspeed.internals import Optimizer

NUMBERS = {  # of 1-bit LAMB, for each tensor: its name there -> here
    "lamb_coeff_freeze": "coefficient_average",
    "last_factor": "ratio",
    "scaling_coeff": "scaling",
}


def tensors_of(p: torch.Tensor, group: dict, entry: dict) -> dict[str, torch.Tensor]:
    """A parameter's vectors and numbers without the compression errors.

    `group`: the options of its group, as the file has them.
    """
    if not entry:  # it never had a gradient
        return {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    found = {name: entry[name] for name in ("exp_avg", "exp_avg_sq")}
    if "exp_avg_sq_fresh" in entry:
        found["exp_avg_sq_fresh"] = entry["exp_avg_sq_fresh"]
        numbers = {new: entry[old] for old, new in NUMBERS.items() if old in entry}
        numbers["coefficient"] = numbers["coefficient_average"] * numbers["ratio"]
        found |= {k: torch.tensor(x, dtype=torch.float64) for k, x in numbers.items()}
    if "momentum_accumulator" in entry:
        found |= _path(p, group, entry)
    return found


def _path(p: torch.Tensor, group: dict, entry: dict) -> dict[str, torch.Tensor]:
    """0/1 Adam between two syncs: x_sync, and the u that would lead from there to x.

    There, the accumulator is how far x has gone since x_sync, weight decay included; a sync here
    gives decay x_sync - u / (sqrt(v) + eps), which is x if nothing were lost.
    """
    moved = entry["momentum_accumulator"].to(p.device)
    anchor = p.detach() - moved
    denominator = entry["exp_avg_sq"].to(p.device).sqrt() + group["eps"]
    return {
        "synced_parameter": anchor,
        "accumulator": (_decay(group, entry) * anchor - p.detach()) * denominator
        if moved.any()
        else torch.zeros_like(moved),
    }


def _decay(group: dict, entry: dict) -> float:
    """prod(1 - lr weight_decay) since the last sync, at the learning rate of the file."""
    steps = round(float(entry["lrs"]) / float(group["lr"])) if entry["lrs"] else 0
    return (1 - float(group["lr"]) * group["weight_decay"]) ** steps


# ---- compression errors


def errors_of(
    optimizer: Optimizer, owned: list[tuple], entries: list[dict], tensors: list[dict]
) -> tuple[bool, list[str]]:
    """Put the errors into `tensors`; returns whether it is the compressed phase, and what is lost.

    The saving rank's worker error counts as 1/n of the mean, n being the old number of ranks, which
    rank 0 takes over. Its server error belongs to the first n-th of each tensor, and goes to
    whichever rank serves that part here. `owned`: (parameter, options of its group in the file).
    """
    if not any(_is_compressed(entry) for entry in entries):
        return False, []
    size, is_first = optimizer.communicator.size, optimizer.communicator.rank == 0
    served = []
    for (p, group), entry, found in zip(owned, entries, tensors):
        unit = _unit(group, entry) if entry else 0.0
        found["worker_error"], server = torch.zeros_like(found["exp_avg"]), torch.zeros(p.numel())
        if unit and "worker_error" in entry:
            ranks = entry["corrected_tensor_size"] // entry["server_chunk_size"]
            if is_first:
                worker = entry["worker_error"][: p.numel()].view(p.shape)
                found["worker_error"] = worker * (unit * size / ranks)
            chunk = entry["server_error"][: p.numel()]
            server[: len(chunk)] = chunk * unit
        served.append(server.view(p.shape))
    for i, error in internals.server_errors(optimizer, served).items():
        tensors[i]["server_error"] = error
    return True, _lost(entries)


def _is_compressed(entry: dict) -> bool:
    """Whether the old optimizer had begun to compress: it holds errors, or LAMB its scaling."""
    return "worker_error" in entry or "scaling_coeff" in entry


def _unit(group: dict, entry: dict) -> float:
    """What an error there must be multiplied by to be one of the momentum.

    1-bit Adam: 1. 0/1 Adam compresses the gradient until the variance is frozen, of which the
    momentum takes 1 - beta1, and then minus the sum of lr times the momentum.
    """
    if "var_interval" not in entry:
        return 1.0
    if not _is_frozen(entry):
        return 1 - group["betas"][0]
    rates = float(group["lr"]) * entry["local_step_interval"]
    return -1 / rates if rates else 0.0


def _is_frozen(entry: dict) -> bool:
    """0/1 Adam: whether the variance is no longer updated, and local steps are counted."""
    return bool(entry["local_step_counter"] or entry["lrs"] or entry["local_step_interval"] > 1)


def _lost(entries: list[dict]) -> list[str]:
    with_errors = [entry for entry in entries if "worker_error" in entry]
    if not with_errors:
        return ["the compression errors of all ranks, which DeepSpeed did not save"]
    ranks = with_errors[0]["corrected_tensor_size"] // with_errors[0]["server_chunk_size"]
    lost = []
    if ranks > 1:
        lost.append(
            f"the compression errors of {ranks - 1} of {ranks} ranks, since DeepSpeed saved one "
            "rank's only"
        )
    if any(entry["corrected_tensor_size"] > entry["tensor_size"] for entry in with_errors):
        lost.append("the errors of the old padding")
    return lost


# ---- facts


def own_facts(
    optimizer: Optimizer, groups: list[dict], entries: list[dict], steps: int, holds_errors: bool
) -> dict:
    """What is known of the state beside its tensors. `groups`: with the options of the file."""
    facts: dict[str, Any] = {
        "holds_errors": holds_errors,
        "errors_are_shared": False,
        "with_gradient": [i for i, entry in enumerate(entries) if entry],
    }
    known = next((entry for entry in entries if entry), {})
    if "var_interval" in known:
        return facts | _interval_facts(optimizer, groups, known, steps)
    if "lamb_coeff_freeze" in known:
        facts["averaged_steps"] = steps
    return facts | {
        "variance_steps": steps,
        "variance_is_corrected": holds_errors and optimizer.bias_correction,
    }


def _interval_facts(optimizer: Optimizer, groups: list[dict], entry: dict, t: int) -> dict:
    """0/1 Adam's intervals: events fall on multiples of them there, and go on from the next one."""
    template = internals.facts_of(optimizer.state_dict())["step_sets"]
    variance_scaler, local_scaler = internals.interval_scalers(optimizer)
    options = {
        "variance": (entry["var_interval"], variance_scaler, entry["var_counter"]),
        "syncs": (
            entry["local_step_interval"],
            local_scaler,
            entry["local_step_counter"] // entry["local_step_interval"],
        ),
    }
    sets = {
        name: [(t // interval + 1) * interval, int(log2(interval)) * scaler + counter]
        for name, (interval, scaler, counter) in options.items()
    }
    moved = bool(entry["lrs"])
    return {
        "variance_updates": sets["variance"][1],
        "is_synced": not moved,
        "moved": list(range(sum(len(group["params"]) for group in groups))) if moved else [],
        "rate_sums": [float(entry["lrs"]) for _ in groups],
        "decays": [_decay(group, entry) for group in groups],
        "step_sets": template | sets | {"is_empty": not moved},
    }
