"""Table 4 of 1-bit LAMB: how long pre-training takes."""

import pandas as pd

from onebit.lab.bench.model.artifacts import ModelTable, chosen, compared
from onebit.lab.bench.model.check import Check
from onebit.lab.report.artifact import main


def table(found: Check) -> pd.DataFrame:
    """Every number, printed and predicted."""
    return compared(chosen(found, "1-bit LAMB, Table 4"), found)


ARTIFACT = ModelTable(
    name="table_lamb_04",
    title="Table 4 of 1-bit LAMB: how long pre-training takes",
    table=table,
    note="Paper: Table 4 of 1-bit LAMB. Model: computing times from Table 5, links as "
    "docs/network.md says.",
)

if __name__ == "__main__":
    main(ARTIFACT)
