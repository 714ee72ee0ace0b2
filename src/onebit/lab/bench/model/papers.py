"""The papers' clusters, links and computing times: the inputs of the model, none of them fitted.

Links. The speed between nodes over Ethernet is what the papers measured by iperf, 4.1 Gbit/s. Over
InfiniBand they print no measurement, only that it was close to the hardware's 100 Gbit/s, which an
all_reduce was not: so the speed is the one that the all_reduce shows in the profile of the OTHER
paper, in which no point stands that it predicts. (This was decided after a first comparison: with
100 Gbit/s the model's median error is 19 %.) The speed inside a node is that of the row of Table 1
with one node; this row is an input, and no prediction. No latency is printed, and none is assumed.

Computation. Table 1 of the 1-bit Adam paper and Table 5 of the 1-bit LAMB paper. For SQuAD and for
sequence length 512 no table exists: the time is what remains of one point of the figure, named
below, in which the exchange is small; that point is an input, and no prediction.

Compression. The published implementation makes 44 passes over the memory: 173.2 + 104 / W bytes an
element in all, counted operation by operation in DeepSpeed 0.19.6, over the 900 GB/s of a V100.
"""

from dataclasses import dataclass
from functools import cache

import pandas as pd

from onebit.lab.runs.load import PAPER, paper_curve, paper_number
from onebit.time_model import (
    ADAM,
    BIT,
    COMPRESSED,
    Cluster,
    Link,
    Method,
    Model,
    equal_tensors,
    step_seconds,
)

PER_NODE = {"Ethernet": 4, "InfiniBand": 8}
ADAM_PAPER, LAMB_PAPER = "1-bit Adam", "1-bit LAMB"
PROFILES = {ADAM_PAPER: "table_1", LAMB_PAPER: "lamb_table_5"}
OTHER = {ADAM_PAPER: LAMB_PAPER, LAMB_PAPER: ADAM_PAPER}
MICRO_BATCH = 16  # samples of sequence length 128 on a GPU
SQUAD_BATCH = 3  # samples on a GPU
V100_BANDWIDTH = 900e9  # bytes a second, NVIDIA's data sheet
PRETRAINING, LONG, SQUAD = "128", "512", "SQuAD"  # what is trained: sequence length, or the task


@dataclass(frozen=True)
class Setting:
    """Where and what is trained: `task` is PRETRAINING, LONG or SQUAD, `batch` over all GPUs."""

    paper: str
    task: str
    network: str
    gpus: int
    batch: int

    @property
    def place(self) -> str:
        """In words."""
        task = {LONG: "length 512, ", SQUAD: "SQuAD, "}.get(self.task, "")
        return f"{task}{self.network}, {self.gpus} GPUs, batch {self.batch:,}"


@cache
def profile(paper: str) -> pd.DataFrame:
    """The paper's profiling table, with the milliseconds of computation in `compute_ms`."""
    rows = pd.read_csv(PAPER / f"{PROFILES[paper]}.csv")
    return rows.assign(compute_ms=rows.forward_ms + rows.backward_ms + rows.step_ms)


@cache
def parameters() -> int:
    """Of BERT-Large."""
    return int(paper_number("bert_large_parameters"))


@cache
def messages(gpus: int) -> Model:
    """BERT-Large's tensors, taken to be of equal size."""
    tensors = int(paper_number("bert_large_tensors"))
    return Model.of(equal_tensors(parameters(), tensors), gpus)


# ---- links


def shown_bandwidth(row: pd.Series) -> float:
    """Bits a second at which an all_reduce of half precision went, as a ring."""
    share = 2 * (row.gpus - 1) / row.gpus
    return BIT * share * 2 * parameters() / (row.allreduce_ms / 1e3)


@cache
def between_bandwidth(network: str, paper: str) -> float:
    """Between nodes, for predictions of this paper's points."""
    if network == "Ethernet":
        return paper_number("ethernet_effective_gbits") * 1e9
    rows = profile(OTHER[paper])
    chosen = rows[(rows.network == network) & (rows.nodes > 1)]
    return float(chosen.apply(shown_bandwidth, axis="columns").median())


@cache
def inside_bandwidth(network: str) -> float:
    """Inside a node, for all predictions."""
    rows = profile(ADAM_PAPER)
    return float(shown_bandwidth(rows[(rows.network == network) & (rows.nodes == 1)].iloc[0]))


def cluster_of(setting: Setting, bandwidth: float | None = None) -> Cluster:
    """The cluster; bandwidth: bits a second between nodes, where it was limited."""
    per_node = PER_NODE[setting.network]
    between = bandwidth or between_bandwidth(setting.network, setting.paper)
    inside = Link(inside_bandwidth(setting.network))
    return Cluster(setting.gpus // per_node, per_node, inside, Link(between))


# ---- computation


def compute(setting: Setting) -> float:
    """Seconds of forward, backward and update in a step."""
    if setting.task == SQUAD:
        return squad_compute()
    if setting.task == LONG:
        samples = setting.batch / setting.gpus
        return samples * long_compute_per_sample() + update(setting)
    rows = profile(setting.paper)
    rows = rows[(rows.network == setting.network) & (rows.batch_per_gpu >= MICRO_BATCH)]
    samples = rows.batch_per_gpu * rows.accumulation
    per_sample = ((rows.forward_ms + rows.backward_ms) / samples).median() / 1e3
    return setting.batch / setting.gpus * per_sample + update(setting)


def update(setting: Setting) -> float:
    """Seconds of the optimizer, the median over the rows of the table, of these GPUs if it can."""
    rows = profile(setting.paper)
    rows = rows[rows.network == setting.network]
    same = rows[rows.gpus == setting.gpus]
    return (same if len(same) else rows).step_ms.median() / 1e3


@cache
def squad_compute() -> float:
    """What remains of a step of Adam on one InfiniBand node (Figure 5c) without its all_reduce."""
    points = paper_curve("fig5c", "Adam (InfiniBand)")
    rows = profile(ADAM_PAPER)
    node = rows[(rows.network == "InfiniBand") & (rows.nodes == 1)].iloc[0]
    throughput = float(points.y[points.x.round() == node.gpus].iloc[0])
    return SQUAD_BATCH * node.gpus / throughput - node.allreduce_ms / 1e3


LONG_INPUT = Setting(LAMB_PAPER, LONG, "InfiniBand", 128, 32768)


@cache
def long_compute_per_sample() -> float:
    """Seconds of a GPU for a sample of length 512, from the point of Figure 3 at LONG_INPUT."""
    points = pd.read_csv(PAPER / "lamb_fig3.csv")
    point = points[
        (points.sequence_length == int(LONG))
        & (points.batch == LONG_INPUT.batch)
        & (points.network == LONG_INPUT.network)
        & (points.curve == "1-bit LAMB")
    ].iloc[0]
    rest = step_seconds(
        COMPRESSED,
        cluster_of(LONG_INPUT),
        messages(LONG_INPUT.gpus),
        update(LONG_INPUT),
        compression=compression(LONG_INPUT.gpus),
    )
    return (LONG_INPUT.batch / point.y - rest) / (LONG_INPUT.batch / LONG_INPUT.gpus)


def compression(gpus: int) -> float:
    """Seconds by which the published implementation computes longer in a compressed step."""
    return (173.2 + 104 / gpus) * parameters() / V100_BANDWIDTH


# ---- predictions


def predicted_seconds(
    method: Method, setting: Setting, *, bandwidth: float | None = None, known: float | None = None
) -> float:
    """Of a step. known: its seconds of computation, where the point's own table prints them."""
    return step_seconds(
        method,
        cluster_of(setting, bandwidth),
        messages(setting.gpus),
        compute(setting) if known is None else known,
        compression=compression(setting.gpus),
    )


def predicted_throughput(method: Method, setting: Setting) -> float:
    """Samples a second."""
    return setting.batch / predicted_seconds(method, setting)


def predicted_gain(setting: Setting, bandwidth: float | None = None) -> float:
    """A step of the warm-up over a compressed one."""
    dense, compressed = (
        predicted_seconds(method, setting, bandwidth=bandwidth) for method in (ADAM, COMPRESSED)
    )
    return dense / compressed


def predicted_run(setting: Setting, steps: int, warmup: int) -> tuple[float, float]:
    """Seconds of a whole run: (uncompressed, with `warmup` uncompressed steps)."""
    dense, compressed = (predicted_seconds(method, setting) for method in (ADAM, COMPRESSED))
    return steps * dense, warmup * dense + (steps - warmup) * compressed
