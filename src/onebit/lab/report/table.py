"""Tables: our scores beside the papers', as Markdown and as CSV."""

import pandas as pd

from onebit.lab.claims.judge import table
from onebit.lab.report.captions import describe
from onebit.lab.report.style import LOOKS

PARTS = ("", " low", " high", " n", " diverged")  # the columns that an optimizer has


def markdown(
    title: str, frame: pd.DataFrame, note: str, records: dict[str, list[dict]], profile: str
) -> str:
    """The table under its title and over its note and what was run, from run.json."""
    ran = [
        f"- {experiment}: {describe(found[0])}; {found[0]['config']['batch']:,} samples a step, "
        f"{found[0]['total_steps']:,} steps, "
        f"T_w = {max(record['warmup_steps'] for record in found):,}"
        for experiment, found in records.items()
        if found
    ]
    cells = shown(frame)
    lines = [f"# {title}", "", table(cells.columns.tolist(), cells.values.tolist()), "", note, ""]
    lines += (
        [f"Ours, profile {profile}:", "", *ran] if ran else [f"No runs of profile {profile} yet."]
    )
    return "\n".join(lines) + "\n"


def ours(scores: dict[str, pd.Series], diverged: dict[str, int]) -> dict:
    """The columns of each optimizer, from its scores by seed.

    They are the mean, lowest and highest score, the number of seeds, and how many more diverged.
    """
    found = {}
    for optimizer, score in scores.items():
        values = (score.mean(), score.min(), score.max(), len(score), diverged[optimizer])
        found |= {
            LOOKS[optimizer][0] + part: value for part, value in zip(PARTS, values, strict=True)
        }
    return found


def shown(frame: pd.DataFrame) -> pd.DataFrame:
    """The same table as text, with an optimizer's columns in one."""
    cells = {}
    for name in frame.columns:
        if name + " low" in frame:
            cells[f"ours: {name}"] = [
                cell(*values)
                for values in frame[[name + part for part in PARTS]].itertuples(index=False)
            ]
        elif not name.endswith(PARTS[1:]):
            cells[name] = [
                "" if pd.isna(value) else value if isinstance(value, str) else f"{value:g}"
                for value in frame[name]
            ]
    return pd.DataFrame(cells)


def cell(mean: float, low: float, high: float, n: int, diverged: int) -> str:
    """'19.8 (19.8 to 19.9, n = 3), 1 diverged'."""
    parts = [f"{mean:.1f} ({low:.1f} to {high:.1f}, n = {n:.0f})"] * bool(n)
    return ", ".join(parts + [f"{diverged:.0f} diverged"] * bool(diverged))
