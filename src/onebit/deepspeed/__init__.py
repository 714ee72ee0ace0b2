"""1-bit Adam, 0/1 Adam and 1-bit LAMB in DeepSpeed's engine, which no longer has them.

    optimizer = onebit.deepspeed.from_config("ds_config.json", model.parameters())
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=onebit.deepspeed.engine_config("ds_config.json")
    )
    onebit.deepspeed.attach(engine)

`attach` leaves all averaging and clipping to the optimizer, and saves and loads what belongs to
each rank. The real package is imported only when it is needed: by `attach`, and by `from_config`
if no process group exists yet. docs/from_deepspeed.md has every option and what differs.
"""

from onebit.deepspeed.accelerate import attach_on_prepare
from onebit.deepspeed.attach import attach
from onebit.deepspeed.config import engine_config, from_config
from onebit.deepspeed.old_state import load_state
from onebit.deepspeed.prepare import prepare

__all__ = ["attach", "attach_on_prepare", "engine_config", "from_config", "load_state", "prepare"]
