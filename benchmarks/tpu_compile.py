"""Training steps compiled for TPU slices by the real TPU compiler: memory, collectives, estimated speed.

    python -m benchmarks.tpu_compile [ROW ...] [--list]

Nothing runs on a TPU. Needs libtpu and jax (requirements/tpu.txt); a row takes several minutes of a core. Without ROW,
compiles the rows that results/tpu-compile.json lacks. A named row is compiled again, unless `podscale tpu compile` has
its result in the cache. A failed row is recorded with its reason. If MLPerf's logs have the time of the same step on
the same chips, the page compares it with the estimate. The section about a sweep is made from tpu-sweep.json, the
output of the command that it shows. The small form compiles a tiny model (or nothing, without libtpu) and renders the
committed rows.
"""

import importlib.util
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.conditions import head
from benchmarks.harness import RESULTS, Options, exit_unavailable, write_results
from podscale import config
from podscale.cli.tpu import build_compile_request
from podscale.errors import InputError, PodscaleError
from podscale.hardware import find_topology
from podscale.jax.aot.batch_search import batch_within_memory
from podscale.jax.aot.compile_report import build_report
from podscale.jax.aot.request import CompileRequest, compile_aot, default_cache
from podscale.pipelines import presets
from podscale.util.files import write_json
from podscale.util.formatting import format_bytes

RECORDS, PAGE, SWEPT = "tpu-compile.json", "tpu-compile.md", "tpu-sweep.json"
SWEEP = "podscale tpu compile tpu-v5e-16 --sweep batch --json"
TIMEOUT = 5400.0
"""Timeout of one compilation, seconds."""
MLPERF = "kumar2019-32k"
PLAIN = (
    *("train.weight_update=replicated", "train.all_reduce.algorithm=flat"),
    "train.all_reduce.shard_over=row",
)
EIGHT_IMAGES = (
    *("train.engine=jax", "input.loader=auto", "train.global_batch=8", "model.batch_norm.span=8"),
    *("train.epochs=1", "train.schedule.warmup_epochs=0"),  # the schedule of many tiny steps would take memory
)
"""Global batch of eight images, for slices of at least eight devices."""


@dataclass(frozen=True)
class CompiledPreset:
    """Preset with changes on a topology.

    Args:
        measured: ms of a step by Google's logs (mlcommons/training_results), which include a share of the evaluations.
    """

    name: str
    topology: str
    changes: tuple[str, ...] = ()
    preset: str = MLPERF
    measured: float | None = None


ROWS = (
    CompiledPreset("v3-1024", "v3:32x32", measured=25.1),
    CompiledPreset("v3-1024-plain", "v3:32x32", (*PLAIN, "model.batch_norm.span=16"), measured=25.1),
    CompiledPreset("v3-16", "v3:4x4", ("train.global_batch=4096",), measured=131.1),
    CompiledPreset("v3-128", "v3:8x16", measured=135.7),
    CompiledPreset("v3-512", "v3:16x32", ("model.batch_norm.span=32",), measured=44.1),
    CompiledPreset("v5e-16", "v5e:4x4", ("train.global_batch=2048",)),
    CompiledPreset("tpu-v5e-16", "v5e:4x4", preset="tpu-v5e-16"),
    CompiledPreset("tpu-v6e-64", "v6e:8x8", preset="tpu-v6e-64"),
    CompiledPreset("v5e-256", "v5e:16x16"),
    CompiledPreset("v4-4096", "v4:16x16x16", preset="mlperf-4096xtpuv4", measured=4.18),
    CompiledPreset("v5p-512", "v5p:8x8x8"),
    CompiledPreset("v6e-256", "v6e:16x16"),
    CompiledPreset("tpu7x-128", "tpu7x:4x4x8"),
    CompiledPreset("v3-64", "v3:8x8", ("train.global_batch=16384",), measured=130.9),
    CompiledPreset("v3-256", "v3:16x16", ("model.batch_norm.span=64",), measured=78.7),
    CompiledPreset("v5e-2x256", "v5e:16x16 x2", ("train.global_batch=65536",)),
    CompiledPreset("v5e-8-images", "v5e:2x4", EIGHT_IMAGES),
    CompiledPreset("v5e-8-images-cut", "v5e:4x4", (*EIGHT_IMAGES, "train.spatial_partitions=[2,1]")),
)
"""Rows, the most useful first. v4's step: 32,768 images at 7,836,543 images/s, evaluations included."""


TINY = CompiledPreset("tiny", "v5e:2x4", (*EIGHT_IMAGES, "model.name=resnet18", "model.width=4", "input.image_size=32"))
"""The small form's."""


@dataclass
class RowResult:
    """Result of a row; a record of tpu-compile.json."""

    name: str
    date: str
    changes: list[str]
    preset: str
    measured: float | None
    topology: str
    found: dict[str, Any] | None = None
    reason: str = ""
    note: str = ""
    """Written by hand, for a row that the present sources would not reproduce."""


def main() -> None:
    parser = Options(__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW")
    parser.add_argument("--list", action="store_true", help="print the rows and exit")
    options = parser.read()
    if options.list:
        print("\n".join(f"{row.name:<14} {row.topology:<13} {row.preset} {' '.join(row.changes)}" for row in ROWS))
        return
    rows = (*ROWS, TINY) if options.small else ROWS
    if unknown := set(options.rows) - {row.name for row in rows}:
        parser.error(f"ROW: unknown row (got {', '.join(sorted(unknown))}). See --list.")
    if options.small:
        copy_records(options.results)
        for row in rows:
            build_request(row)  # refused if its preset has changed
    results = read_results(options.results / RECORDS)
    missing = [row.name for row in rows if row.name not in results or results[row.name].found is None]
    to_compile = options.rows or ([TINY.name] if options.small else missing)
    if to_compile and importlib.util.find_spec("libtpu") is None:
        if not options.small:
            exit_unavailable("compiling for TPUs needs libtpu (requirements/tpu.txt)")
        print("nothing compiled: libtpu is not installed")
        to_compile = []
    for row in rows:
        if row.name in to_compile:
            results[row.name] = compile_row(row)
            write_json(options.results / RECORDS, [asdict(results[r.name]) for r in rows if r.name in results])
    known = [results[row.name] for row in rows if row.name in results]
    swept = options.results / SWEPT
    sweep = sweep_section(json.loads(swept.read_text(encoding="utf-8"))) if swept.exists() else []
    write_results(options.results, PAGE, [*introduction(), *table(known), "", *discussion(known), *sweep])


def copy_records(folder: Path) -> None:
    """Copy the committed records, so that the small form renders all kinds of rows."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (RECORDS, SWEPT):
        shutil.copy(RESULTS / name, folder / name)


def read_results(path: Path) -> dict[str, RowResult]:
    """Return the recorded results by name."""
    if not path.exists():
        return {}
    return {row["name"]: RowResult(**row) for row in json.loads(path.read_text(encoding="utf-8"))}


def build_request(row: CompiledPreset) -> CompileRequest:
    layout, _, slices = row.topology.partition(" x")
    document = config.load(presets.resolve_preset(row.preset), ["launch.processes=0", "launch.nodes=1", *row.changes])
    return build_compile_request(document, find_topology(layout, int(slices or 1)))


def compile_row(row: CompiledPreset) -> RowResult:
    """Compile the step of a row; a failure is recorded with its reason."""
    result = RowResult(row.name, time.strftime("%Y-%m-%d"), list(row.changes), row.preset, row.measured, row.topology)
    request = build_request(row)
    try:
        result.found = build_report(request, compile_aot(request, default_cache(), TIMEOUT))
    except (InputError, PodscaleError) as error:
        result.reason = str(error)
    return result


def introduction() -> list[str]:
    """Return title, conditions of the newest row, and meaning of the columns."""
    return [
        *head("Training steps, compiled for TPUs", ["jax", "jaxlib", "libtpu"], "python -m benchmarks.tpu_compile"),
        "**Compiled, not run.** Each row is the training step of ResNet-50 (bf16, LARS, label smoothing), compiled by",
        "the real TPU compiler for the given chips, on a machine without a TPU.",
        "",
        "- Memory: of one device (a core, or a chip if its cores work as one), of the memory available to a program.",
        "- Bounds: times at the chip's peak rates, for arithmetic, for the bytes that operations read and write as if",
        "  none stayed on the chip between them (a step can be faster if many do), and for the bytes sent over all",
        "  links at once.",
        "- Cycles: the compiler's estimate of each operation, added up without messages, and the share that copies",
        "  arrays into another layout; in ms if the chip's clock is published.",
        "- Estimate: the compiler's cost model, or the largest bound if the model's value is impossible.",
        "- MLPerf: time of Google's code on the same chips at the same batch, including a share of the evaluations.",
        "  Ratio: estimate / MLPerf.",
        "",
    ]


HEADER = (
    "| row | topology | devices | images each | all-reduce, update, BN over | memory "
    "| bounds: arithmetic, memory, links | cycles, copies | cost model | estimate | images/s | MLPerf | ratio "
    "| compiled in |"
)
RULE = "|---|---|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"


def table(results: Sequence[RowResult]) -> list[str]:
    """Return the compiled rows, then the failed ones."""
    lines = [HEADER, RULE, *(table_row(row) for row in results if row.found)]
    if failed := [row for row in results if not row.found]:
        lines += ["", "Not compiled:", "", "| row | topology | reason |", "|---|---|---|"]
        lines += [f"| {row.name} | {row.topology} | {row.reason.replace('|', '/')} |" for row in failed]
    return lines


def table_row(row: RowResult) -> str:
    report = row.found
    assert report is not None
    memory, mesh = report["memory"], report["topology"]["mesh"]
    group = mesh["group_column"] * mesh["group_row"]
    sharers = mesh.get("height", 1) * mesh.get("width", 1)
    cells = [
        f"`{row.name}`{' (1)' if row.note else ''}",
        row.topology,
        f"{report['topology']['devices']:,}",
        f"{report['batch']} for {sharers}" if sharers > 1 else str(report["batch"]),
        f"{report['all_reduce']}, {report['weight_update']}, {group * report['batch']} images",
        f"{format_bytes(memory['needed'])} of {format_bytes(available(report))}",
    ]
    if not report["fits"]:
        return f"| {' | '.join([*cells, 'does not fit', *[''] * 7])} |"
    bounds = report["bound_seconds"]
    estimate = f"{report['step_seconds'] * 1e3:.1f} ms{bound_mark(report)}"
    cells += [
        ", ".join(f"{bounds[name] * 1e3:.1f}" for name in ("compute", "memory", "links")) + " ms",
        cycles(report),
        f"{report['cost_model_seconds'] * 1e3:,.1f} ms",
        estimate,
        f"{report['images_per_second']:,.0f}",
        f"{row.measured:.1f} ms" if row.measured else "",
        f"{report['step_seconds'] * 1e3 / row.measured:.2f}" if row.measured else "",
        f"{report['compile_seconds']:.0f} s ({report['cpu_seconds']:.0f} CPU s)",
    ]
    return f"| {' | '.join(cells)} |"


def available(report: dict[str, Any]) -> float:
    """Return the bytes of a device that a program may use; old records lack them."""
    layout, _, _ = report["topology"]["name"].partition(" x")
    return float(report["memory"].get("available", find_topology(layout).device_available_bytes))


def bound_mark(report: dict[str, Any]) -> str:
    """Return the mark of an estimate that is a bound."""
    return " (bound)" if report["step_source"] == "roofline" else ""


def cycles(report: dict[str, Any]) -> str:
    """Return the cycles in ms or millions, and the share of copies."""
    seconds, total = report["cycle_seconds"], report["cycles"]
    cost = f"{seconds * 1e3:.1f} ms" if seconds else f"{total / 1e6:.1f} M"
    return f"{cost}, {report['copy_cycles'] / total:.0%}"


def discussion(results: Sequence[RowResult]) -> list[str]:
    """Return the accuracy of the estimates, and the messages of a step."""
    lines = [f"(1) `{row.name}`: {row.note}.\n" for row in results if row.note]
    ratios = [
        row.found["step_seconds"] * 1e3 / row.measured
        for row in results
        if row.measured and row.found and row.found["fits"] and not row.note
    ]
    if ratios:
        lines += [
            f"MLPerf's logs have {len(ratios)} step(s) of these sizes. The estimate is {min(ratios):.2f} to "
            f"{max(ratios):.2f} of the measured time.",
            "Those steps are of another program. An estimate ignores input, waiting for other devices, and most of the",
            "time of messages, and counts buffers that are updated in place as read and written completely.",
            "",
        ]
    return [*lines, *messages(results)]


def messages(results: Sequence[RowResult]) -> list[str]:
    """Return the table of the messages of one step."""
    lines = [
        "Messages of one compiled step, with the sizes of global arrays:",
        "",
        "| row | collective | along | devices | messages | size | sent by a device |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for row in results:
        if row.found and row.found["fits"]:
            lines += [
                f"| `{row.name}` | {c['kind']} | {c['axes']} | {c['members']} | {c['messages']} "
                f"| {format_bytes(c['bytes'])} | {format_bytes(c['sent'])} |"
                for c in row.found["collectives"]
            ]
    return lines


def sweep_section(record: dict[str, Any]) -> list[str]:
    """Return the batches of a sweep, and the largest batch that each of them predicts."""
    tried = sorted(record["tried"], key=lambda row: int(row["batch"]))
    first, largest = tried[0], record["largest"]
    minutes = sum(row["compile_seconds"] + row["trace_seconds"] for row in tried) / 60
    cpu_minutes = sum(row["cpu_seconds"] for row in tried) / 60
    lines = [
        "",
        "## The largest batch",
        "",
        f"`{SWEEP}` ({SWEPT}), {first['model']} on {first['topology']['name']}, {first['weight_update']} update: "
        f"{len(tried)} compilations in {minutes:.0f} minutes ({cpu_minutes:.0f} CPU minutes).",
        f"Largest that fits: {largest['batch']} images a device, {largest['global_batch']:,} in all. The last column "
        "is the number of",
        "images that the memory would hold, estimated from that compilation alone; the document allows only some",
        "numbers. Operations for an image rise when the compiler recomputes values that do not fit into memory.",
        "",
        "| images each | in all | memory | operations for an image | estimate of a step | images/s | compiled in "
        "| predicted largest |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in tried:
        memory = row["memory"]
        cells = [
            f"{row['batch']}",
            f"{row['global_batch']:,}",
            f"{format_bytes(memory['needed'])} of {format_bytes(available(row))}"
            + ("" if row["fits"] else f", {format_bytes(memory['over'])} too much"),
            f"{row['flops'] / row['batch'] / 1e9:.1f} GFLOP" if row["fits"] else "does not fit",
            f"{row['step_seconds'] * 1e3:.1f} ms{bound_mark(row)}" if row["fits"] else "",
            f"{row['images_per_second']:,.0f}" if row["fits"] else "",
            f"{row['compile_seconds']:.0f} s ({row['cpu_seconds']:.0f} CPU s)",
            f"{int(batch_within_memory([memory], [row['batch']], available(row)))}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
