"""Training steps compiled for TPU slices by the real TPU compiler: memory, collectives, estimated speed.

    python -m benchmarks.tpu_compile [ROW ...] [--list]

Nothing runs on a TPU. Needs libtpu beside jax (requirements/tpu.txt); a row takes a core for several minutes. Without
rows it makes those that tpu-compile.json among the results does not hold yet; a named row is made anew, which takes no
time while `podscale tpu compile` still has its result (same sources, same versions). A row that fails is kept with its
reason. If MLPerf's logs tell how long the same step took on the same chips, that stands beside the estimate. The
section about a sweep is of tpu-sweep.json, which is the output of the command that it shows. The small form compiles a
tiny network (or nothing, without libtpu) and writes the committed rows again.
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
from benchmarks.harness import RESULTS, Options, not_here, write_results
from podscale import config
from podscale.cli.tpu import build_compile_request
from podscale.errors import InputError, PodscaleError
from podscale.hardware import find_topology
from podscale.jax.aot.batch_search import batch_within_memory
from podscale.jax.aot.compile_report import build_report
from podscale.jax.aot.request import compile_aot, default_cache
from podscale.pipelines import presets
from podscale.util.files import write_json
from podscale.util.formatting import format_bytes

RECORDS, PAGE, SWEPT = "tpu-compile.json", "tpu-compile.md", "tpu-sweep.json"
SWEEP = "podscale tpu compile tpu-v5e-16 --sweep batch --json"
LIMIT = 5400.0
"""Seconds of one compilation."""
MLPERF = "kumar2019-32k"
PLAIN = ("train.weight_update=replicated", "train.all_reduce.algorithm=flat")
EIGHT = (
    *("train.engine=jax", "input.loader=auto", "train.global_batch=8", "model.batch_norm.span=8"),
    *("train.epochs=1", "train.schedule.warmup_epochs=0"),  # the schedule of many tiny updates would take memory
)
"""Images in all: as few as devices, or fewer."""


@dataclass(frozen=True)
class Row:
    """A preset with changes on a topology.

    measured: ms a step there, by Google's own logs and with the share of the evaluations every four epochs
    (mlcommons/training_results).
    """

    name: str
    topology: str
    changes: tuple[str, ...] = ()
    preset: str = MLPERF
    measured: float | None = None


ROWS = (
    Row("v3-1024", "v3:32x32", measured=25.1),
    Row("v3-1024-plain", "v3:32x32", (*PLAIN, "model.batch_norm.span=16"), measured=25.1),
    Row("v3-16", "v3:4x4", ("train.global_batch=4096",), measured=131.1),
    Row("v3-128", "v3:8x16", measured=135.7),
    Row("v3-512", "v3:16x32", ("model.batch_norm.span=32",), measured=44.1),
    Row("v5e-16", "v5e:4x4", ("train.global_batch=2048",)),
    Row("tpu-v5e-16", "v5e:4x4", preset="tpu-v5e-16"),
    Row("tpu-v6e-64", "v6e:8x8", preset="tpu-v6e-64"),
    Row("v5e-256", "v5e:16x16"),
    Row("v4-4096", "v4:16x16x16", preset="mlperf-4096xtpuv4", measured=4.18),
    Row("v5p-512", "v5p:8x8x8"),
    Row("v6e-256", "v6e:16x16"),
    Row("tpu7x-128", "tpu7x:4x4x8"),
    Row("v3-64", "v3:8x8", ("train.global_batch=16384",), measured=130.9),
    Row("v3-256", "v3:16x16", ("model.batch_norm.span=64",), measured=78.7),
    Row("v5e-2x256", "v5e:16x16 x2", ("train.global_batch=65536",)),
    Row("v5e-8-images", "v5e:2x4", EIGHT),
    Row("v5e-8-images-cut", "v5e:4x4", (*EIGHT, "train.spatial_partitions=[2,1]")),
)
"""In the order of their worth. v4's step: 32,768 images at 7,836,543 images/s, evaluations included."""


TINY = Row("tiny", "v5e:2x4", (*EIGHT, "model.name=resnet18", "model.width=4", "input.image_size=32"))
"""Row of the small form."""


@dataclass
class Made:
    """Outcome of a row."""

    name: str
    date: str
    changes: list[str]
    preset: str
    measured: float | None
    topology: str
    found: dict[str, Any] | None = None
    reason: str = ""
    note: str = ""
    """Written by hand for a row that the present sources would not give."""


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
        parser.error(f"no row is called {', '.join(sorted(unknown))}; see --list")
    if options.small:
        copy_records(options.results)
    made = read(options.results / RECORDS)
    missing = [row.name for row in rows if row.name not in made or made[row.name].found is None]
    wanted = options.rows or ([TINY.name] if options.small else missing)
    if wanted and importlib.util.find_spec("libtpu") is None:
        if not options.small:
            not_here("compiling for TPUs needs libtpu beside jax (requirements/tpu.txt)")
        print("nothing is compiled: libtpu is not installed")
        wanted = []
    for row in rows:
        if row.name in wanted:
            made[row.name] = make(row)
            write_json(options.results / RECORDS, [asdict(made[one.name]) for one in rows if one.name in made])
    kept = [made[row.name] for row in rows if row.name in made]
    swept = options.results / SWEPT
    swept_lines = sweep(json.loads(swept.read_text(encoding="utf-8"))) if swept.exists() else []
    write_results(options.results, PAGE, [*introduction(), *table(kept), "", *reading(kept), *swept_lines])


def copy_records(folder: Path) -> None:
    """Copy the committed records, so that the small form has all kinds of rows to write."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (RECORDS, SWEPT):
        shutil.copy(RESULTS / name, folder / name)


def read(path: Path) -> dict[str, Made]:
    """The rows made before, by name."""
    if not path.exists():
        return {}
    return {row["name"]: Made(**row) for row in json.loads(path.read_text(encoding="utf-8"))}


def make(row: Row) -> Made:
    """Compile the step of a row, or keep the reason why that failed."""
    made = Made(row.name, time.strftime("%Y-%m-%d"), list(row.changes), row.preset, row.measured, row.topology)
    layout, _, slices = row.topology.partition(" x")
    document = config.load(presets.resolve_preset(row.preset), ["launch.processes=0", "launch.nodes=1", *row.changes])
    request = build_compile_request(document, find_topology(layout, int(slices or 1)))
    try:
        made.found = build_report(request, compile_aot(request, default_cache(), LIMIT))
    except (InputError, PodscaleError) as error:
        made.reason = str(error)
    return made


def introduction() -> list[str]:
    """Title, conditions of the newest row, and what the columns mean."""
    return [
        *head("Training steps, compiled for TPUs", ["jax", "jaxlib", "libtpu"], "python -m benchmarks.tpu_compile"),
        "**Compiled, not run.** Each row is ResNet-50's whole training step (bf16, LARS, label smoothing), compiled by",
        "the real TPU compiler for the chips named, on a machine without a TPU. Memory is that of one device (a core,",
        "or a chip where its cores work as one), of what a program may use there. The bounds are times by the chip's",
        "peaks: for its arithmetic, for the bytes that its operations read and write as if nothing stayed on the chip",
        "between them (where much stays there, a step may be faster), for what it sends over all its links at once.",
        "The estimate is the compiler's own cost model, or the largest bound where that model's answer cannot be.",
        "Cycles are what the compiler schedules by, operation by operation, without messages, and the share that only",
        "copies arrays into another layout; in ms where the clock of the chip is published. MLPerf's times are those",
        "of Google's own code on the same chips at the same batch, a share of the evaluations included.",
        "",
    ]


HEADER = (
    "| row | topology | devices | images each | all-reduce, update, BN over | memory "
    "| bounds: arithmetic, memory, links | cycles, copies | cost model | estimate | images/s | MLPerf | ratio "
    "| compiled in |"
)
RULE = "|---|---|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"


def table(made: Sequence[Made]) -> list[str]:
    """The rows that were compiled, then those that were not."""
    lines = [HEADER, RULE, *(line(row) for row in made if row.found)]
    if failed := [row for row in made if not row.found]:
        lines += ["", "Not compiled:", "", "| row | topology | reason |", "|---|---|---|"]
        lines += [f"| {row.name} | {row.topology} | {row.reason.replace('|', '/')} |" for row in failed]
    return lines


def line(row: Made) -> str:
    """A row that was compiled."""
    found = row.found
    assert found is not None
    memory, mesh = found["memory"], found["topology"]["mesh"]
    group = mesh["group_column"] * mesh["group_row"]
    sharers = mesh.get("height", 1) * mesh.get("width", 1)
    cells = [
        f"`{row.name}`{' (1)' if row.note else ''}",
        row.topology,
        f"{found['topology']['devices']:,}",
        f"{found['batch']} for {sharers}" if sharers > 1 else str(found["batch"]),
        f"{found['all_reduce']}, {found['weight_update']}, {group * found['batch']} images",
        f"{format_bytes(memory['needed'])} of {format_bytes(available(found))}",
    ]
    if not found["fits"]:
        return f"| {' | '.join([*cells, 'does not fit', *[''] * 7])} |"
    bounds = found["bound_seconds"]
    estimate = f"{found['step_seconds'] * 1e3:.1f} ms{bounded(found)}"
    cells += [
        ", ".join(f"{bounds[name] * 1e3:.1f}" for name in ("compute", "memory", "links")) + " ms",
        cycles(found),
        f"{found['cost_model_seconds'] * 1e3:,.1f} ms",
        estimate,
        f"{found['images_per_second']:,.0f}",
        f"{row.measured:.1f} ms" if row.measured else "",
        f"{found['step_seconds'] * 1e3 / row.measured:.2f}" if row.measured else "",
        f"{found['compile_seconds']:.0f} s, {found['cpu_seconds']:.0f} s of a core",
    ]
    return f"| {' | '.join(cells)} |"


def available(found: dict[str, Any]) -> float:
    """Bytes of a device that a program may use; rows that were made before it was recorded lack it."""
    layout, _, _ = found["topology"]["name"].partition(" x")
    return float(found["memory"].get("available", find_topology(layout).device_available_bytes))


def bounded(found: dict[str, Any]) -> str:
    """Marks an estimate that is a bound."""
    return " (bound)" if found["step_source"] == "roofline" else ""


def cycles(found: dict[str, Any]) -> str:
    """Cycles in ms or millions, and the share of copies."""
    seconds, total = found["cycle_seconds"], found["cycles"]
    cost = f"{seconds * 1e3:.1f} ms" if seconds else f"{total / 1e6:.1f} M"
    return f"{cost}, {found['copy_cycles'] / total:.0%}"


def reading(made: Sequence[Made]) -> list[str]:
    """Worth of the estimates, and the messages of a step."""
    lines = [f"(1) `{row.name}`: {row.note}.\n" for row in made if row.note]
    ratios = [
        row.found["step_seconds"] * 1e3 / row.measured
        for row in made
        if row.measured and row.found and row.found["fits"] and not row.note
    ]
    if ratios:
        lines += [
            f"Of {len(ratios)} step(s) of a size that MLPerf's logs have, the estimate is {min(ratios):.2f} to "
            f"{max(ratios):.2f} of the measured time. Another program",
            "did those steps, and an estimate knows nothing of input, of waiting for other devices, and little of the",
            "time that messages take; it counts buffers that are updated in place as if they were read and written",
            "whole (docs/tpu.md).",
            "",
        ]
    return [*lines, *messages(made)]


def messages(made: Sequence[Made]) -> list[str]:
    """Table of the messages of one step."""
    lines = [
        "What the compiler made of the messages of one step, sizes of whole arrays:",
        "",
        "| row | collective | along | devices | messages | size | sent by a device |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for row in made:
        if row.found and row.found["fits"]:
            lines += [
                f"| `{row.name}` | {one['kind']} | {one['axes']} | {one['members']} | {one['messages']} "
                f"| {format_bytes(one['bytes'])} | {format_bytes(one['sent'])} |"
                for one in row.found["collectives"]
            ]
    return lines


def sweep(record: dict[str, Any]) -> list[str]:
    """The batches that a sweep tried, and what an estimate from each alone would have said of the largest."""
    tried = sorted(record["tried"], key=lambda row: int(row["batch"]))
    first, largest = tried[0], record["largest"]
    minutes = sum(row["compile_seconds"] + row["trace_seconds"] for row in tried) / 60
    worked = sum(row["cpu_seconds"] for row in tried) / 60
    lines = [
        "",
        "## The largest batch",
        "",
        f"`{SWEEP}` ({SWEPT}), {first['model']} on {first['topology']['name']}, {first['weight_update']} update: "
        f"{len(tried)} compilations in {minutes:.0f} minutes, {worked:.0f} of a core.",
        f"Largest that fits: {largest['batch']} images a device, {largest['global_batch']:,} in all. The last column "
        "is what the plain command says",
        "of how many images the memory would hold, from that compilation alone; the document allows some numbers only.",
        "Where operations for an image rise, the compiler recomputes what memory does not hold.",
        "",
        "| images each | in all | memory | operations for an image | estimate of a step | images/s | compiled in "
        "| held, by this one alone |",
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
            f"{row['step_seconds'] * 1e3:.1f} ms{bounded(row)}" if row["fits"] else "",
            f"{row['images_per_second']:,.0f}" if row["fits"] else "",
            f"{row['compile_seconds']:.0f} s, {row['cpu_seconds']:.0f} s of a core",
            f"{int(batch_within_memory([memory], [row['batch']], available(row)))}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
