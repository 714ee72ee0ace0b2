"""Whether runs may be compared with each other, and whether a run may be continued.

Both are decided by run.json. Two runs may be compared if they differ in the optimizer and the seed
only. A run may be continued with the options that it was started with.
"""

from pathlib import Path

from omegaconf import DictConfig

from onebit.lab.config import plain
from onebit.lab.runs.metadata import read_run

# Options that say where a machine keeps its files. They stand at any depth, and not in run.json.
PLACES = ("cache", "data_root", "output")
# Options that may change when a run is continued, since they do not change what it computes.
INCIDENTAL = (
    *PLACES,
    "checkpoint_every",
    "comm",
    "device",
    "overwrite",
    "progress",
    "resume",
    "wandb",
    "workers",
)
# Options in which runs that are compared may differ.
OWN = {"seed", "optimizer", "method"}
# {option: {a name in older run.json files: the present name}}
RENAMED = {"scale": {"steps": "steps_divisor", "length": "length_divisor"}}
# {an option of an optimizer: what its absence from an older run.json means}
ABSENT = {"bound_steps": False}


def without(options: object, names: tuple[str, ...]) -> object:
    """The options without those of these names, at any depth."""
    if not isinstance(options, dict):
        return options
    return {name: without(value, names) for name, value in options.items() if name not in names}


def by_class_name(options: object) -> object:
    """The options with every `_target_` cut down to the name of its class, at any depth.

    Runs are compared by what they computed. A class that has moved to another module is still the
    same class.
    """
    if isinstance(options, dict):
        return {
            name: value.rpartition(".")[2] if name == "_target_" else by_class_name(value)
            for name, value in options.items()
        }
    return [by_class_name(value) for value in options] if isinstance(options, list) else options


def what_is_computed(config: dict) -> dict:
    """A configuration without what does not change the results, under the present names."""
    options = by_class_name(without(config, INCIDENTAL))
    options["optimizer"] = optimizer_options(config)
    for option, present in RENAMED.items():
        if option in options:
            options[option] = {present.get(n, n): value for n, value in options[option].items()}
    return options


def optimizer_options(config: dict) -> dict:
    """The options of a configuration's optimizer, without those that say what absence says."""
    options = by_class_name(without(config.get("optimizer", {}), INCIDENTAL))
    return {name: value for name, value in options.items() if (name, value) not in ABSENT.items()}


# ---- runs beside each other


def require_alike(records: list[dict], apart_from: tuple[str, ...] = ()) -> None:
    """Raise ValueError if two runs cannot be compared.

    Runs may differ in the seed, the optimizer and the options `apart_from`. They may not differ in
    another option, in the number of workers or in the data.
    """
    first_of = {}
    for record in records:
        for other in (records[0], first_of.setdefault(record["optimizer"], record)):
            names = [name for name in differing(record, other) if name not in apart_from]
            if names:
                one, two = (str(r.get("folder", "the run to come")) for r in (other, record))
                raise ValueError(
                    f"These runs differ in {', '.join(names)}, so they cannot be compared: "
                    f"{one}, {two}."
                )


def differing(one: dict, two: dict) -> list[str]:
    """The names of the options, or of the data, that stand in the way of comparing two runs.

    Of the options of two different optimizers, only those that both have can differ. If the two
    optimizers' learning rates have different units (see `units`), the rates and the options of the
    optimizers are not compared. Nor are the rates of two optimizers if the scale names one for each
    in `rates`, which both runs then have alike.
    """
    same_units = units(one) == units(two)
    own_rates = one["optimizer"] != two["optimizer"] and "rates" in one["config"].get("scale", {})
    a, b = (_options(r, with_rate=same_units and not own_rates) for r in (one, two))
    names = [name for name in a.keys() | b.keys() if a.get(name) != b.get(name)]
    if same_units:
        names += _differing_optimizers(one, two)
    known = ((name, one.get(name), two.get(name)) for name in ("corpus_sha256", "data"))
    return sorted(names) + [
        name for name, *values in known if None not in values and values[0] != values[1]
    ]


def units(record: dict) -> tuple[bool, bool]:
    """What decides the units of a learning rate, and of weight decay.

    Whether the step is divided by the root of a variance, and whether it is multiplied by a
    coefficient, as LAMB's is by the norm of the weights.
    """
    options = record["config"].get("optimizer", {})
    return "betas" in options, options.get("coefficient_bounds", [1.0, 1.0]) != [1.0, 1.0]


def _options(record: dict, with_rate: bool) -> dict:
    """The options in which runs must agree, with or without the peak of the learning rate."""
    options = {
        name: value for name, value in what_is_computed(record["config"]).items() if name not in OWN
    } | {"workers": record["workers"]}
    if not with_rate:
        del options["lr"]
        options["phases"] = {
            name: phase | {"lr": phase["lr"] | {"peak": None}}
            for name, phase in options["phases"].items()
        }
    return options


def _differing_optimizers(one: dict, two: dict) -> list[str]:
    """The optimizers' options that differ; of one optimizer, also those that one run lacks."""
    a, b = (optimizer_options(r["config"]) for r in (one, two))
    names = [name for name in a.keys() & b.keys() - {"_target_"} if a[name] != b[name]]
    if one["optimizer"] == two["optimizer"]:
        names += a.keys() ^ b.keys()
    return [f"optimizer.{name}" for name in names]


# ---- a run and its continuation


def check_folder(config: DictConfig) -> str | None:
    """The status of the run in `config.output`; None if there is none, or it is to be overwritten.

    Raises:
        ValueError: that run would be lost, or continued with other options than it has.
    """
    _check_options(config)
    run = read_run(Path(config.output).expanduser())
    if not run or config.overwrite:
        return None
    if not config.resume:
        raise ValueError(
            f"{config.output} holds a run ({run['status']}): continue it with resume=true, start "
            "again with overwrite=true, or choose another folder with output=DIR."
        )
    own, saved = what_is_computed(plain(config)), what_is_computed(run["config"])
    names = [key for key in own.keys() | saved.keys() if own.get(key) != saved.get(key)]
    if names:
        raise ValueError(
            f"{config.output} holds a run with another {', '.join(sorted(names))}: resume=true "
            "needs the same options. Start again with overwrite=true, or choose another folder "
            "with output=DIR."
        )
    return run["status"]


def _check_options(config: DictConfig) -> None:
    if not config.output:
        raise ValueError("output is empty: name a folder, or leave the option out.")
    for name in ("resume", "overwrite", "progress"):
        if not isinstance(config[name], bool):
            raise ValueError(f"{name} is true or false, not {config[name]}.")
    if config.resume and config.overwrite:
        raise ValueError(
            "resume=true continues a run and overwrite=true starts it again: leave one of them out."
        )
