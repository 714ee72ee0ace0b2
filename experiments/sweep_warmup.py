"""How long must the warm-up be? 1-bit Adam with T_w from 5 to 50 % of the first phase's steps.

The papers have no such figure. To train one variant by hand, add its changes to 1-bit Adam's:

    python -m onebit.lab.train experiment=figure_04 optimizer=onebit_adam \\
        method=onebit_adam_warmup_10 'optimizer.warmup="${share:0.1,${phases}}"'

`make plan-sweep-warmup` prints the options of every variant.
"""

from onebit.lab.report.artifact import Sweep, Variant, main


def share(part: float) -> tuple[str, ...]:
    """The change to a warm-up that is this share of the steps."""
    return (f'optimizer.warmup="${{share:{part},${{phases}}}}"',)


ARTIFACT = Sweep(
    name="sweep_warmup",
    title="1-bit Adam with other warm-ups",
    experiment="figure_04",
    variants={
        "onebit_adam_warmup_5": Variant("5%", share(0.05)),
        "onebit_adam_warmup_10": Variant("10%", share(0.1)),
        "onebit_adam": Variant("15%"),  # the paper's share
        "onebit_adam_warmup_25": Variant("25%", share(0.25)),
        "onebit_adam_warmup_50": Variant("50%", share(0.5)),
    },
    option="T_w, share of the steps",
)

if __name__ == "__main__":
    main(ARTIFACT)
