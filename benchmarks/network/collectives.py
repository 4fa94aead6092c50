"""Parts `allreduce`, `tensors`, `ratios` and `auto`: collectives alone, over which links, and their tables."""

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.network import reduce
from benchmarks.network.lab import Shape, lab
from benchmarks.network.meter import Sample
from benchmarks.network.ranks import run_ranks
from benchmarks.network.setting import MB, NODE_RATE, RANK_RATE, SECTIONS, SHORTER, Setting, bound, cores, series
from podscale.config.train import AllReduceSection
from podscale.hardware.collective_cost import ALGORITHMS
from podscale.pytorch.all_reduce.auto import AlgorithmChoice, resolve_algorithm
from podscale.pytorch.world import World
from podscale.report.charts.lines import XAxis, YAxis
from podscale.report.charts.standalone import line_chart_svg

BOUND = (
    "The lower bound of S bytes on N nodes of p ranks (n = N p), whatever the algorithm: "
    "max(2(n-1)/n S / rank link, 2(N-1)/N S / node link). "
)
RATIOS = (1, 2, 4, 8)
"""Rank link : node link."""


def allreduce(setting: Setting) -> None:
    """Every algorithm and DDP, sizes from 1 to 244 MB, on 2 x 4 and 4 x 2."""
    lines = setting.head("allreduce", "All-reduce over shaped links")
    lines += [
        f"{BOUND}In brackets: times the bound. `flat` is gloo's own ring. Above {reduce.HYBRID_UP_TO:g} MB hybrid, a "
        "ring from 8 MiB on, is not measured again: the figures are the ring's.",
        "",
    ]
    limit = (
        f"{cores()} carry every byte of all ranks; busy is the share of them in use while the table's last column ran."
    )
    pictures: dict[str, str] = {}
    cases = [
        (setting.shape(2, 4, RANK_RATE, NODE_RATE), reduce.SIZES),
        (setting.shape(4, 2, RANK_RATE, NODE_RATE), reduce.SIZES[:-1]),
    ]
    if setting.small:
        cases = [(cases[0][0], (0.1,))]
    for shape, sizes in cases:
        with lab(shape) as built:
            found = run_ranks(built, reduce.sweep, built, SECTIONS | SHORTER, sizes)[0]
        name = f"network-allreduce-{shape.nodes}x{shape.ranks}.svg"
        lines += [f"## {shape}", "", *size_table(shape, found, sizes), "", limit, ""]
        lines += [f"![Times the lower bound by size]({name})", ""]
        pictures[name] = size_picture(shape, found)
    setting.write("allreduce", lines, pictures)


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


def size_picture(shape: Shape, found: Mapping[str, Mapping[float, Sample]]) -> str:
    """Times the lower bound by size, as an SVG file."""
    shown = [name for name in ("flat", "tree", "hierarchical", "torus2d", reduce.DDP) if name in found]
    points = {name: [(size, one.median / bound(shape, size)) for size, one in found[name].items()] for name in shown}
    title = f"All-reduce on {shape.nodes} nodes x {shape.ranks} ranks, links {shape.ratio:g} : 1"
    x = XAxis("MB", log=True, ticks=list(found["flat"]))
    return line_chart_svg(title, series(points), x=x, y=YAxis("x lower bound"))


def tensors(setting: Setting) -> None:
    """Tensors of the network, each in a message of its own, with a millisecond between nodes."""
    shape, trace = setting.shape(2, 4, RANK_RATE, NODE_RATE, node_delay=0.5e-3), setting.gradients
    count = len(trace.shapes)
    lines = setting.head("tensors", f"{setting.model_name}'s {count} gradients one by one, and fused")
    with lab(shape) as built:
        single = run_ranks(built, reduce.one_by_one, built, SECTIONS, trace)[0]
        whole = run_ranks(built, reduce.in_buckets, built, SECTIONS, trace, 25.0)[0]
    lines += [
        f"{shape}. {count} tensors, {trace.bytes / MB:.1f} MB in all; without fusion most of the time of the smaller "
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
    setting.write("tensors", lines)


def ratios(setting: Setting) -> None:
    """Ratio of links from which on the grid pays, with ranks placed node by node and dealt out."""
    megabytes = 0.2 if setting.small else 16.0
    lines = setting.head("ratios", "Unequal links")
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
    lines += [ratio_row(setting, ratio, megabytes) for ratio in (RATIOS[:1] if setting.small else RATIOS)]
    setting.write("ratios", lines)


def ratio_row(setting: Setting, ratio: float, megabytes: float) -> str:
    """Row of one ratio."""
    sections = {"flat": SECTIONS["flat"], "torus2d": SECTIONS["torus2d"], **SHORTER}
    shape = setting.shape(2, 4, RANK_RATE, RANK_RATE / ratio)
    with lab(shape) as built:
        found = run_ranks(built, reduce.in_turn, built, sections, megabytes)[0]
        flat_alone = {"flat": SECTIONS["flat"]}
        dealt = run_ranks(built, reduce.in_turn, built, flat_alone, megabytes, places=dealt_out(shape))[0]
    flat, torus, short = (found[name].median for name in sections)
    away = dealt["flat"].median
    return (
        f"| {ratio} | {flat:.2f} | {away:.2f} | {torus:.2f} ({torus / bound(shape, megabytes):.2f}) "
        f"| {flat / torus:.2f} | {away / torus:.2f} | {short:.2f} | {flat / short:.2f} |"
    )


def dealt_out(shape: Shape) -> list[int]:
    """Places of the ranks if rank r stands on node r mod nodes, as pods of one rank each are scheduled."""
    return [rank % shape.nodes * shape.ranks + rank // shape.nodes for rank in range(shape.size)]


def auto(setting: Setting) -> None:
    """Findings and choice of `auto` on links whose speed is known, and how near its model comes to what is measured."""
    trace, tried = setting.gradients, 0.2 if setting.small else 16.0
    lines = setting.head("auto", "What `auto` measures and chooses")
    lines += [
        f"Gradients of {trace.bytes / MB:.1f} MB. In brackets: what the links were set to, for one of the ranks that "
        f"share them. Latency is that of one message of gloo's, with eight ranks on {cores().lower()}. Model and "
        f"measured: an all-reduce of {tried:g} MB.",
        "",
        "| links | probe, s | row MB/s | column MB/s | row latency, us | column latency, us | chosen | buckets, MiB "
        "| flat: model, measured, s | torus2d: model, measured, s |",
        "|---|---:|---:|---:|---:|---:|---|---:|---:|---:|",
    ]
    shapes = [
        setting.shape(2, 4, RANK_RATE, NODE_RATE),
        setting.shape(2, 4, RANK_RATE, RANK_RATE),
        setting.shape(4, 2, RANK_RATE, NODE_RATE, node_delay=0.5e-3),
        setting.shape(1, 8, RANK_RATE, RANK_RATE),
    ]
    for shape in shapes[2:] if setting.small else shapes:
        lines.append(auto_row(shape, trace.bytes, tried))
    setting.write("auto", lines)


def auto_row(shape: Shape, size: int, tried: float) -> str:
    """Row of one cluster. Args: size: bytes of the gradients; tried: megabytes that are measured."""
    sections = {name: SECTIONS[name] for name in ("flat", "torus2d")}
    with lab(shape) as built:
        resolved, seconds = run_ranks(built, _resolve, size)[0]
        found = run_ranks(built, reduce.in_turn, built, sections, tried)[0]
    facts, choice = resolved.facts(), resolved.choice
    share = f"({shape.node_rate / shape.ranks / MB:.4g})" if shape.nodes > 1 else ""
    pairs = [f"{ALGORITHMS[n](resolved.fabric, tried * MB):.2f}, {found[n].median:.2f}" for n in sections]
    return (
        f"| {shape} | {seconds:.1f} | {facts['row_mb_per_second']} ({shape.rank_rate / MB:g}) "
        f"| {facts.get('column_mb_per_second', '')} {share} | {facts['row_latency_us']} "
        f"| {facts.get('column_latency_us', '')} | {choice.algorithm} | {choice.bucket_mb:g} "
        f"| {' | '.join(pairs)} |"
    )


def _resolve(world: World, size: int) -> tuple[AlgorithmChoice, float]:
    with tempfile.TemporaryDirectory() as name:
        begin = time.perf_counter()
        resolved = resolve_algorithm(AllReduceSection(algorithm="auto"), world, size, Path(name, "all_reduce.json"))
        return resolved, time.perf_counter() - begin
