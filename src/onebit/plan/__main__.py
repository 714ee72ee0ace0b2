"""Will a 1-bit optimizer pay on this cluster, from which bandwidth on, and how much does it save?

    python -m onebit.plan --parameters 340e6 --gpus 64 --gpus-per-node 8 \\
        --bandwidth 10Gbit --compute 0.2

The rival is AdamW under DistributedDataParallel, which hides as much of its all_reduce as it can
behind backward. The optimizers of onebit are counted without such hiding (overlap=False).
"""

import argparse
import sys
from math import inf
from pathlib import Path

from onebit.plan import measure, picture, units
from onebit.plan.answer import PAYS, RIVAL, Answer, Question, answers
from onebit.time_model import Cluster, Link

OPTIMIZERS = ("OneBitAdam", "OneBitLamb", "ZeroOneAdam")
OPERATIONS = 6  # for each parameter and token: 2 forward, 4 backward


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(
        "python -m onebit.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--parameters", type=units.count, required=True, help="of the model, such as 340e6")
    add("--gpus", type=units.count, help="all that train together")
    add("--gpus-per-node", type=units.count, help="default: 1, or what --measure finds")
    add("--bandwidth", type=units.bits_per_second, help="of a node's link, such as 10Gbit")
    add("--latency", type=units.seconds, help="of that link (default: 50us)")
    add("--inside-bandwidth", type=units.bits_per_second, help="inside a node (default: 200Gbit)")
    add("--inside-latency", type=units.seconds, default=10e-6, help="default: 10us")
    add("--compute", type=units.seconds, help="seconds of a step without any exchange")
    add("--tokens", type=units.count, help="of a GPU in a step; with --measure, for --compute")
    add("--tensors", type=units.count, default=400, help="of the model (default: 400)")
    add("--gradient-bits", type=int, choices=(16, 32), default=16, help="of AdamW's all_reduce")
    add("--hidden", type=units.share, default=2 / 3, help="of the computation: backward's share")
    add("--warmup", type=units.share, default=0.15, help="share of warm-up steps (default: 15%%)")
    add("--steps", type=units.count, default=100_000, help="of the run (default: 100000)")
    add("--optimizer", choices=OPTIMIZERS, help="only this one")
    add("--plot", type=Path, metavar="FILE", help="draw speed-up against bandwidth")
    add(
        "--measure",
        action="store_true",
        help="time this machine's link and work first; start by torchrun or mpirun",
    )
    return made


def question_of(options: argparse.Namespace, found: measure.Measured | None) -> Question:
    """What was asked; ValueError with the remedy if something is missing or does not fit."""
    gpus = options.gpus or (found.size if found else None)
    per_node = options.gpus_per_node or (found.per_node if found else 1)
    if gpus is None:
        raise ValueError("say how many GPUs train together: --gpus 64")
    if gpus < 2:
        raise ValueError("one GPU exchanges nothing: ask about --gpus 2 or more")
    if gpus % per_node:
        raise ValueError(
            f"--gpus {gpus} are not whole nodes of --gpus-per-node {per_node}: "
            f"ask for a multiple of {per_node}"
        )
    nodes = gpus // per_node
    return Question(
        options.parameters,
        Cluster(nodes, per_node, *links(options, found, nodes)),
        compute_of(options, found),
        tensors=options.tensors,
        hidden=options.hidden,
        compression=found.compression * options.parameters if found else 0.0,
        gradient_bytes=options.gradient_bits // 8,
        warmup=options.warmup,
        steps=options.steps,
    )


def links(
    options: argparse.Namespace, found: measure.Measured | None, nodes: int
) -> tuple[Link, Link]:
    """(inside a node, between nodes). What is given wins over what was measured."""
    crossed = found is not None and found.size > found.per_node  # the ring left its node
    measured = Link(found.bandwidth, found.latency) if found else None
    inside = Link(options.inside_bandwidth or 200e9, options.inside_latency)
    if measured and not crossed and options.inside_bandwidth is None:
        inside = measured
    if nodes == 1:
        if options.bandwidth and not options.inside_bandwidth:
            inside = Link(options.bandwidth, options.latency or options.inside_latency)
        return inside, inside
    bandwidth = options.bandwidth or (measured.bandwidth if measured and crossed else None)
    if bandwidth is None:
        raise ValueError(
            "say how fast the link of a node is: --bandwidth 10Gbit, or start --measure on "
            "at least two nodes"
        )
    latency = options.latency or (measured.latency if measured and crossed else 50e-6)
    return inside, Link(bandwidth, latency)


def compute_of(options: argparse.Namespace, found: measure.Measured | None) -> float:
    """Seconds of a step without exchange: as given, or from the tokens and the measured rate."""
    if options.compute:
        return options.compute
    if found and options.tokens:
        return OPERATIONS * options.parameters * options.tokens / found.flops
    raise ValueError(
        "say how long a step takes without any exchange, --compute 0.2; or --tokens of a GPU in "
        "a step together with --measure"
    )


def bandwidth_of(question: Question) -> float:
    """Of the link whose bandwidth decides."""
    cluster = question.cluster
    return (cluster.between if cluster.nodes > 1 else cluster.inside).bandwidth


def setting(question: Question) -> str:
    """What the table is about, in words."""
    cluster = question.cluster
    inside = units.show(cluster.inside.bandwidth, "bit/s")
    where = f"on one node of {cluster.per_node} GPUs, {inside} between them"
    if cluster.nodes > 1:
        between = units.show(cluster.between.bandwidth, "bit/s")
        where = (
            f"on {cluster.ranks} GPUs, {cluster.per_node} in a node, "
            f"{between} between nodes and {inside} inside"
        )
    return (
        f"{question.parameters / 1e6:,.4g} million parameters {where}.\n"
        f"A step computes for {units.show_time(question.compute)}; gradients travel as "
        f"{8 * question.gradient_bytes}-bit numbers; "
        f"{question.warmup:.0%} of the steps are warm-up."
    )


def table(found: list[Answer]) -> str:
    """A line for each optimizer."""
    header = ["optimizer", "a step", "speed-up", "sent by a GPU", "saved a day", "pays up to"]
    lines = []
    for answer in found:
        line = [answer.optimizer, units.show_time(answer.seconds)]
        line += [f"{answer.speedup:.2f}x", units.show(answer.nbytes, "B") + " a step"]
        saved = f"{answer.hours_saved:.1f} h, {units.show(answer.bytes_saved, 'B')}"
        lines.append(line + ([""] * 2 if answer.optimizer == RIVAL else [saved, limit(answer)]))
    return units.table(header, lines)


def limit(answer: Answer) -> str:
    """Up to which bandwidth it pays."""
    if answer.pays_below == 0:
        return "never"
    return "any" if answer.pays_below == inf else units.show(answer.pays_below, "bit/s")


def verdict(found: list[Answer]) -> str:
    """The answer in a sentence or two."""
    best = max((answer for answer in found if answer.optimizer != RIVAL), key=lambda a: a.speedup)
    if best.pays:
        return (
            f"It pays: with {best.optimizer} training takes 1/{best.speedup:.2f} of AdamW's time.\n"
            f"What takes a day with AdamW takes {24 - best.hours_saved:.1f} hours."
        )
    return (
        f"It does not pay: {best.optimizer} would be {best.speedup:.2f} times as fast as AdamW.\n"
        f"A change is worth while from {PAYS} on; that is so up to: {limit(best)}."
    )


def main(arguments: list[str] | None = None) -> None:
    """Print the table; the command line's errors name the remedy."""
    options = parser().parse_args(arguments)
    try:
        measured = measure.measure() if options.measure else None
        if measured and measured.rank:
            return  # one table is enough
        if measured:
            print(report(measured))
        question = question_of(options, measured)
        wanted = (options.optimizer,) if options.optimizer else OPTIMIZERS
        found = [a for a in answers(question) if a.optimizer in (RIVAL, *wanted)]
        print(f"{setting(question)}\n\n{table(found)}\n\n{verdict(found)}")
        if options.plot:
            names = [answer.optimizer for answer in found]
            picture.draw(question, bandwidth_of(question), names, options.plot)
            print(f"{options.plot} shows the speed-up against the bandwidth.")
    except (RuntimeError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None


def report(found: measure.Measured) -> str:
    """What was measured, in words."""
    return (
        f"Measured on {found.size} processes, {found.per_node} on a node: "
        f"{units.show(found.bandwidth, 'bit/s')} and {units.show_time(found.latency)} a message "
        f"in a ring; {units.show(found.flops, 'flop/s')}; a compressed step computes "
        f"{found.compression * 1e9:.2g} ns an element longer than fused Adam.\n"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
