"""The parts of the benchmark that run in a lab: what is measured, over which links, and the tables of it."""

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.conditions import RESULTS, head, publish
from benchmarks.network import reduce
from benchmarks.network.lab import Shape, lab
from benchmarks.network.meter import Sample
from benchmarks.network.ranks import run_ranks
from benchmarks.network.replay import Trace, record
from benchmarks.network.scaling import ALONE, DDP, weak_scaling
from benchmarks.network.update import costs
from podscale.config import ModelSection
from podscale.config.train import AllReduceSection
from podscale.hardware.collective_cost import ALGORITHMS, bandwidth_bound
from podscale.pytorch.all_reduce.auto import resolve_algorithm
from podscale.pytorch.models import build_model
from podscale.pytorch.world import World
from podscale.report.charts.lines import LineSeries
from podscale.report.charts.standalone import line_chart_svg

MB = 1e6
RANK_RATE, NODE_RATE = 100 * MB, 25 * MB
"""So slow that two cores, which move every byte of eight ranks, are mostly idle."""
SECTIONS: dict[str, dict[str, Any]] = {
    "flat": {"algorithm": "flat"},
    "ring": {"algorithm": "ring"},
    "tree": {"algorithm": "tree"},
    "hierarchical": {"algorithm": "hierarchical"},
    "torus2d": {"algorithm": "torus2d"},
    "hybrid": {"algorithm": "hybrid"},
}
SHORTER = {"torus2d, bf16 between nodes": {"algorithm": "torus2d", "wire_column": "bf16"}}
BOUND = (
    "The lower bound of S bytes on N nodes of p ranks (n = N p), whatever the algorithm: "
    "max(2(n-1)/n S / rank link, 2(N-1)/N S / node link). "
)
LIMIT = "Two cores carry every byte of all ranks; busy is the share of both in use while the table's last column ran."


def _head(part: str, title: str) -> list[str]:
    return head(title, ["torch", "numpy"], command=f"python -m benchmarks.network {part}")


def bound(shape: Shape, megabytes: float) -> float:
    return bandwidth_bound(megabytes * MB, shape.nodes, shape.ranks, shape.rank_rate, shape.node_rate)


def allreduce() -> None:
    """Every algorithm and DDP, sizes from 1 to 244 MB, on 2 x 4 and 4 x 2."""
    lines = _head("allreduce", "All-reduce over shaped links")
    lines += [
        BOUND + "In brackets: times the bound. `flat` is gloo's own ring. Above "
        f"{reduce.HYBRID_UP_TO:g} MB hybrid, a ring from 8 MiB on, is not measured again: the figures are the ring's.",
        "",
    ]
    for shape, sizes in (
        (Shape(2, 4, RANK_RATE, NODE_RATE), reduce.SIZES),
        (Shape(4, 2, RANK_RATE, NODE_RATE), reduce.SIZES[:-1]),
    ):
        with lab(shape) as built:
            found = run_ranks(built, reduce.sweep, built, SECTIONS | SHORTER, sizes)[0]
        lines += [f"## {shape}", "", *size_table(shape, found, sizes), "", LIMIT, ""]
        name = f"network-allreduce-{shape.nodes}x{shape.ranks}.svg"
        lines += [f"![Times the lower bound by size]({name})", ""]
        plot_sizes(RESULTS / name, shape, found)
    publish(RESULTS / "network-allreduce.md", lines)


def size_table(shape: Shape, found: Mapping[str, Mapping[float, Sample]], sizes: Sequence[float]) -> list[str]:
    """Seconds by algorithm and size; speed-up, traffic and busy cores at the largest size."""
    last, flat = sizes[-1], found["flat"][sizes[-1]].median
    lines = [
        "| algorithm | " + " | ".join(f"{size:g} MB, s" for size in sizes) + f" | x flat at {last:g} MB "
        "| sent by a node / S | by a rank / S | busy |",
        "|---|" + "---:|" * (len(sizes) + 4),
    ]
    for name, samples in found.items():
        cells = [f"{samples[size].median:.3f} ({samples[size].median / bound(shape, size):.2f})" for size in sizes]
        end = samples[last]
        traffic = f"{end.node_bytes / last / MB:.2f} | {end.rank_bytes / last / MB:.2f} | {end.busy:.0%}"
        lines.append(f"| {name} | {' | '.join(cells)} | {flat / end.median:.2f} | {traffic} |")
    cells = [f"{bound(shape, size):.3f} (1)" for size in sizes]
    lines.append(f"| lower bound | {' | '.join(cells)} | {flat / bound(shape, last):.2f} | | | |")
    return lines


def plot_sizes(path: Path, shape: Shape, found: Mapping[str, Mapping[float, Sample]]) -> None:
    shown = {name: found[name] for name in ("flat", "tree", "hierarchical", "torus2d", reduce.DDP) if name in found}
    drawn = lines(
        {name: [(size, one.median / bound(shape, size)) for size, one in shown[name].items()] for name in shown}
    )
    title = f"All-reduce on {shape.nodes} nodes x {shape.ranks} ranks, links {shape.ratio:g} : 1"
    options = {"x_unit": "MB", "log_x": True, "x_ticks": list(found["flat"])}
    path.write_text(line_chart_svg(title, drawn, y_unit="x lower bound", **options))


def lines(points: Mapping[str, Sequence[tuple[float, float]]]) -> list[LineSeries]:
    """Named lines in the colours of reports."""
    return [LineSeries(name, found, number + 1, dots=True) for number, (name, found) in enumerate(points.items())]


def tensors() -> None:
    """ResNet-50's 161 tensors, each in a message of its own, with a millisecond between nodes."""
    shape = Shape(2, 4, RANK_RATE, NODE_RATE, node_delay=0.5e-3)
    trace = resnet50_shapes()
    lines = _head("tensors", "ResNet-50's 161 gradients one by one, and fused")
    fused = trace.bytes / MB
    with lab(shape) as built:
        single = run_ranks(built, reduce.one_by_one, built, SECTIONS, trace)[0]
        whole = run_ranks(built, reduce.in_buckets, built, SECTIONS, trace, 25.0)[0]
    lines += [
        f"{shape}. {len(trace.shapes)} tensors, {fused:.1f} MB in all; without fusion most of the time of the smaller "
        "ones is latency, which this table is about. Fused: buckets of 25 MiB, one after the other.",
        "",
        "| algorithm | one by one, s | fused, s | ratio | x flat, one by one | busy |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name in SECTIONS:
        one, buckets = single[name].median, whole[name].median
        gain = single["flat"].median / one
        lines.append(
            f"| {name} | {one:.2f} | {buckets:.2f} | {one / buckets:.2f} | {gain:.2f} | {single[name].busy:.0%} |"
        )
    publish(RESULTS / "network-tensors.md", lines)


def resnet50_shapes() -> Trace:
    """The shapes of ResNet-50's parameters, no times."""
    shapes = tuple(parameter.shape for parameter in build_model(ModelSection(name="resnet50"), 1000).parameters())
    return Trace(shapes, (0.0,) * len(shapes), 0.0, 0.0)


def ratios() -> None:
    """At which ratio of links the grid pays, with ranks placed node by node and dealt out."""
    megabytes = 16.0
    lines = _head("ratios", "Unequal links")
    lines += [
        f"2 nodes x 4 ranks, {megabytes:g} MB, each rank's link {RANK_RATE / MB:g} MB/s; the node's link is the "
        "ratio's part of it. Dealt out: rank r stands on node r mod 2, as where pods of one rank each are scheduled; "
        "flat's ring then crosses the nodes' links at every hop. With ranks placed well no fp32 all-reduce on 2 x 4 "
        "can be more than 7/4 as fast as a ring: 2(n-1)/n S over a node's link against 2(N-1)/N S.",
        "",
        "| rank link : node link | flat, s | flat dealt out, s | torus2d, s (x bound) | x flat | x flat dealt out "
        "| torus2d, bf16 between nodes, s | x flat |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    sections = {"flat": SECTIONS["flat"], "torus2d": SECTIONS["torus2d"], **SHORTER}
    for ratio in (1, 2, 4, 8):
        shape = Shape(2, 4, RANK_RATE, RANK_RATE / ratio)
        with lab(shape) as built:
            found = run_ranks(built, reduce.in_turn, built, sections, megabytes)[0]
            dealt = run_ranks(built, reduce.in_turn, built, {"flat": SECTIONS["flat"]}, megabytes, dealt_out=True)[0]
        flat, away, torus, short = (
            sample.median for sample in (found["flat"], dealt["flat"], found["torus2d"], *map(found.get, SHORTER))
        )
        lines.append(
            f"| {ratio} | {flat:.2f} | {away:.2f} | {torus:.2f} ({torus / bound(shape, megabytes):.2f}) "
            f"| {flat / torus:.2f} | {away / torus:.2f} | {short:.2f} | {flat / short:.2f} |"
        )
    publish(RESULTS / "network-ratios.md", lines)


def auto() -> None:
    """What `auto` finds and chooses on links whose speed is known, and how near the model comes to what is measured."""
    trace, tried = resnet50_shapes(), 16.0
    lines = _head("auto", "What `auto` measures and chooses")
    lines += [
        f"Gradients of {trace.bytes / MB:.1f} MB. In brackets: what the links were set to, for one of the ranks that "
        "share them. Latency is that of one message of gloo's, with eight ranks on two cores. Model and measured: an "
        f"all-reduce of {tried:g} MB.",
        "",
        "| links | probe, s | row MB/s | column MB/s | row latency, us | column latency, us | chosen | buckets, MiB "
        "| flat: model, measured, s | torus2d: model, measured, s |",
        "|---|---:|---:|---:|---:|---:|---|---:|---:|---:|",
    ]
    sections = {name: SECTIONS[name] for name in ("flat", "torus2d")}
    for shape in (
        Shape(2, 4, RANK_RATE, NODE_RATE),
        Shape(2, 4, RANK_RATE, RANK_RATE),
        Shape(4, 2, RANK_RATE, NODE_RATE, node_delay=0.5e-3),
        Shape(1, 8, RANK_RATE, RANK_RATE),
    ):
        with lab(shape) as built:
            settled, seconds = run_ranks(built, _settle, trace.bytes)[0]
            found = run_ranks(built, reduce.in_turn, built, sections, tried)[0]
        facts, choice = settled.facts(), settled.choice
        share = f"({shape.node_rate / shape.ranks / MB:.4g})" if shape.nodes > 1 else ""
        pairs = [f"{ALGORITHMS[n](settled.fabric, tried * MB):.2f}, {found[n].median:.2f}" for n in sections]
        lines.append(
            f"| {shape} | {seconds:.1f} | {facts['row_mb_per_second']} ({shape.rank_rate / MB:g}) "
            f"| {facts.get('column_mb_per_second', '')} {share} | {facts['row_latency_us']} "
            f"| {facts.get('column_latency_us', '')} | {choice.algorithm} | {choice.bucket_mb:g} "
            f"| {' | '.join(pairs)} |"
        )
    publish(RESULTS / "network-auto.md", lines)


def _settle(world: World, size: int) -> Any:
    with tempfile.TemporaryDirectory() as name:
        begin = time.perf_counter()
        settled = resolve_algorithm(AllReduceSection(algorithm="auto"), world, size, Path(name, "all_reduce.json"))
        return settled, time.perf_counter() - begin


BATCHES = (32, 128)
"""Images of a rank in the scaled step: with the first the links are busier than a core, with the second less."""
SCALED = {
    f"{name}, {'overlap' if overlap else 'no overlap'}": {"algorithm": name, "overlap": overlap}
    for name in ("torus2d", "flat")
    for overlap in (True, False)
} | {"torus2d, overlap, buckets of 8 MiB": {"algorithm": "torus2d", "bucket_mb": 8.0}}


def scaling() -> None:
    """Weak scaling of ResNet-50 from 1 to 8 ranks on two nodes, overlap on and off, against DDP."""
    torch.set_num_threads(1)
    lines = _head("scaling", "Weak scaling of a training step")
    lines += [
        "Replayed: a step of ResNet-50 (64 px, SGD) was measured alone on one core. Ranks wait as long instead of "
        "computing, since two cores cannot compute for eight, and hand over gradients of the real shapes when the real "
        "ones were ready; autograd, buckets (25 MiB, ours and DDP's, where nothing else is said), collectives and "
        "links are real. Efficiency: the step without reduction over the step. A step ends when its slowest rank does.",
    ]
    for batch in BATCHES:
        lines += scaling_table(batch)
    publish(RESULTS / "network-scaling.md", lines)


def scaling_table(batch: int) -> list[str]:
    """The table and plot of one batch size."""
    trace = record(ModelSection(name="resnet50"), 1000, side=64, batch=batch)
    lines = [
        "| ranks | variant | step, s | efficiency | wait after backward, s | busy |",
        "|---:|---|---:|---:|---:|---:|",
        f"| 1 | {ALONE} | {trace.step:.3f} | 100.0 % | | |",
    ]
    curves: dict[str, list[tuple[float, float]]] = {}
    for ranks in (1, 2, 4):
        shape = Shape(2, ranks, 2 * RANK_RATE, 4 * NODE_RATE)
        with lab(shape) as built:
            found = run_ranks(built, weak_scaling, SCALED, trace, 2)[0]
        for name, steps in found.items():
            efficiency = found[ALONE].step / steps.step
            assert steps.right, f"{name}: wrong means"
            wait = "" if name in (ALONE, DDP) else f"{steps.wait:.3f}"
            lines.append(f"| {shape.size} | {name} | {steps.step:.3f} | {efficiency:.1%} | {wait} | {steps.busy:.0%} |")
            if name != ALONE:
                curves.setdefault(name, [(1.0, 1.0)]).append((float(shape.size), efficiency))
    plot = f"network-scaling-{batch}.svg"
    title = f"Weak scaling, batch {batch} a rank, node link half a rank link"
    options = {"x_unit": "ranks", "log_x": True, "x_ticks": (1, 2, 4, 8), "y_range": (0.0, 1.0)}
    (RESULTS / plot).write_text(line_chart_svg(title, lines(curves), y_unit="efficiency", **options))
    head = [
        "",
        f"## {batch} images a rank",
        "",
        f"Forward {trace.forward:.2f} s, backward {trace.backward:.2f} s, update {trace.update:.2f} s; the links need "
        f"at least {bound(shape, trace.bytes / MB):.2f} s for the {trace.bytes / MB:.1f} MB of gradients of {shape} "
        "(fewer ranks a node for fewer ranks).",
        "",
    ]
    return [*head, *lines, "", f"![Efficiency]({plot})"]


def update() -> None:
    """The update's share of a step, done by every rank in whole and in shards."""
    torch.set_num_threads(1)
    trace = record(ModelSection(name="resnet50"), 1000, side=64, batch=8)
    compute = trace.forward + trace.backward
    shape = Shape(2, 4, 2 * RANK_RATE, 4 * NODE_RATE)
    torus = {"all_reduce": {"algorithm": "torus2d"}}
    sections: dict[str, dict[str, Any]] = {}
    for optimizer in ("sgd", "lars"):
        whole = {**torus, "optimizer": {"name": optimizer}}
        sections[f"{optimizer}, replicated"] = whole
        sections[f"{optimizer}, sharded"] = {**whole, "weight_update": "sharded"}
        sections[f"{optimizer}, sharded, weights gathered in bf16"] = {
            **whole, "weight_update": "sharded", "weight_gather": "bf16",
        }  # fmt: skip
    with lab(shape) as built:
        found = run_ranks(built, costs, built, sections)[0]
    lines = _head("update", "Sharding the update of the weights")
    lines += [
        f"ResNet-50, {shape}, a row of the torus is a node: each rank updates a quarter. Forward and backward of 8 "
        f"images of 64 px take {compute:.2f} s alone on one core; the update is CPU time of one rank, since eight take "
        "turns on two cores. Sharded, weights are gathered after the update instead of gradients before it: as many "
        "bytes (half in bf16), but no backward pass to hide them behind. State: fp32 masters and moments.",
        "",
        "| update | CPU, ms | share of the step | times less | gather, ms | a rank sends, MB | state of a rank, MB |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, cost in found.items():
        before = found[f"{name.split(',')[0]}, replicated"]
        gather = f"{cost.gather * 1e3:.0f} | {cost.sent / MB:.1f}" if cost.gather else " | "
        lines.append(
            f"| {name} | {cost.update * 1e3:.1f} | {cost.update / (compute + cost.update):.1%} "
            f"| {before.update / cost.update:.2f} | {gather} | {cost.state / MB:.1f} |"
        )
    publish(RESULTS / "network-update.md", lines)
