"""The optimizer's traffic in the engine's monitor, beside the learning rate and the loss."""

from onebit.deepspeed.internals import Engine, Optimizer


def report(engine: Engine, optimizer: Optimizer) -> None:
    """After each step rank 0 writes bytes sent, compression ratio and phase of that step."""
    take_step = engine._take_model_step

    def take_step_and_report(lr_kwargs=None):
        take_step(lr_kwargs)
        if engine.monitor.enabled and engine.global_rank == 0:
            engine.monitor.write_events(events(optimizer, engine.global_samples))

    engine._take_model_step = take_step_and_report


def events(optimizer: Optimizer, samples: int) -> list[tuple[str, float, int]]:
    """(name, value, samples so far) of the last step, as DeepSpeed's monitors take them."""
    last = optimizer.communication.last_step
    values = {
        "onebit_bytes_sent": last.bytes_sent,
        "onebit_compression_ratio": last.compression_ratio,
        "onebit_compressed": float(optimizer.phase == "compressed"),
    }
    return [(f"Train/Samples/{name}", value, samples) for name, value in values.items()]
