"""Tables: our scores beside the papers', as Markdown and as CSV.

A table is a file experiments/table_NN.py with EXPERIMENTS, OPTIMIZERS, NOTE and table(rows by experiment), and, where they differ, SMOKE, those
of the experiments that the profile smoke trains, and READS, those whose runs it reads; NEEDS_RUNS = False: it has something to say without any
run; PLAN: by profile, what `onebit.lab.plan` says besides. See `main`.
"""

from pathlib import Path
from types import ModuleType

import pandas as pd

from onebit.lab.claims.judge import table as markdown
from onebit.lab.report import figure as figures
from onebit.lab.report.captions import describe
from onebit.lab.report.style import LOOKS
from onebit.lab.runs.compare import require_alike
from onebit.lab.runs.load import load_records, load_rows

PARTS = ("", " low", " high", " n", " diverged")  # the columns that an optimizer has


def experiments(module: ModuleType, profile: str) -> tuple[str, ...]:
    """The experiments that a table or a figure trains."""
    if profile == "smoke" and hasattr(module, "SMOKE"):
        return module.SMOKE
    return module.EXPERIMENTS if hasattr(module, "EXPERIMENTS") else (module.EXPERIMENT,)


def optimizers(module: ModuleType, profile: str) -> tuple[str, ...]:
    """What a figure, sweep or table compares; at smoke those of SMOKE_OPTIMIZERS, if there are, so that it takes less than a minute."""
    return (
        getattr(module, "SMOKE_OPTIMIZERS", module.OPTIMIZERS)
        if profile == "smoke"
        else module.OPTIMIZERS
    )


def save(
    module: ModuleType, name: str, profile: str, root: Path, live_root: Path | None = None
) -> Path:
    """Write figures/<name>.md and .csv of the committed runs under `root`, or of the live ones alone; a figure is drawn, see `figures.save`."""
    if hasattr(module, "plot"):
        return figures.save(module, name, profile, root, live_root)
    root = live_root or root
    reads = getattr(module, "READS", module.EXPERIMENTS)
    records = {
        experiment: load_records(root, experiment, profile, module.OPTIMIZERS)
        for experiment in reads
    }
    for found in records.values():
        require_alike(found)
    if getattr(module, "NEEDS_RUNS", True) and not any(records.values()):
        raise figures.no_runs(name, ", ".join(module.EXPERIMENTS), profile, root)
    frame = module.table({experiment: load_rows(found) for experiment, found in records.items()})
    path = root / "figures" / (name if profile == "laptop" else f"{name}_{profile}")
    path.parent.mkdir(parents=True, exist_ok=True)
    frame.to_csv(path.with_suffix(".csv"), index=False, float_format="%.6g")
    path.with_suffix(".md").write_text(text(module, frame, records, profile), encoding="utf-8")
    return path.with_suffix(".md")


def text(
    module: ModuleType, frame: pd.DataFrame, records: dict[str, list[dict]], profile: str
) -> str:
    """The table under its title and over its caption: what was run, from run.json."""
    ran = [
        f"- {experiment}: {describe(found[0])}; {found[0]['config']['batch']:,} samples a step, {found[0]['total_steps']:,} steps, "
        f"T_w = {max(record['warmup_steps'] for record in found):,}"
        for experiment, found in records.items()
        if found
    ]
    cells = shown(frame)
    lines = [
        f"# {module.__doc__.splitlines()[0]}",
        "",
        markdown(cells.columns.tolist(), cells.values.tolist()),
        "",
        module.NOTE,
        "",
    ]
    lines += (
        [f"Ours, profile {profile}:", "", *ran] if ran else [f"No runs of profile {profile} yet."]
    )
    return "\n".join(lines) + "\n"


def ours(scores: dict[str, pd.Series], diverged: dict[str, int]) -> dict:
    """The columns of each optimizer: mean, lowest and highest score and number of seeds, of its scores by seed, and how many more diverged."""
    found = {}
    for optimizer, score in scores.items():
        values = (score.mean(), score.min(), score.max(), len(score), diverged[optimizer])
        found |= {
            LOOKS[optimizer][0] + part: value for part, value in zip(PARTS, values, strict=True)
        }
    return found


def shown(frame: pd.DataFrame) -> pd.DataFrame:
    """The same as text, an optimizer's columns in one."""
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
    parts = [f"{mean:.1f} ({low:.1f} to {high:.1f}, n = {n:.0f})"] * bool(n) + [
        f"{diverged:.0f} diverged"
    ] * bool(diverged)
    return ", ".join(parts)


def main(file: str) -> None:
    """Write the table of an experiments file."""
    figures.main(file, save)
