"""The configuration: composing it, and saying in a line what is wrong with it."""

import inspect
import json
from difflib import get_close_matches
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

CONF = Path(__file__).parents[3] / "conf"

# ${divided:152000,130}: a number of the paper's, in a run that many times smaller
OmegaConf.register_new_resolver(
    "divided", lambda number, by: max(1, round(number / by)), replace=True
)
# ${share:0.05,${phases}}: steps that are this share of the first phase
OmegaConf.register_new_resolver(
    "share",
    lambda share, phases: max(1, round(share * next(iter(phases.values())).steps)),
    replace=True,
)
OmegaConf.register_new_resolver("product", lambda a, b: a * b, replace=True)


def composed(overrides: list[str]) -> DictConfig:
    """The configuration that `python -m onebit.lab.train OVERRIDES` would use."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides)


def plain(config: DictConfig) -> dict:
    """Its values, resolved, as run.json holds them."""
    return json.loads(json.dumps(OmegaConf.to_container(config, resolve=True)))


def wrong_override(arguments: list[str]) -> str | None:
    """The first argument that names no option or no choice, with the nearest that exists; None if all do."""
    groups = {}
    for path in CONF.rglob("*/*.yaml"):
        groups.setdefault(path.parent.relative_to(CONF).as_posix(), []).append(path.stem)
    overrides = [argument.lstrip("+~-").partition("=") for argument in arguments]
    chosen = [f"{key}={value}" for key, _, value in overrides if value in groups.get(key, ())]
    options = [*groups, *_keys(composed(chosen))]
    for argument, (key, _, value) in zip(arguments, overrides, strict=True):
        if key not in options:
            return (
                _unlisted(key, value, composed(chosen))
                or f"There is no option {key}{_nearest(key, options)}"
            )
        if key in groups and value not in groups[key]:
            return f"{key} has no {value}{_nearest(value, groups[key])} It has: {', '.join(sorted(groups[key]))}."
        if argument.startswith("-"):
            return f"Options have no dashes: write {key}={value or 'VALUE'}."
    return None


def _unlisted(key: str, value: str, config: DictConfig) -> str | None:
    """What to write if the key is an option of the optimizer that the configuration leaves at its default."""
    group, _, name = key.partition(".")
    if (
        group == "optimizer"
        and name in inspect.signature(get_class(config.optimizer._target_)).parameters
    ):
        return f"{key} is at its default and not listed: write +{key}={value or 'VALUE'} to set it."
    return None


def _nearest(name: str, names: list[str]) -> str:
    """Close to the whole name, or to its last part."""
    names = [option for option in names if not option.rpartition(".")[2].startswith("_")]
    last = {option.rpartition(".")[2]: option for option in reversed(names)}
    near = get_close_matches(name, names, 1, 0.6) or [
        last[n] for n in get_close_matches(name.rpartition(".")[2], last, 1, 0.5)
    ]
    return f". Did you mean {near[0]}?" if near else "."


def _keys(config: DictConfig, prefix: str = "") -> list[str]:
    """All keys, dotted."""
    found = []
    for key in config:
        found.append(prefix + key)
        child = config._get_node(key)
        if isinstance(child, DictConfig) and not child._is_interpolation() and not child._is_none():
            found += _keys(child, f"{prefix}{key}.")
    return found
