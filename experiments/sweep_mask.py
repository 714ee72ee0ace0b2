"""What to do where the variance is zero at the freeze? 1-bit Adam with its mask, or with a floor.

A floor is relative to the tensor's mean variance: no coordinate's variance is frozen below it. The
papers have no such figure. To train one variant by hand, add its changes to 1-bit Adam's:

    python -m onebit.lab.train experiment=figure_04 optimizer=onebit_adam \\
        method=onebit_adam_floor_1e-2 +optimizer.variance_floor=1.0e-2

`make plan-sweep-mask` prints the options of every variant.
"""

from onebit.lab.report.artifact import Sweep, Variant, main

ARTIFACT = Sweep(
    name="sweep_mask",
    title="1-bit Adam with its mask, or with a floor under the variance",
    experiment="figure_04",
    variants={
        "onebit_adam": Variant("mask"),
        "onebit_adam_floor_1e-4": Variant("0.0001", ("+optimizer.variance_floor=1.0e-4",)),
        "onebit_adam_floor_1e-2": Variant("0.01", ("+optimizer.variance_floor=1.0e-2",)),
        "onebit_adam_floor_1": Variant("1", ("+optimizer.variance_floor=1.0",)),
    },
    option="mask, or floor as a share of the tensor's mean variance",
)

if __name__ == "__main__":
    main(ARTIFACT)
