"""Table 1: most of a step of Adam on BERT-Large is the exchange of gradients."""

import pandas as pd

from onebit.lab.bench.model.artifacts import ModelTable, chosen, compared
from onebit.lab.bench.model.check import Check
from onebit.lab.report.artifact import main


def table(found: Check) -> pd.DataFrame:
    """All_reduces and steps, printed and predicted."""
    return compared(chosen(found, "Table 1"), found)


ARTIFACT = ModelTable(
    name="table_01",
    title="Table 1: a step of Adam on BERT-Large, and its all_reduce",
    table=table,
    note="Paper: Table 1; samples/s from the sum of its times. Model: the computation is Table 1's "
    "own, the all_reduce is predicted from the speed of the links, see docs/network.md.",
)

if __name__ == "__main__":
    main(ARTIFACT)
