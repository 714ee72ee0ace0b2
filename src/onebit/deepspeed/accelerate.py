"""Hugging Face's Accelerate and its Trainer make the engine themselves."""

from typing import TYPE_CHECKING, Any

from onebit.deepspeed.attach import attach

if TYPE_CHECKING:
    from accelerate import Accelerator


def attach_on_prepare(accelerator: "Accelerator") -> "Accelerator":
    """Attach the engine as soon as accelerator.prepare has made it; returns the accelerator.

    Call it before prepare(model, optimizer, ...). With the Trainer, pass trainer.accelerator before
    trainer.train(): the Trainer loads its checkpoint right after it has made the engine, so that a
    callback would attach too late for it.

    Args:
        accelerator: one that uses DeepSpeed, with a configuration from
            `onebit.deepspeed.engine_config`.

    Raises ValueError if the accelerator does not use DeepSpeed.
    """
    if accelerator.state.deepspeed_plugin is None:
        raise ValueError(
            "this accelerator does not use DeepSpeed, so there is no engine to attach: give it "
            "Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=...)), without cpu=True, "
            "which makes it ignore the plugin, or TrainingArguments(deepspeed=...); with plain DDP "
            "use onebit.ddp.attach"
        )
    prepare = accelerator.prepare

    def prepare_and_attach(*objects: Any, **options: Any) -> Any:
        import deepspeed

        prepared = prepare(*objects, **options)
        for one in prepared if isinstance(prepared, tuple) else (prepared,):
            if isinstance(one, deepspeed.DeepSpeedEngine):
                attach(one)
        return prepared

    accelerator.prepare = prepare_and_attach
    return accelerator
