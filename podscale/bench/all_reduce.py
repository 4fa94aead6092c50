"""All-reduce benchmark, `podscale bench allreduce`: local ranks, result tables and a bandwidth chart.

Bandwidths follow nccl-tests (doc/PERFORMANCE.md): algbw = S / t. busbw is algbw times 2(n-1)/n for an all-reduce and
(n-1)/n for a reduce-scatter or all-gather, with n the ranks of the group: the load of a link, independent of n.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from math import ceil, log2
from pathlib import Path
from statistics import median
from typing import Any

from podscale.bench.ranks import run_workers
from podscale.errors import InputError, PodscaleError
from podscale.report.charts.lines import LineSeries, XAxis
from podscale.report.charts.standalone import line_chart_svg

BENCHMARK_MODULE = "podscale.pytorch.link_benchmark"


def run_link_benchmark(job: Mapping[str, Any], ranks: int, time_limit: float) -> dict[str, Any]:
    """Run the benchmark with `ranks` processes on this machine and return its results.

    `job` is JSON-serialisable, `time_limit` in seconds. Raises PodscaleError if a rank failed or the limit passed.
    """
    with tempfile.TemporaryDirectory() as name:
        task, result = Path(name, "job.json"), Path(name, "result.json")
        task.write_text(json.dumps(job), encoding="utf-8")
        codes = run_workers(BENCHMARK_MODULE, [str(task), str(result)], ranks, time_limit)
        if any(codes):
            rank = next(number for number, code in enumerate(codes) if code)
            raise PodscaleError("exited; its error is above", field=f"rank {rank}", got=codes[rank])
        if None in codes:
            raise PodscaleError(
                "the measurement did not finish in time",
                field="--time-limit",
                got=time_limit,
                hint="Choose fewer --sizes or raise the limit.",
            )
        measurements: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return measurements


def parse_sizes(text: str) -> list[int]:
    """Parse sizes such as `64K,1M,100M` into bytes; K, M and G are powers of 1024. Raises InputError."""
    units = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
    sizes = []
    for word in text.upper().split(","):
        number, unit = (word[:-1], word[-1:]) if word[-1:] in units else (word, "")
        if not number.replace(".", "", 1).isdecimal() or float(number) * units[unit] < 4:
            raise InputError(
                f"{word or 'nothing'} is not a size of at least 4 bytes, such as 64K or 25M", field="--sizes", got=text
            )
        sizes.append(int(float(number) * units[unit]))
    return sizes


def format_tables(results: Mapping[str, Any]) -> list[str]:
    """Format Markdown tables: algorithms, phases of the torus by axis, time exposed in a training step."""
    ranks, (rows, row) = results["ranks"], results["rows"]
    lines = [
        f"{ranks} ranks ({rows} x {row}), {results['backend']}, {results['device']}. "
        "algbw = S/t, busbw = algbw x 2(n-1)/n (x (n-1)/n for a half).",
        "",
        "| algorithm | bytes | median, ms | p95, ms | algbw, GB/s | busbw, GB/s | error |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for timing in results["whole"]:
        cells = _timing_cells(timing, 2 * (ranks - 1) / ranks)
        lines.append(f"| {timing['algorithm']} | {timing['bytes']:,} | {cells} | {timing['error']:.1e} |")
    lines += ["", "Along the axes, one phase after the other:", ""]
    lines += ["| axis | phase | bytes | median, ms | p95, ms | algbw, GB/s | busbw, GB/s |", "|---|---|" + "---:|" * 5]
    for timing in results["phases"]:
        group = timing["ranks"]
        factor = (group - 1) / group * (2 if timing["phase"] == "all_reduce" else 1)
        phase = f"{timing['axis']} of {group} | {timing['phase'].replace('_', '-')}"
        lines.append(f"| {phase} | {timing['bytes']:,} | {_timing_cells(timing, factor)} |")
    if results["steps"]:
        lines += ["", "Forward and backward of a step, with and without the all-reduce:", ""]
        lines += [
            "| algorithm | step, ms | without, ms | exposed, ms | share of the step |",
            "|---|---:|---:|---:|---:|",
        ]
    for timing in results["steps"]:
        step, alone = median(timing["seconds"]), median(timing["alone"])
        lines.append(
            f"| {timing['algorithm']} | {step * 1e3:.1f} | {alone * 1e3:.1f} | {(step - alone) * 1e3:.1f} "
            f"| {(step - alone) / step:.1%} |"
        )
    return lines


def _timing_cells(timing: Mapping[str, Any], factor: float) -> str:
    seconds = sorted(timing["seconds"])
    middle, high = median(seconds), percentile(seconds, 0.95)
    rate = timing["bytes"] / middle / 1e9
    return f"{middle * 1e3:.3f} | {high * 1e3:.3f} | {rate:.3f} | {rate * factor:.3f}"


def percentile(ordered: Sequence[float], fraction: float) -> float:
    """Return the nearest-rank percentile of values in rising order; `fraction` is 0.95 for the 95th."""
    return ordered[min(len(ordered), max(1, ceil(fraction * len(ordered)))) - 1]


def bandwidth_chart(results: Mapping[str, Any]) -> str:
    """Draw bus bandwidth by size as the text of an SVG file."""
    factor = 2 * (results["ranks"] - 1) / results["ranks"]
    smallest = min(timing["bytes"] for timing in results["whole"])
    points: dict[str, list[tuple[float, float]]] = {}
    for timing in results["whole"]:
        rate = factor * timing["bytes"] / median(timing["seconds"]) / 1e9
        points.setdefault(timing["algorithm"], []).append((log2(timing["bytes"] / smallest), rate))
    series = [LineSeries(name, line, number % 8 + 1, dots=True) for number, (name, line) in enumerate(points.items())]
    title = f"Bus bandwidth, GB/s: {results['ranks']} ranks, {results['backend']}, {results['device']}"
    return line_chart_svg(title, series, x=XAxis(f"doublings of {smallest:,} bytes"))
