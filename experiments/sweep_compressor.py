"""How much must be sent? 1-bit Adam with other compressors, and with one scale for all tensors.

The papers have no such figure. To train one variant by hand, add its changes to 1-bit Adam's:

    python -m onebit.lab.train experiment=figure_04 optimizer=onebit_adam method=onebit_adam_4bit \\
        '+optimizer.compressor={_target_:onebit.compression.Quantize,_partial_:true,bits:4}'

`make plan-sweep-compressor` prints the options of every variant.
"""

from onebit.lab.report.artifact import Sweep, Variant, main


def compressor(name: str, options: str) -> tuple[str, ...]:
    """The change to another compressor of the momentum."""
    target = f"_target_:onebit.compression.{name},_partial_:true,{options}"
    return (f"+optimizer.compressor={{{target}}}",)


# One scale for all tensors, whose momenta are scaled alike at the freeze, is 1-bit LAMB without its
# coefficients.
ONE_SCALE = (
    "optimizer._target_=onebit.OneBitLamb",
    "+optimizer.coefficient_bounds=[1.0,1.0]",
    "+optimizer.coefficient_beta=0.0",
    "+optimizer.ratio_bounds=[1.0,1.0]",
    "+optimizer.scale=fused",
)

ARTIFACT = Sweep(
    name="sweep_compressor",
    title="1-bit Adam with other compressors of the momentum",
    experiment="figure_04",
    variants={
        "onebit_adam": Variant("1 bit"),
        "onebit_adam_fused": Variant("1 bit, one scale", ONE_SCALE),
        # The nearest of 3, 15 or 255 levels up to the tensor's largest element.
        "onebit_adam_2bit": Variant("2 bits", compressor("Quantize", "bits:2")),
        "onebit_adam_4bit": Variant("4 bits", compressor("Quantize", "bits:4")),
        "onebit_adam_8bit": Variant("8 bits", compressor("Quantize", "bits:8")),
        "onebit_adam_32bit": Variant("32 bits"),
        # The largest 1 in 64 elements: as many bytes at float32 as 1 bit an element.
        "onebit_adam_topk": Variant("top 1/64", compressor("TopK", "density:0.015625")),
    },
    option="compressor of the momentum",
    # All of them would take the profile smoke more than a minute.
    smoke_optimizers=("adam", "onebit_adam", "onebit_adam_4bit", "onebit_adam_topk"),
)

if __name__ == "__main__":
    main(ARTIFACT)
