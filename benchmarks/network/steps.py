"""Parts `scaling` and `update`: whole steps of training over the links, and their tables."""

from typing import Any

import torch

from benchmarks.network.lab import lab
from benchmarks.network.ranks import run_ranks
from benchmarks.network.replay import Trace, record
from benchmarks.network.scaling import ALONE, DDP, weak_scaling
from benchmarks.network.setting import MB, NODE_RATE, RANK_RATE, Setting, bound, cores, series
from benchmarks.network.update import costs
from podscale.report.charts.lines import XAxis, YAxis
from podscale.report.charts.standalone import line_chart_svg

CLASSES = 1000
BACKWARD = {"short": 0.6, "long": 2.4}
"""Length of the backward pass in times of the links' bound: with the first the links are busier than a core."""
LARGEST_BATCH = 256
"""Images of a rank at most, for a machine whose memory would not hold the activations of more."""
SCALED: dict[str, dict[str, Any]] = {
    f"{name}, {'overlap' if overlap else 'no overlap'}": {"algorithm": name, "overlap": overlap}
    for name in ("torus2d", "flat")
    for overlap in (True, False)
} | {"torus2d, overlap, buckets of 8 MiB": {"algorithm": "torus2d", "bucket_mb": 8.0}}


def scaling(setting: Setting) -> None:
    """Weak scaling of a step from 1 to 8 ranks on two nodes, overlap on and off, against DDP."""
    torch.set_num_threads(1)
    page = setting.head("scaling", "Weak scaling of a training step")
    page += [
        f"Replayed: a step of {setting.model_name} ({setting.side} px, SGD) was measured alone on one core. Ranks wait "
        f"as long instead of computing, since {cores().lower()} cannot compute for eight, and hand over gradients of "
        "the real shapes when the real ones were ready; autograd, buckets (25 MiB, ours and DDP's, unless something "
        "else is said), collectives and links are real. Efficiency: the step without reduction over the step. A step "
        "ends when its slowest rank does.",
    ]
    pictures: dict[str, str] = {}
    for name, batch in batches(setting).items():
        picture = f"network-scaling-{name}.svg"
        section, pictures[picture] = scaling_section(setting, batch)
        page += [*section, "", f"![Efficiency]({picture})"]
    setting.write("scaling", page, pictures)


def batches(setting: Setting) -> dict[str, int]:
    """Images of a rank, chosen for this machine: backward once shorter than the links' bound and once longer."""
    if setting.small:
        return {"short": 2}
    tried = 16
    backward = record(setting.model, CLASSES, side=setting.side, batch=tried, rounds=1).backward
    shape = setting.shape(2, 4, 2 * RANK_RATE, 4 * NODE_RATE)
    least = bound(shape, setting.gradients.bytes / MB)
    return {
        name: max(1, min(LARGEST_BATCH, round(times * least / backward * tried))) for name, times in BACKWARD.items()
    }


def scaling_section(setting: Setting, batch: int) -> tuple[list[str], str]:
    """Table of one batch size with its heading, and the picture of it."""
    trace = record(setting.model, CLASSES, side=setting.side, batch=batch)
    table = [
        "| ranks | variant | step, s | efficiency | wait after backward, s | busy |",
        "|---:|---|---:|---:|---:|---:|",
        f"| 1 | {ALONE} | {trace.step:.3f} | 100.0 % | | |",
    ]
    curves: dict[str, list[tuple[float, float]]] = {}
    for ranks in (2,) if setting.small else (1, 2, 4):
        shape = setting.shape(2, ranks, 2 * RANK_RATE, 4 * NODE_RATE)
        with lab(shape) as built:
            found = run_ranks(built, weak_scaling, SCALED, trace, 1 if setting.small else 2)[0]
        for name, steps in found.items():
            efficiency = found[ALONE].step / steps.step
            if not steps.right:
                raise SystemExit(f"{name}: the ranks got a wrong mean")
            wait = "" if name in (ALONE, DDP) else f"{steps.wait:.3f}"
            table.append(f"| {shape.size} | {name} | {steps.step:.3f} | {efficiency:.1%} | {wait} | {steps.busy:.0%} |")
            if name != ALONE:
                curves.setdefault(name, [(1.0, 1.0)]).append((float(shape.size), efficiency))
    title = f"Weak scaling, batch {batch} a rank, node link half a rank link"
    x = XAxis("ranks", log=True, ticks=(1, 2, 4, 8))
    section = [
        "",
        f"## {batch} images a rank",
        "",
        f"Forward {trace.forward:.2f} s, backward {trace.backward:.2f} s, update {trace.update:.2f} s; the links need "
        f"at least {bound(shape, trace.bytes / MB):.2f} s for the {trace.bytes / MB:.1f} MB of gradients of {shape} "
        "(fewer ranks a node for fewer ranks).",
        "",
        *table,
    ]
    return section, line_chart_svg(title, series(curves), x=x, y=YAxis("efficiency", limits=(0.0, 1.0)))


def update(setting: Setting) -> None:
    """Share of the update in a step, done by every rank in whole and in shards."""
    torch.set_num_threads(1)
    trace = record(setting.model, CLASSES, side=setting.side, batch=8)
    shape = setting.shape(2, 4, 2 * RANK_RATE, 4 * NODE_RATE)
    with lab(shape) as built:
        found = run_ranks(built, costs, built, setting.model, update_sections())[0]
    lines = setting.head("update", "Sharding the update of the weights")
    lines += [
        f"{setting.model_name}, {shape}, a row of the torus is a node: each rank updates 1/{shape.ranks} of the "
        f"weights. Forward and backward of 8 images of {setting.side} px take {trace.forward + trace.backward:.2f} s "
        f"alone on one core; the update is CPU time of one rank, since all take turns on {cores().lower()}. Sharded, "
        "weights are gathered after the update instead of gradients before it: as many bytes (half in bf16), but no "
        "backward pass to hide them behind. State: fp32 masters and moments.",
        "",
        "| update | CPU, ms | share of the step | times less | gather, ms | a rank sends, MB | state of a rank, MB |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, cost in found.items():
        before = found[f"{name.split(',')[0]}, replicated"]
        gather = f"{cost.gather * 1e3:.0f} | {cost.sent / MB:.1f}" if cost.gather else " | "
        lines.append(
            f"| {name} | {cost.update * 1e3:.1f} | {share_of_step(cost.update, trace):.1%} "
            f"| {before.update / cost.update:.2f} | {gather} | {cost.state / MB:.1f} |"
        )
    setting.write("update", lines)


def share_of_step(seconds: float, trace: Trace) -> float:
    """Fraction of a step whose update takes so many seconds."""
    return seconds / (trace.forward + trace.backward + seconds)


def update_sections() -> dict[str, dict[str, Any]]:
    """Train sections to compare, by name."""
    sections: dict[str, dict[str, Any]] = {}
    for optimizer in ("sgd", "lars"):
        whole = {"all_reduce": {"algorithm": "torus2d"}, "optimizer": {"name": optimizer}}
        sharded = {**whole, "weight_update": "sharded"}
        sections |= {
            f"{optimizer}, replicated": whole,
            f"{optimizer}, sharded": sharded,
            f"{optimizer}, sharded, weights gathered in bf16": {**sharded, "weight_gather": "bf16"},
        }
    return sections
