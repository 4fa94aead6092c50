"""Parts `allreduce`, `tensors`, `ratios` and `auto`: time of an all-reduce over the emulated links."""

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.network.measurement import Sample, measure, run_ranks
from benchmarks.network.netns_cluster import ClusterShape, NetnsCluster, netns_cluster
from benchmarks.network.replay import ReplayedModel, StepTrace, split_gradients
from benchmarks.network.setting import MB, NODE_RATE, RANK_RATE, Setting, bound, cores, series
from podscale.config.train import AllReduceSection
from podscale.hardware.collective_cost import ALGORITHMS
from podscale.pytorch.all_reduce import build_all_reduce
from podscale.pytorch.all_reduce.algorithms import AllReduce
from podscale.pytorch.all_reduce.auto import AlgorithmChoice, resolve_algorithm
from podscale.pytorch.stored_choice import StoredChoice
from podscale.pytorch.world import World
from podscale.report.charts.lines import XAxis, YAxis
from podscale.report.charts.standalone import line_chart_svg
from podscale.training.param_layout import plan_buckets

Sections = Mapping[str, dict[str, Any]]
"""All-reduce sections of the run document, by their names in the tables."""
SECTIONS: Sections = {
    name: {"algorithm": name} for name in ("flat", "ring", "tree", "hierarchical", "torus2d", "hybrid")
}
BF16_SECTIONS: Sections = {"torus2d, bf16 between nodes": {"algorithm": "torus2d", "wire_column": "bf16"}}
SIZES = (1.0, 8.0, 51.0, 102.2, 243.9)
"""MB of fp32 gradients. ResNet-50's 25,557,032 parameters are 102.2, AlexNet's 60,967,112 are 243.9."""
ROUNDS = {1.0: 10, 8.0: 3, 51.0: 1, 102.2: 1, 243.9: 1}
HYBRID_UP_TO = 51.0
"""MB up to which `hybrid` is measured: above its threshold it is a ring, so one larger size is enough."""
DDP = "DDP default"
BOUND = (
    "Lower bound of every algorithm for S bytes on N nodes of p ranks (n = N p): "
    "max(2(n-1)/n S / rank link, 2(N-1)/N S / node link). "
)
RATIOS = (1, 2, 4, 8)
"""Rank link : node link."""


def allreduce(setting: Setting) -> None:
    """Measure every algorithm and DDP with sizes from 1 to 244 MB, on 2 x 4 and 4 x 2 ranks."""
    lines = setting.head("allreduce", "All-reduce over shaped links")
    lines += [
        f"{BOUND}In brackets: time / lower bound. `flat` is gloo's own ring. `hybrid` is a ring from 8 MiB on. Above "
        f"{HYBRID_UP_TO:g} MB it is not measured; the table repeats the times of the ring.",
        "",
    ]
    caption = f"{cores()} move every byte of all ranks. Busy: the fraction of them in use at the largest size."
    pictures: dict[str, str] = {}
    cases = [
        (setting.shape(2, 4, RANK_RATE, NODE_RATE), SIZES),
        (setting.shape(4, 2, RANK_RATE, NODE_RATE), SIZES[:-1]),
    ]
    if setting.small:
        cases = [(cases[0][0], (0.1,))]
    for shape, sizes in cases:
        with netns_cluster(shape) as cluster:
            samples = run_ranks(cluster, sweep, cluster, {**SECTIONS, **BF16_SECTIONS}, sizes)[0]
        name = f"network-allreduce-{shape.nodes}x{shape.ranks}.svg"
        lines += [f"## {shape}", "", *size_table(shape, samples, sizes), "", caption, ""]
        lines += [f"![Times the lower bound by size]({name})", ""]
        pictures[name] = size_picture(shape, samples)
    setting.write("allreduce", lines, pictures)


def size_table(shape: ClusterShape, by_name: Mapping[str, Mapping[float, Sample]], sizes: Sequence[float]) -> list[str]:
    """Return the seconds by algorithm and size; speed-up, traffic and busy cores at the largest size."""
    last, flat = sizes[-1], by_name["flat"][sizes[-1]].median
    lines = [
        "| algorithm | " + " | ".join(f"{size:g} MB, s" for size in sizes) + f" | x flat at {last:g} MB "
        "| sent by a node / S | by a rank / S | busy |",
        "|---|" + "---:|" * (len(sizes) + 4),
    ]
    for name, samples in by_name.items():
        cells = [f"{samples[size].median:.3f} ({samples[size].median / bound(shape, size):.2f})" for size in sizes]
        largest = samples[last]
        traffic = f"{largest.node_bytes / last / MB:.2f} | {largest.rank_bytes / last / MB:.2f} | {largest.busy:.0%}"
        lines.append(f"| {name} | {' | '.join(cells)} | {flat / largest.median:.2f} | {traffic} |")
    cells = [f"{bound(shape, size):.3f} (1)" for size in sizes]
    lines.append(f"| lower bound | {' | '.join(cells)} | {flat / bound(shape, last):.2f} | | | |")
    return lines


def size_picture(shape: ClusterShape, by_name: Mapping[str, Mapping[float, Sample]]) -> str:
    """Draw the time over the lower bound, by size, as an SVG file."""
    points = {
        name: [(size, sample.median / bound(shape, size)) for size, sample in by_name[name].items()]
        for name in ("flat", "tree", "hierarchical", "torus2d", DDP)
        if name in by_name
    }
    title = f"All-reduce on {shape.nodes} nodes x {shape.ranks} ranks, links {shape.ratio:g} : 1"
    x = XAxis("MB", log=True, ticks=list(by_name["flat"]))
    return line_chart_svg(title, series(points), x=x, y=YAxis("x lower bound"))


def tensors(setting: Setting) -> None:
    """Measure one message per tensor of the model against fused buckets, with a millisecond between nodes."""
    shape, trace = setting.shape(2, 4, RANK_RATE, NODE_RATE, node_delay=0.5e-3), setting.gradients
    count = len(trace.shapes)
    lines = setting.head("tensors", f"{setting.model_name}'s {count} gradients one by one, and fused")
    with netns_cluster(shape) as cluster:
        single = run_ranks(cluster, measure_tensors, cluster, SECTIONS, trace)[0]
        fused = run_ranks(cluster, measure_fused, cluster, SECTIONS, trace, 25.0)[0]
    lines += [
        f"{shape}. {count} tensors, {trace.bytes / MB:.1f} MB in all. Without fusion the time of the smaller ones is "
        "mostly latency. Fused: buckets of 25 MiB, one after the other.",
        "",
        "| algorithm | one by one, s | fused, s | ratio | x flat, one by one | busy |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name in SECTIONS:
        seconds, in_buckets = single[name].median, fused[name].median
        ratios = f"{seconds / in_buckets:.2f} | {single['flat'].median / seconds:.2f}"
        lines.append(f"| {name} | {seconds:.2f} | {in_buckets:.2f} | {ratios} | {single[name].busy:.0%} |")
    setting.write("tensors", lines)


def ratios(setting: Setting) -> None:
    """Measure flat and torus2d for several ratios of the link rates, with ranks placed node by node and round-robin."""
    megabytes = 0.2 if setting.small else 16.0
    lines = setting.head("ratios", "Links between nodes slower than inside them")
    lines += [
        f"2 nodes x 4 ranks, {megabytes:g} MB, each rank's link {RANK_RATE / MB:g} MB/s. Round-robin: rank r runs on "
        "node r mod 2, as if a scheduler had placed pods of one rank each; the ring of `flat` then crosses the nodes' "
        "links at every hop. With ranks placed node by node, no fp32 all-reduce on 2 x 4 can be more than 7/4 as fast "
        "as a ring, which sends 2(n-1)/n S over a node's link instead of 2(N-1)/N S.",
        "",
        "| rank link : node link | flat, s | flat round-robin, s | torus2d, s (x bound) | x flat | x flat round-robin "
        "| torus2d, bf16 between nodes, s | x flat |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [ratio_row(setting, ratio, megabytes) for ratio in (RATIOS[:1] if setting.small else RATIOS)]
    setting.write("ratios", lines)


def ratio_row(setting: Setting, ratio: float, megabytes: float) -> str:
    flat_section = {"flat": SECTIONS["flat"]}
    sections = {**flat_section, "torus2d": SECTIONS["torus2d"], **BF16_SECTIONS}
    shape = setting.shape(2, 4, RANK_RATE, RANK_RATE / ratio)
    with netns_cluster(shape) as cluster:
        samples = run_ranks(cluster, measure_bucket, cluster, sections, megabytes)[0]
        placement = round_robin(shape)
        spread = run_ranks(cluster, measure_bucket, cluster, flat_section, megabytes, placement=placement)[0]
    flat, torus, bf16 = (samples[name].median for name in sections)
    flat_spread = spread["flat"].median
    return (
        f"| {ratio} | {flat:.2f} | {flat_spread:.2f} | {torus:.2f} ({torus / bound(shape, megabytes):.2f}) "
        f"| {flat / torus:.2f} | {flat_spread / torus:.2f} | {bf16:.2f} | {flat / bf16:.2f} |"
    )


def round_robin(shape: ClusterShape) -> list[int]:
    """Return the slots of the ranks if rank r runs on node r mod nodes, as pods of one rank each are scheduled."""
    return [rank % shape.nodes * shape.ranks + rank // shape.nodes for rank in range(shape.size)]


def auto(setting: Setting) -> None:
    """Compare the measurements, the choice and the cost model of `auto` with links of known speed."""
    trace, megabytes = setting.gradients, 0.2 if setting.small else 16.0
    lines = setting.head("auto", "What `auto` measures and chooses")
    lines += [
        f"Gradients of {trace.bytes / MB:.1f} MB. In brackets: the configured rate of the link, for one of the ranks "
        f"that share it. Latency: one message of gloo, with eight ranks on {cores().lower()}. Model and measured: an "
        f"all-reduce of {megabytes:g} MB.",
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
        lines.append(auto_row(shape, trace.bytes, megabytes))
    setting.write("auto", lines)


def auto_row(shape: ClusterShape, gradient_bytes: int, megabytes: float) -> str:
    sections = {name: SECTIONS[name] for name in ("flat", "torus2d")}
    with netns_cluster(shape) as cluster:
        resolved, seconds = run_ranks(cluster, _resolve, gradient_bytes)[0]
        samples = run_ranks(cluster, measure_bucket, cluster, sections, megabytes)[0]
    facts, choice = resolved.facts(), resolved.choice
    column_rate = f"({shape.node_rate / shape.ranks / MB:.4g})" if shape.nodes > 1 else ""
    pairs = [f"{ALGORITHMS[n](resolved.fabric, megabytes * MB):.2f}, {samples[n].median:.2f}" for n in sections]
    return (
        f"| {shape} | {seconds:.1f} | {facts['row_mb_per_second']} ({shape.rank_rate / MB:g}) "
        f"| {facts.get('column_mb_per_second', '')} {column_rate} | {facts['row_latency_us']} "
        f"| {facts.get('column_latency_us', '')} | {choice.algorithm} | {choice.bucket_mb:g} "
        f"| {' | '.join(pairs)} |"
    )


def _resolve(world: World, size: int) -> tuple[AlgorithmChoice, float]:
    with tempfile.TemporaryDirectory() as name:
        start = time.perf_counter()
        stored = StoredChoice(Path(name, "all_reduce.json"))
        resolved = resolve_algorithm(AllReduceSection(algorithm="auto"), world, size, stored)
        return resolved, time.perf_counter() - start


def sweep(
    world: World, cluster: NetnsCluster, sections: Sections, sizes: Sequence[float]
) -> dict[str, dict[float, Sample]]:
    """Return {algorithm: {size in MB: Sample}} of every section and of DDP."""
    samples: dict[str, dict[float, Sample]] = {}
    for name, reduce in build_checked(world, sections):
        samples[name] = {}
        for size in sizes:
            if name == "hybrid" and size > HYBRID_UP_TO:
                samples[name][size] = samples["ring"][size]
                continue
            samples[name][size] = measure(world, cluster, partial(reduce, _bucket(world, size)), ROUNDS.get(size, 1))
    samples[DDP] = {
        size: _measure_ddp(world, cluster, split_gradients(int(size * 1e6)), ROUNDS.get(size, 1)) for size in sizes
    }
    return samples


def measure_tensors(world: World, cluster: NetnsCluster, sections: Sections, trace: StepTrace) -> dict[str, Sample]:
    """Reduce every gradient of a model in its own message."""
    lengths = [-(-shape.numel() // world.size) * world.size for shape in trace.shapes]
    return _measure(world, cluster, sections, [torch.zeros(length) for length in lengths])


def measure_fused(
    world: World, cluster: NetnsCluster, sections: Sections, trace: StepTrace, bucket_mb: float
) -> dict[str, Sample]:
    """Reduce the gradients of a model fused into buckets, as the reducer does."""
    layout = plan_buckets([shape.numel() for shape in trace.shapes], int(bucket_mb * 2**20) // 4, world.size)
    flat = torch.zeros(layout.length)
    return _measure(world, cluster, sections, [flat[start:stop] for start, stop in layout.bounds])


def measure_bucket(world: World, cluster: NetnsCluster, sections: Sections, megabytes: float) -> dict[str, Sample]:
    return _measure(world, cluster, sections, [_bucket(world, megabytes)])


def _measure(world: World, cluster: NetnsCluster, sections: Sections, tensors: Sequence[Tensor]) -> dict[str, Sample]:
    """Reduce all tensors, one after the other, with every section."""
    return {
        name: measure(world, cluster, partial(_reduce_all, reduce, tensors), 1)
        for name, reduce in build_checked(world, sections)
    }


def _reduce_all(reduce: AllReduce, tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        reduce(tensor)


def build_checked(world: World, sections: Sections) -> Iterator[tuple[str, AllReduce]]:
    """Yield the name and the collective of every section, after a check of its result."""
    for name, section in sections.items():
        reduce = build_all_reduce(AllReduceSection(**section), world)
        check(world, reduce, section)
        yield name, reduce


def check(world: World, reduce: AllReduce, section: dict[str, Any]) -> None:
    """Reduce a small bucket of known mean, which also opens the connections. Raises RuntimeError for a wrong mean."""
    count = 64 * world.size
    bucket = torch.arange(count, dtype=torch.float32) % 7 + world.rank
    expected = torch.arange(count, dtype=torch.float32) % 7 + (world.size - 1) / 2
    reduce(bucket)
    tolerance = 0.05 if "bf16" in str(section) else 1e-5
    if not torch.allclose(bucket, expected, atol=tolerance):
        raise RuntimeError(f"{section}: wrong mean")


def _bucket(world: World, megabytes: float) -> Tensor:
    unit = 64 * world.size
    return torch.full((int(megabytes * 1e6 / 4) // unit * unit,), float(world.rank))


def _measure_ddp(world: World, cluster: NetnsCluster, trace: StepTrace, rounds: int) -> Sample:
    """Measure DDP with its defaults: buckets of 25 MiB, the first of 1 MiB."""
    model = DistributedDataParallel(ReplayedModel(trace, float(world.rank)), init_sync=False)
    start = torch.zeros((), requires_grad=True)

    def step() -> None:
        model.zero_grad()
        model(start).backward()

    step()  # DDP rebuilds its buckets after the first backward
    sample = measure(world, cluster, step, rounds)
    gradient = next(model.parameters()).grad
    if gradient is None or not torch.allclose(gradient, torch.tensor((world.size - 1) / 2)):
        raise RuntimeError("DDP: wrong mean")
    return sample
