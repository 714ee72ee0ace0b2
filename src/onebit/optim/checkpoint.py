"""A parameter's state as users see it, and what of a checkpoint an optimizer may take over."""

import warnings

ERRORS = ("worker_error", "server_error")


class ParameterState(dict):
    """A parameter's entries in `optimizer.state`: those that are stored; the others of its checkpoint are computed when asked for by name."""

    def __init__(self, stored, part, index):
        super().__init__(stored)
        self._part, self._index = part, index

    def __missing__(self, name):
        return self._part.computed(name, self._index)


def errors_to_take(facts, kind, rank, size, chunks, reset_errors):
    """The names of the compression errors that this rank takes over; shared errors have no server part.

    Raises ValueError if they are another optimizer's or rank's, or belong to other buckets, unless `reset_errors`.
    """
    if not facts.get("holds_errors"):
        return ()
    if facts.get("kind", kind) != kind:
        if reset_errors:
            return ()
        raise ValueError(
            f"this checkpoint holds compression errors of {facts['kind']}, which are in other units than those of {kind}: load it into "
            f"{facts['kind']}, or load_state_dict(..., reset_errors=True) to go on without what they hold"
        )
    if facts["errors_are_shared"]:
        return ("worker_error",)
    if (facts["rank"], facts["size"]) == (rank, size) and [
        tuple(chunk) for chunk in facts.get("chunks", ())
    ] == chunks:
        return ("worker_error", "server_error")
    if reset_errors:
        return ()
    if (facts["rank"], facts["size"]) == (rank, size):
        raise ValueError(
            "this checkpoint's compression errors belong to other buckets: set bucket_cap_mb and the groups' compress as they were when it was "
            "saved; or call optimizer.synchronize() before saving; or load_state_dict(..., reset_errors=True) to go on without what they hold"
        )
    raise ValueError(
        f"this checkpoint holds the compression errors of rank {facts['rank']} of {facts['size']}, and this is rank {rank} of {size}. Either "
        "let each rank save and load its own file; or call optimizer.synchronize() before saving, then one file serves every rank and any "
        "number of ranks; or load_state_dict(..., reset_errors=True) to go on without what the errors hold"
    )


def check_state(state_dict, own, options, kind):
    """Raise ValueError if a state is not of an optimizer that keeps the vectors `own` and whose groups have these `options`.

    Warns if it decays weights otherwise.
    """
    for entries in state_dict["state"].values():
        found = [
            name
            for name, value in entries.items()
            if value is not None and name not in ("step", *ERRORS)
        ]
        missing = [name for name in own if name not in found]
        if found and (missing or not own):
            lack = (
                f"lacks {', '.join(missing)}" if missing else f"{kind} keeps nothing of that kind"
            )
            raise ValueError(
                f"the state_dict holds {', '.join(found)} for a parameter, and {lack}: it is another optimizer's. Load it into the one "
                f"that it belongs to, and let {kind} begin without"
            )
        if "exp_avg_sq" in found and "step" not in entries:
            raise ValueError(
                'the state_dict holds moments, but not of how many steps, which their bias correction needs: add a "step" to each '
                "parameter's entries"
            )
    for group in state_dict["param_groups"]:
        lacking = [name for name in options if name not in group and name != "compress"]
        if lacking:
            raise ValueError(
                f"the state_dict's groups lack {', '.join(lacking)}: it is another optimizer's, whose lr and the like mean something "
                f"else. Let {kind} begin without it"
            )
        for option in ("amsgrad", "maximize", "nesterov"):
            if group.get(option):
                raise ValueError(
                    f"the state_dict was made with {option}=True, which there is not here: begin without its state, or set "
                    f"{option}=False in its groups if you mean to go on without"
                )
        if group.get("weight_decay") and group.get("decoupled_weight_decay") is False:
            warnings.warn(
                "the state_dict is of torch.optim.Adam, which adds weight decay to the gradient. Here it is decoupled, as AdamW's, and the "
                "same number acts otherwise",
                stacklevel=3,
            )


def check_shapes(params, names, saved, vectors):
    """Raise ValueError if one of the `vectors` saved for a parameter has another shape."""
    for p, name, entries in zip(params, names, saved):
        for shape in {entries[key].shape for key in entries.keys() & vectors} - {p.shape}:
            raise ValueError(
                f"the checkpoint's state of {name} has shape {tuple(shape)}, the parameter {tuple(p.shape)}: "
                "give the parameters in the order in which they were saved"
            )


def warn_of_lost_errors(state):
    lost = (
        sum(
            float(entries["worker_error"].double().square().sum())
            for entries in state.values()
            if "worker_error" in entries
        )
        ** 0.5
    )
    if lost:
        warnings.warn(
            f"the compression errors of the checkpoint were reset: a worker error of l2 norm {lost:.3g} is lost",
            stacklevel=3,
        )
