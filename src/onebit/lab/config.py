"""Compose the configuration of a run, and explain in one line what is wrong with it."""

import inspect
import json
from difflib import get_close_matches
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

CONF = Path(__file__).parents[3] / "conf"


# ---- resolvers: what ${name:...} in conf/ computes


def divided(number: float, divisor: float) -> int:
    """A number of the paper's for a run that is smaller by `divisor`: rounded, and at least 1."""
    return max(1, round(number / divisor))


def share(part: float, phases: DictConfig) -> int:
    """So many steps as are this part of the first phase's steps, at least 1."""
    return max(1, round(part * _first(phases).steps))


def rate_warmup(phases: DictConfig, warmup_steps: int, divisor: float) -> int:
    """The steps in which the learning rate of the first phase rises to its peak.

    A schedule counts the paper's steps, so that its warm-up is divided by `divisor`. If the rate
    does not rise at all, this is T_w, `warmup_steps`.
    """
    rise = _first(phases).lr.get("warmup")
    return warmup_steps if rise is None else divided(rise, divisor)


def memory(warmup_steps: int, times: float, at_most: float) -> float:
    """The beta2 whose memory, 1 / (1 - beta2) steps, is T_w / `times`, a whole number of steps.

    It is at most `at_most`.
    """
    return min(1 - 1 / max(1, round(warmup_steps / times)), at_most)


def _first(phases: DictConfig) -> DictConfig:
    return next(iter(phases.values()))


for _resolver in (divided, share, rate_warmup, memory):
    OmegaConf.register_new_resolver(_resolver.__name__, _resolver, replace=True)
OmegaConf.register_new_resolver("product", lambda a, b: a * b, replace=True)


# ---- composing


def composed(overrides: list[str]) -> DictConfig:
    """The configuration that `python -m onebit.lab.train OVERRIDES` uses."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return with_total_steps(compose("config", overrides))


def with_total_steps(config: DictConfig) -> DictConfig:
    """The same configuration, with scale.steps_divisor such that all phases have `steps` in total.

    The warm-up, the learning rate's schedule and all else that is a number of steps follow from
    the divisor. Without `steps` nothing changes.

    Raises:
        ValueError: `steps` is no whole number, or too small for all phases to have one.
    """
    wanted = config.steps
    if wanted is None:
        return config
    if not isinstance(wanted, int) or wanted < len(config.phases):
        raise ValueError(
            f"steps is the total number of steps: a whole number, at least {len(config.phases)}, "
            f"not {wanted!r}."
        )
    config.scale.steps_divisor = 1
    divisor = total_steps(config) / wanted
    # Each phase rounds its own steps, so that the sum may miss the wanted number by a step.
    for correction in (1, 1 + 0.4 / wanted):
        config.scale.steps_divisor = divisor * correction
        if total_steps(config) == wanted:
            return config
    raise ValueError(
        f"steps={wanted} cannot be divided among the phases {', '.join(config.phases)} in the "
        f"paper's proportion: choose steps={total_steps(config)}."
    )


def total_steps(config: DictConfig) -> int:
    """The steps of all phases."""
    return sum(phase.steps for phase in config.phases.values())


def plain(config: DictConfig) -> dict:
    """The resolved values as plain Python, as run.json holds them."""
    return json.loads(json.dumps(OmegaConf.to_container(config, resolve=True)))


# ---- what is wrong with an override


def wrong_override(arguments: list[str]) -> str | None:
    """Explain the first argument that names no option or no choice; None if all are right.

    The explanation names the option or choice that is nearest to what was written.
    """
    groups = {}
    for path in CONF.rglob("*/*.yaml"):
        groups.setdefault(path.parent.relative_to(CONF).as_posix(), []).append(path.stem)
    overrides = [argument.lstrip("+~-").partition("=") for argument in arguments]
    chosen = [f"{key}={value}" for key, _, value in overrides if value in groups.get(key, ())]
    config = composed(chosen)
    options = [*groups, *_keys(config)]
    for argument, (key, _, value) in zip(arguments, overrides, strict=True):
        if key not in options:
            return (
                _unlisted(key, value, config) or f"There is no option {key}{_nearest(key, options)}"
            )
        if key in groups and value not in groups[key]:
            return (
                f"{key} has no {value}{_nearest(value, groups[key])} "
                f"It has: {', '.join(sorted(groups[key]))}."
            )
        if argument.startswith("-"):
            return f"Options have no dashes: write {key}={value or 'VALUE'}."
    return None


def _unlisted(key: str, value: str, config: DictConfig) -> str | None:
    """What to write if the key is an option of the optimizer that conf/ leaves at its default."""
    group, _, name = key.partition(".")
    if group != "optimizer":
        return None
    if name not in inspect.signature(get_class(config.optimizer._target_)).parameters:
        return None
    return f"{key} is at its default and not listed: write +{key}={value or 'VALUE'} to set it."


def _nearest(name: str, names: list[str]) -> str:
    """A question that proposes the nearest name: by the whole of it, or else by its last part."""
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
