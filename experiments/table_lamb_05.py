"""Table 5 of 1-bit LAMB: most of a step of LAMB is the exchange of gradients."""

import pandas as pd

from onebit.lab.bench.model.artifacts import ModelTable, chosen, compared
from onebit.lab.bench.model.check import Check
from onebit.lab.report.artifact import main


def table(found: Check) -> pd.DataFrame:
    """Every number, printed and predicted."""
    return compared(chosen(found, "1-bit LAMB, Table 5"), found)


ARTIFACT = ModelTable(
    name="table_lamb_05",
    title="Table 5 of 1-bit LAMB: most of a step of LAMB is the exchange of gradients",
    table=table,
    note="Paper: Table 5 of 1-bit LAMB. Model: computing times from Table 5, links as "
    "docs/network.md says.",
)

if __name__ == "__main__":
    main(ARTIFACT)
