"""Every number about time that the papers print or draw, each beside the model's prediction."""

from dataclasses import dataclass, replace

import pandas as pd

from onebit.lab.bench.model.papers import (
    ADAM_PAPER,
    LAMB_PAPER,
    LONG,
    LONG_INPUT,
    MICRO_BATCH,
    PER_NODE,
    PRETRAINING,
    SQUAD,
    SQUAD_BATCH,
    Setting,
    predicted_gain,
    predicted_run,
    predicted_seconds,
    predicted_throughput,
    profile,
)
from onebit.lab.runs.load import PAPER, paper_curve, paper_curves, paper_number
from onebit.time_model import ADAM, COMPRESSED, Method

INPUT = "an input of the model"
REPEATS = "follows from points that are listed above"
HOUR, MINUTE = 3600, 60


@dataclass(frozen=True)
class Point:
    """A number of a paper and what the model says of it.

    Attributes:
        place: the table or figure.
        curve: of the figure.
        what: the setting, in words.
        x: where the figure has the point: GPUs, or Mbit/s.
        unit: of both numbers.
        printed, predicted: the two numbers.
        quantity: what was measured; two points that measure one quantity can contradict each other.
        apart: why the point does not count in the model's error; "" if it does.
    """

    place: str
    curve: str
    what: str
    x: float
    unit: str
    printed: float
    predicted: float
    quantity: tuple = ()
    apart: str = ""

    @property
    def error(self) -> float:
        """The larger number over the smaller, less 1."""
        ratio = self.predicted / self.printed
        return max(ratio, 1 / ratio) - 1


def throughput(place: str, curve: str, setting: Setting, method: Method, printed: float) -> Point:
    """A point in samples/s."""
    return Point(
        place,
        curve,
        setting.place,
        setting.gpus,
        "samples/s",
        printed,
        predicted_throughput(method, setting),
        (curve.partition(" (")[0], setting),
    )


# ---- 1-bit Adam


def profile_points(paper: str, place: str, method: str) -> list[Point]:
    """All_reduces of a profiling table, and the steps that follow with the computation it prints.

    Both papers have one model and one cluster, so that rows of one network and number of GPUs
    measure the same all_reduce, whatever the batch.
    """
    points = []
    for row in profile(paper).itertuples():
        setting = Setting(paper, PRETRAINING, row.network, row.gpus, row.batch)
        compute = row.compute_ms / 1e3
        seconds = predicted_seconds(ADAM, setting, known=compute)
        allreduce = Point(
            place,
            f"{method} ({row.network})",
            f"{setting.place}, {row.batch_per_gpu} a GPU, all_reduce",
            row.gpus,
            "ms",
            row.allreduce_ms,
            1e3 * (seconds - compute),
            ("all_reduce", row.network, row.gpus),
            INPUT if paper == ADAM_PAPER and row.nodes == 1 else "",
        )
        step = replace(
            allreduce,
            what=f"{setting.place}, {row.batch_per_gpu} a GPU",
            unit="samples/s",
            printed=row.batch / (compute + row.allreduce_ms / 1e3),
            predicted=row.batch / seconds,
            # a smaller micro-batch computes for another time
            quantity=(method, setting) if row.batch_per_gpu >= MICRO_BATCH else (),
            apart=REPEATS,
        )
        points += [allreduce, step]
    return points


def figure_5_points() -> list[Point]:
    """Throughput against GPUs: (a) 16 samples a GPU, (b) batch 4,096, (c) SQuAD, 3 a GPU."""
    points = []
    for panel, task in (("a", PRETRAINING), ("b", PRETRAINING), ("c", SQUAD)):
        for name in paper_curves(f"fig5{panel}"):
            curve, network = name.removesuffix(")").split(" (")
            for x, y in paper_curve(f"fig5{panel}", name).itertuples(index=False):
                gpus = round(x)
                a_gpu = {"a": MICRO_BATCH, "c": SQUAD_BATCH}.get(panel)
                batch = a_gpu * gpus if a_gpu else int(paper_number("batch"))
                setting = Setting(ADAM_PAPER, task, network, gpus, batch)
                method = ADAM if curve == "Adam" else COMPRESSED
                point = throughput(f"Figure 5{panel}", name, setting, method, y)
                one_node = gpus == PER_NODE[network] and network == "InfiniBand"
                is_input = task == SQUAD and method == ADAM and one_node
                points.append(replace(point, apart=INPUT if is_input else ""))
    return points


def figure_9_points() -> list[Point]:
    """Gain against bandwidth on 256 GPUs. The batch is not stated: 16 a GPU, which is 4,096."""
    setting = Setting(ADAM_PAPER, PRETRAINING, "Ethernet", 256, int(paper_number("batch")))
    return [
        Point(
            "Figure 9",
            "throughput speedup",
            f"{setting.place}, {x:,.0f} Mbit/s",
            x,
            "x",
            y,
            predicted_gain(setting, bandwidth=x * 1e6),
        )
        for x, y in paper_curve("fig9", "throughput speedup").itertuples(index=False)
    ]


def pretraining() -> Setting:
    """The run of Figure 4."""
    return Setting(ADAM_PAPER, PRETRAINING, "Ethernet", 64, int(paper_number("batch")))


def figure_4_points() -> list[Point]:
    """Hours of pre-training BERT-Large at sequence length 128, and their ratio."""
    steps, warmup = (int(paper_number(f"bert_large_128_{n}")) for n in ("steps", "warmup"))
    setting = pretraining()
    adam, onebit = (s / HOUR for s in predicted_run(setting, steps, warmup))
    printed = paper_number("adam_hours"), paper_number("onebit_adam_hours")
    throughput_of_adam = steps * setting.batch / printed[0] / HOUR
    compared = Point(
        "Figure 4b",
        "Adam",
        f"{setting.place}, whole run",
        setting.gpus,
        "samples/s",
        throughput_of_adam,
        steps * setting.batch / adam / HOUR,
        ("Adam", setting),
    )
    whole = f"{setting.place}, whole run"
    return [
        compared,
        Point("Figure 4b", "1-bit Adam", whole, setting.gpus, "h", printed[1], onebit),
        Point(
            "Section 7.1",
            "1-bit Adam",
            f"{whole}, gain",
            setting.gpus,
            "x",
            printed[0] / printed[1],
            adam / onebit,
            apart=REPEATS,
        ),
    ]


def squad() -> Setting:
    """The fine-tuning on 32 GPUs."""
    return Setting(ADAM_PAPER, SQUAD, "Ethernet", 32, int(paper_number("squad_batch")))


def printed_gains() -> list[Point]:
    """Gains that the 1-bit Adam paper prints beside its figures."""
    gpus_128 = Setting(ADAM_PAPER, PRETRAINING, "Ethernet", 128, int(paper_number("batch")))
    steps, warmup = (int(paper_number(f"squad_{n}")) for n in ("steps", "warmup"))
    adam, onebit = predicted_run(squad(), steps, warmup)
    gains = (
        ("Figure 5a", Setting(ADAM_PAPER, PRETRAINING, "Ethernet", 64, 1024), "gain_64_gpus"),
        ("Figure 5b", gpus_128, "gain_128_gpus"),
        ("Figure 5c", squad(), "gain_squad"),
    )
    points = [
        gain(place, setting, paper_number(f"throughput_{name}")) for place, setting, name in gains
    ]
    whole = gain("Abstract", squad(), paper_number("squad_gain_up_to"))
    what = f"{whole.what}, whole run"
    return [*points, replace(whole, what=what, predicted=adam / onebit)]


def gain(place: str, setting: Setting, printed: float) -> Point:
    """The compressed stage over the warm-up; its two throughputs are points of their own."""
    curve = "1-bit Adam" if setting.paper == ADAM_PAPER else "1-bit LAMB"
    predicted = predicted_gain(setting)
    what = f"{setting.place}, gain"
    return Point(place, curve, what, setting.gpus, "x", printed, predicted, apart=REPEATS)


# ---- 1-bit LAMB

LAMB_GAINS = {
    (PRETRAINING, 8192): "onebit_lamb_stage_speedup",
    (PRETRAINING, 16384): "onebit_lamb_stage_speedup_16k",
    (PRETRAINING, 32768): "onebit_lamb_stage_speedup_32k",
    (PRETRAINING, 65536): "onebit_lamb_stage_speedup_64k",
    (LONG, 8192): "onebit_lamb_512_stage_speedup_8k",
    (LONG, 16384): "onebit_lamb_512_stage_speedup_16k",
    (LONG, 32768): "onebit_lamb_512_stage_speedup_32k",
}


def lamb_figure_points(figure: int) -> list[Point]:
    """Throughputs of Figure 3, or of Figure 7, of which only the MPI backend is not in Figure 3."""
    points = []
    for row in pd.read_csv(PAPER / f"lamb_fig{figure}.csv").itertuples():
        task = str(row.sequence_length)
        setting = Setting(LAMB_PAPER, task, row.network, row.gpus, row.batch)
        method = ADAM if row.curve == "LAMB" else COMPRESSED
        curve = f"{row.curve} ({row.network})" if figure == 3 else row.curve
        place = f"1-bit LAMB, Figure {figure}"
        point = throughput(place, curve, setting, method, row.y)
        if setting == LONG_INPUT and method == COMPRESSED:
            point = replace(point, apart=INPUT)
        if figure == 7:
            apart = "" if "MPI" in row.curve else REPEATS
            point = replace(point, apart=apart, quantity=())
        points.append(point)
    return points


def lamb_gains() -> list[Point]:
    """The gains that are printed in Figure 3, all on 256 GPUs over Ethernet."""
    return [
        gain(
            "1-bit LAMB, Figure 3",
            Setting(LAMB_PAPER, task, "Ethernet", 256, batch),
            paper_number(name),
        )
        for (task, batch), name in LAMB_GAINS.items()
    ]


def lamb_run(task: str) -> tuple[Setting, int, int]:
    """(setting, steps, warm-up steps) of Table 4 at a sequence length."""
    prefix = "lamb" if task == PRETRAINING else "lamb_512"
    batch, steps, warmup = (
        int(paper_number(f"{prefix}_{n}")) for n in ("batch", "steps", "warmup")
    )
    return Setting(LAMB_PAPER, task, "Ethernet", 256, batch), steps, warmup


def table_4_points() -> list[Point]:
    """Minutes of the runs of Table 4; LAMB's as a throughput, to be compared with Figure 3's."""
    points = []
    for task, name in ((PRETRAINING, ""), (LONG, "_512")):
        setting, steps, warmup = lamb_run(task)
        lamb, onebit = predicted_run(setting, steps, warmup)
        samples = steps * setting.batch
        minutes = [paper_number(f"{kind}{name}_minutes") for kind in ("lamb", "onebit_lamb")]
        place, whole = "1-bit LAMB, Table 4", f"{setting.place}, whole run"
        points += [
            Point(
                place,
                "LAMB",
                whole,
                setting.gpus,
                "samples/s",
                samples / minutes[0] / MINUTE,
                samples / lamb,
                ("LAMB", setting),
            ),
            Point(place, "1-bit LAMB", whole, setting.gpus, "min", minutes[1], onebit / MINUTE),
        ]
    return points


def all_points() -> list[Point]:
    """All of them, in the papers' order."""
    return [
        *profile_points(ADAM_PAPER, "Table 1", "Adam"),
        *figure_5_points(),
        *figure_9_points(),
        *figure_4_points(),
        *printed_gains(),
        *profile_points(LAMB_PAPER, "1-bit LAMB, Table 5", "LAMB"),
        *lamb_figure_points(3),
        *lamb_figure_points(7),
        *table_4_points(),
        *lamb_gains(),
    ]
