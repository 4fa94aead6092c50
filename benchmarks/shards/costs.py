"""Cost of large plans and memory of packing, each in a new process."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.harness import ROOT
from benchmarks.measure import cpu_seconds
from benchmarks.shards.writers import Originals, Synthetic, entries, podscale_writer
from podscale.config.data import DataSection
from podscale.data.sharding.shard_plan import plan_shards

PACKED_SHARD_BYTES = 64 * 2**20


def peak_kilobytes() -> int:
    """Return the peak resident size of this process (getrusage would include that of its parent)."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])


def run_in_process(function: str, *arguments: object) -> list[str]:
    """Run a function of this module in a new process; return the words that it prints."""
    script = f"import sys; from benchmarks.shards import costs; costs.{function}(*sys.argv[1:])"
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout.split()


def print_plan(images: str, path: str) -> None:
    """Plan a synthetic listing, write the plan, and print the peak memory of imports and in all, kB."""
    base = peak_kilobytes()
    plan = plan_shards(Synthetic(int(images)), DataSection(source="synthetic"))
    plan.write(Path(path))
    print(base, peak_kilobytes())


def print_packing(archive: str, repeat: str, out: str) -> None:
    """Pack an archive, and print peak memory in kB, shards and images."""
    source = Originals(Path(archive), int(repeat) + 1)
    data = DataSection(source="x", shard_bytes=PACKED_SHARD_BYTES)
    plan = plan_shards(source, data)
    Path(out).mkdir()
    podscale_writer(plan, source, data, decode=True, sha256=True)(Path(out))
    print(peak_kilobytes(), plan.shard_count("train"), sum(1 for _ in entries(plan)))


def plan_cost(count: int, scratch: Path) -> list[str]:
    """Return the table of time, peak memory and file size of plans of `count` / 10 and of `count` images."""
    lines = [
        "| images | wall s | CPU s | peak memory MB (imports) | plan file MB |",
        "|---:|---:|---:|---:|---:|",
    ]
    for images in (count // 10, count):
        path = scratch / "plan"
        start, cpu_start = time.monotonic(), cpu_seconds(children=True)
        base, peak = map(int, run_in_process("print_plan", images, path))
        wall, cpu = time.monotonic() - start, cpu_seconds(children=True) - cpu_start
        size = path.stat().st_size / 1e6
        lines.append(f"| {images:,} | {wall:.1f} | {cpu:.1f} | {peak / 1e3:.0f} ({base / 1e3:.0f}) | {size:.0f} |")
    return lines


def pack_memory(archive: Path, repeats: tuple[int, ...], scratch: Path) -> list[str]:
    """Return the table of the peak memory of planning and packing, by number of images."""
    lines = ["| images packed | shards | peak memory MB |", "|---:|---:|---:|"]
    for repeat in repeats:
        peak, shards, images = map(int, run_in_process("print_packing", archive, repeat, scratch / "packed"))
        shutil.rmtree(scratch / "packed")
        lines.append(f"| {images:,} | {shards} | {peak / 1e3:.0f} |")
    return lines
