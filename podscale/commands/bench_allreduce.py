"""`podscale bench allreduce`: the links of this machine, or of the torchrun world that this process is a rank of."""

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podscale.bench import all_reduce
from podscale.config.train import AllReduceSection
from podscale.errors import InputError
from podscale.util import env, host_info
from podscale.util.files import write_json

ALGORITHMS = ("flat", "ring", "tree", "hierarchical", "torus2d", "hybrid")
ALGORITHMS_WITHOUT_ROWS = ("flat", "ring", "tree")


@dataclass(frozen=True)
class AllReduceBenchOptions:
    """As on the command line."""

    ranks: int
    algorithms: str
    sizes: str
    wire: str
    row: int | None
    bucket_mb: float
    seconds: float
    model: str | None
    side: int
    batch: int
    time_limit: float
    out: Path | None
    json: bool


def run_bench_allreduce(options: AllReduceBenchOptions) -> None:
    """Measures, prints tables or JSON, and writes allreduce.md, .json and .svg to `out` where one is given."""
    if options.out is not None and not options.out.is_dir():
        raise InputError("the folder does not exist", field="--out", got=str(options.out))
    job = _benchmark_job(options)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        found = _run_as_worker(job)
        if os.environ["RANK"] != "0":
            return
    else:
        if options.row is not None and options.ranks % options.row:
            raise InputError(
                f"does not divide --ranks {options.ranks}", field="--row", got=options.row, hint="Choose a divisor."
            )
        found = all_reduce.run_link_benchmark(job, options.ranks, options.time_limit)
    lines = all_reduce.format_tables(found)
    if options.out is not None:
        command = f"Command: `{os.environ.get(env.COMMAND, '')}`  "
        machine = f"Machine: {host_info.cpu_count()} cores of {host_info.cpu_name()}  "
        text = ["# Speed of all-reduce", "", command, machine, f"Date: {time.strftime('%Y-%m-%d')}", "", *lines, ""]
        (options.out / "allreduce.md").write_text("\n".join(text), encoding="utf-8")
        (options.out / "allreduce.svg").write_text(all_reduce.bandwidth_chart(found), encoding="utf-8")
        write_json(options.out / "allreduce.json", found)
    sys.stdout.write(json.dumps(found, indent=2) + "\n" if options.json else "\n".join([*lines, ""]))


def _benchmark_job(options: AllReduceBenchOptions) -> dict[str, Any]:
    sections = {name: _section(name, options) for name in options.algorithms.split(",")}
    return {
        "sections": sections,
        "sizes": all_reduce.parse_sizes(options.sizes),
        "row": options.row,
        "seconds": options.seconds,
        "model": {"name": options.model} if options.model else None,
        "side": options.side,
        "batch": options.batch,
    }


def _section(name: str, options: AllReduceBenchOptions) -> dict[str, Any]:
    if name not in ALGORITHMS:
        raise InputError("unknown algorithm", field="--algorithms", got=name, hint=f"Known: {', '.join(ALGORITHMS)}.")
    if options.wire not in ("fp32", "bf16", "fp16"):
        raise InputError("messages are fp32, bf16 or fp16", field="--wire", got=options.wire)
    wire_row = "fp32" if name in ALGORITHMS_WITHOUT_ROWS else options.wire
    values = {"algorithm": name, "row": options.row, "bucket_mb": options.bucket_mb}
    values |= {"wire_row": wire_row, "wire_column": options.wire}
    AllReduceSection.model_validate(values)
    return values


def _run_as_worker(job: dict[str, Any]) -> dict[str, Any]:
    from podscale.pytorch import link_benchmark, world

    found = link_benchmark.measure_links(world.join_world(300.0), link_benchmark.LinkBenchmarkJob(**job))
    world.leave_world()
    return found
