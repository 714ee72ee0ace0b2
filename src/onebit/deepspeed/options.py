"""What each option of DeepSpeed's three optimizer blocks is here: honoured, dropped or refused."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from onebit.optim import notices
from onebit.optim.onebit_adam import OneBitAdam
from onebit.optim.onebit_lamb import OneBitLamb
from onebit.optim.validation import nearest
from onebit.optim.zero_one_adam import ZeroOneAdam

LONG_WARMUP = 100_000  # the old optimizers' default for freeze_step and var_freeze_step
TRANSPORT = ("cuda_aware", "comm_backend_name")
SAME_NAME = ("lr", "betas", "eps", "weight_decay")
SHARED = (
    *SAME_NAME,
    "bias_correction",
    "eps_inside_sqrt",
    "max_grad_norm",
    "amsgrad",
    *TRANSPORT,
)


@dataclass(frozen=True)
class Block:
    """One of the three old optimizers.

    Attributes:
        type: its name in a configuration.
        optimizer: the class that takes its place.
        freeze: its option for the length of the warm-up, and the name of that option here.
        renamed: its further options of its own -> their names here.
        defaults: options here that the old optimizer had no choice about, or set otherwise.
    """

    type: str
    optimizer: Callable
    freeze: tuple[str, str]
    renamed: dict[str, str]
    defaults: dict
    combine: Callable[[dict], dict] = lambda params: {}

    @property
    def names(self) -> tuple[str, ...]:
        """All options that the old optimizer took in its block."""
        return (*SHARED, self.freeze[0], *self.renamed, *LAMB_PAIRS.get(self.type, ()))


LAMB_PAIRS = {"OneBitLamb": ("max_coeff", "min_coeff", "factor_max", "factor_min")}


def _lamb_bounds(params: dict) -> dict:
    """The two bounds of LAMB's coefficient and of its ratio, which are pairs here."""
    return {
        "coefficient_bounds": (params.get("min_coeff", 0.01), params.get("max_coeff", 10.0)),
        "ratio_bounds": (params.get("factor_min", 0.5), params.get("factor_max", 4.0)),
    }


BLOCKS = {
    block.type.lower(): block
    for block in (
        Block("OneBitAdam", OneBitAdam, ("freeze_step", "warmup"), {}, {}),
        Block(
            "ZeroOneAdam",
            ZeroOneAdam,
            ("var_freeze_step", "variance_freeze_step"),
            {
                "var_update_scaler": "variance_update_scaler",
                "local_step_scaler": "local_step_scaler",
                "local_step_clipper": "local_step_clipper",
            },
            {},
        ),
        Block(
            "OneBitLamb",
            OneBitLamb,
            ("freeze_step", "warmup"),
            {"coeff_beta": "coefficient_beta", "factor_threshold": "ratio_threshold"},
            {"ratio_of": "root", "scale": "fused"},
            _lamb_bounds,
        ),
    )
}


def block_of(type_name: str) -> Block:
    """The old optimizer of this name, in any case of letters. ValueError for any other name."""
    found = BLOCKS.get(str(type_name).lower())
    if found is not None:
        return found
    names = [block.type for block in BLOCKS.values()]
    near = nearest(str(type_name).lower(), list(BLOCKS), cutoff=0.6)
    hint = f"did you mean {BLOCKS[near].type!r}?" if near else f"those were {', '.join(names)}."
    raise ValueError(
        f"the optimizer type {type_name!r} is not one that DeepSpeed removed: {hint} Leave every "
        "other optimizer to DeepSpeed's own configuration"
    )


def translate(block: Block, params: dict) -> dict:
    """The old options `params` as keyword arguments of `block.optimizer`.

    Raises ValueError for an option that never existed, whose value is missing ("auto"), or that
    cannot be honoured. Warns of each that is dropped or that means something else.
    """
    _check_names(block, params)
    _refuse(block, params)
    options = {name: params[name] for name in SAME_NAME if name in params}
    if "betas" in options:
        options["betas"] = tuple(options["betas"])
    options |= {new: params[old] for old, new in block.renamed.items() if old in params}
    options |= block.combine(params) | block.defaults
    options[block.freeze[1]] = _freeze_step(block, params)
    options["bias_correction"] = _bias_correction(block, params)
    transport = [name for name in TRANSPORT if name in params]
    if transport:
        say(f"{', '.join(transport)}: dropped, they concern the old transport; onebit needs none")
    return options


def _check_names(block: Block, params: dict) -> None:
    for name, value in params.items():
        if name not in block.names:
            near = nearest(name, block.names, cutoff=0.5)
            hint = f"did you mean {near!r}?" if near else f"it took {', '.join(block.names)}"
            raise ValueError(f"DeepSpeed's {block.type} never had an option {name!r}: {hint}")
        check_not_auto(f"optimizer.params.{name}", value)


def check_not_auto(name: str, value: Any) -> None:
    if value == "auto":
        raise ValueError(
            f'{name} is "auto", which only the Hugging Face Trainer fills in: write the value '
            "into the configuration, or give it to from_config(config, params, name=value)"
        )


def _refuse(block: Block, params: dict) -> None:
    if params.get("amsgrad"):
        raise ValueError(
            f"amsgrad: {block.type} never had this variant, and DeepSpeed refused it too: leave it "
            "out"
        )
    if params.get("eps_inside_sqrt"):
        raise ValueError(
            f"eps_inside_sqrt: DeepSpeed's {block.type} accepted it and never used it; here eps is "
            "added to the square root as well. Leave it out, and nothing changes"
        )


def _freeze_step(block: Block, params: dict) -> int:
    name = block.freeze[0]
    if name not in params:
        say(
            f"{name} is missing: as in DeepSpeed the variance is frozen only after "
            f"{LONG_WARMUP:,} steps, and until then nothing is compressed by 1-bit Adam and 1-bit "
            f"LAMB. Set {name} to 15 to 25 % of all steps (0/1 Adam: to the end of the "
            "learning-rate warm-up)"
        )
        return LONG_WARMUP
    if params[name] < 1:
        say(f"{name}={params[name]}: one step of warm-up is taken, as there; none is impossible")
        return 1
    return params[name]


def _bias_correction(block: Block, params: dict) -> bool:
    """The old optimizers accepted it and never corrected anything."""
    if params.get("bias_correction"):
        say(
            f"bias_correction: true is honoured here, while DeepSpeed's {block.type} ignored it: "
            "the first steps are larger. Set it to false for the old behaviour"
        )
        return True
    return False


def say(message: str) -> None:
    """A warning on rank 0."""
    if int(os.environ.get("RANK") or 0) == 0:
        notices.warn(message)
