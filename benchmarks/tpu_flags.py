"""XLA's flags for TPUs: what they change in a compiled step, by its messages and by those that start early.

    python -m benchmarks.tpu_flags

Nothing runs on a TPU. Needs libtpu and jax (requirements/tpu.txt). XLA reads its flags once, when it is loaded, so each
row is compiled in a process of its own. The rows take about four minutes of CPU time. The small form compiles one
tiny step.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np
from jax import Array, ShapeDtypeStruct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.conditions import head
from benchmarks.harness import ROOT, Options, exit_unavailable, write_results
from benchmarks.measure import cpu_seconds
from podscale.hardware import find_topology
from podscale.jax.aot.compiler import topology_devices
from podscale.jax.aot.hlo import Collective, find_collectives
from podscale.jax.aot.request import COMPILER_ENVIRONMENT
from podscale.jax.xla_flags import VARIABLES, xla_environment
from podscale.util.formatting import format_bytes, format_count

PAGE, TOPOLOGY, CHIP = "tpu-flags.md", "v5e:2x2", "v5e"
TIMEOUT = 3600.0
"""Timeout of one compilation, seconds."""
AXIS, DEVICES, RATE = "rank", 4, 0.1
SCHEDULER = "--xla_tpu_enable_latency_hiding_scheduler="
FUSION = "--xla_tpu_enable_async_collective_fusion=true"
EARLY_ALL_REDUCE = (
    "--xla_tpu_enable_async_collective_fusion_fuse_all_reduce=true",
    "--xla_enable_async_all_reduce=true",
)
THRESHOLD = "--xla_jf_crs_combiner_threshold_in_bytes="
PODSCALE = tuple(xla_environment("tpu", {}, CHIP)[VARIABLES["tpu"]].split())


@dataclass(frozen=True)
class DenseStep:
    """Data-parallel step of a network of square matrices, in fp32.

    Args:
        is_sharded: each device updates its rows of a matrix: reduce-scatter of gradients, all-gather of weights. If
            False, all devices update everything, after an all-reduce of each gradient.
        side: of a matrix, elements.
        images: of one device.
    """

    is_sharded: bool
    matrices: int
    side: int
    images: int = 256

    def __str__(self) -> str:
        update = "sharded" if self.is_sharded else "replicated"
        return f"{update}, {self.matrices} gradients of {format_bytes(4 * self.side**2)}"


SHARDED, REPLICATED = DenseStep(True, 6, 2048), DenseStep(False, 6, 2048)
FOUR_MIB, ONE_MIB, BUCKETS = DenseStep(False, 4, 1024), DenseStep(False, 4, 512), DenseStep(False, 3, 2560)
Row = tuple[DenseStep, tuple[str, ...]]
"""Step and flags."""
ROWS: tuple[Row, ...] = (
    (SHARDED, ()),
    (SHARDED, (f"{SCHEDULER}true",)),
    (SHARDED, (f"{SCHEDULER}true", FUSION)),
    (SHARDED, (f"{SCHEDULER}false",)),
    (SHARDED, PODSCALE),
    (REPLICATED, ()),
    (REPLICATED, (f"{SCHEDULER}true",)),
    (REPLICATED, (f"{SCHEDULER}false",)),
    (REPLICATED, (FUSION,)),
    (REPLICATED, EARLY_ALL_REDUCE),
    (FOUR_MIB, ()),
    (FOUR_MIB, (f"{THRESHOLD}{2**22}",)),
    (FOUR_MIB, (*EARLY_ALL_REDUCE, f"{THRESHOLD}{2**22}")),
    (ONE_MIB, (*EARLY_ALL_REDUCE, f"{THRESHOLD}{2**20}")),
    (BUCKETS, ()),
    (BUCKETS, PODSCALE),
)
TINY: Row = (DenseStep(False, 2, 256, 8), ())
"""The small form's."""


@dataclass(frozen=True)
class CompiledRow:
    """Messages of a compiled step, and the CPU seconds of its process; or the reason why there are none."""

    messages: Sequence[Collective]
    seconds: float = 0.0
    reason: str = ""


def main() -> None:
    parser = Options(__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="rows compiled at the same time (default: 2)")
    parser.add_argument("--step", metavar="JSON", help="only compile this step, and print its messages as JSON")
    options = parser.read()
    if importlib.util.find_spec("libtpu") is None:
        exit_unavailable("compiling for TPUs needs libtpu (requirements/tpu.txt)")
    if options.step:
        messages = find_collectives(compile_step(DenseStep(**json.loads(options.step))), {AXIS: DEVICES})
        print(json.dumps({"messages": messages, "seconds": cpu_seconds()}))
        return
    lines = introduction()
    rows = (TINY,) if options.small else ROWS
    with ThreadPoolExecutor(options.jobs) as pool:
        lines += table(list(zip(rows, pool.map(compile_row, rows), strict=True)))
    write_results(options.results, PAGE, lines)


def compile_row(row: Row) -> CompiledRow:
    """Compile a step with its flags in a process of its own; a failure is recorded with its reason."""
    step, flags = row
    print(f"{step}: {flags_text(flags)}", file=sys.stderr, flush=True)
    environment = {**os.environ, **COMPILER_ENVIRONMENT, VARIABLES["tpu"]: " ".join(flags)}
    command = [sys.executable, "-m", "benchmarks.tpu_flags", "--step", json.dumps(asdict(step))]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    if done.returncode != 0:
        return CompiledRow([], reason=(done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    found = json.loads(done.stdout.splitlines()[-1])
    return CompiledRow([Collective(*message) for message in found["messages"]], found["seconds"])


def compile_step(step: DenseStep) -> str:
    """Compile a step for the described devices of TOPOLOGY, with the flags of the environment; return its text."""
    mesh = Mesh(np.array(topology_devices(find_topology(TOPOLOGY))), AXIS)
    return str(build_step(step, mesh).lower(*step_arguments(step, mesh)).compile().as_text())


def build_step(step: DenseStep, mesh: Mesh) -> Any:
    """Return the compiled function of weights, [side, side] each, and images [images of all devices, side]."""
    spec = weight_spec(step)
    on_devices = jax.shard_map(
        sharded_update if step.is_sharded else replicated_update,
        mesh=mesh,
        in_specs=(spec, PartitionSpec(AXIS)),
        out_specs=spec,
        check_vma=False,
    )
    return jax.jit(on_devices, donate_argnums=0)


def step_arguments(step: DenseStep, mesh: Mesh) -> tuple[list[ShapeDtypeStruct], ShapeDtypeStruct]:
    """Return the shapes of the arguments with their sharding."""

    def shape(rows: int, spec: PartitionSpec) -> ShapeDtypeStruct:
        return ShapeDtypeStruct((rows, step.side), np.float32, sharding=NamedSharding(mesh, spec))

    images = shape(mesh.size * step.images, PartitionSpec(AXIS))
    return [shape(step.side, weight_spec(step))] * step.matrices, images


def weight_spec(step: DenseStep) -> PartitionSpec:
    return PartitionSpec(AXIS) if step.is_sharded else PartitionSpec()


def loss(weights: Sequence[Array], images: Array) -> Array:
    for weight in weights:
        images = jax.nn.relu(images @ weight)
    return (images**2).mean()


def replicated_update(weights: list[Array], images: Array) -> list[Array]:
    return _updated(weights, jax.grad(loss)(weights, images), lambda gradient: jax.lax.psum(gradient, AXIS))


def sharded_update(shards: list[Array], images: Array) -> list[Array]:
    weights = [jax.lax.all_gather(shard, AXIS, tiled=True) for shard in shards]
    gradients = jax.grad(loss)(weights, images)
    return _updated(shards, gradients, lambda gradient: jax.lax.psum_scatter(gradient, AXIS, tiled=True))


def _updated(weights: list[Array], gradients: list[Array], add: Callable[[Array], Any]) -> list[Array]:
    return [weight - RATE * add(gradient) for weight, gradient in zip(weights, gradients, strict=True)]


def introduction() -> list[str]:
    """Return title, conditions, and meaning of the columns."""
    return [
        *head("XLA's flags for TPUs, and the schedule of a compiled step", ["jax", "jaxlib", "libtpu"]),
        f"**Compiled, not run.** Each row is a step of square matrices with {SHARDED.images} images a device,",
        f"compiled by the real TPU compiler for `{TOPOLOGY}` with the flags of the row alone. A replicated update has",
        "an all-reduce of each gradient. A sharded one has a reduce-scatter of each gradient, and an all-gather of",
        "each matrix.",
        "",
        "- Messages: those of the compiled text, with the size of the whole arrays. The compiler cuts a reduce-scatter",
        "  into parts of other sizes than the step, so a collective-permute moves the few rows in between.",
        "- Started early: start and end of the message are two instructions with arithmetic or copies in between,",
        "  which can overlap with it.",
        "- CPU time: of the process that compiles.",
        "",
        "Podscale's flags for this chip (`podscale/jax/xla_flags.py`):",
        "",
        "```",
        *PODSCALE,
        "```",
        "",
    ]


def table(rows: Sequence[tuple[Row, CompiledRow]]) -> list[str]:
    lines = ["| step | flags | messages | of them started early | CPU time |", "|---|---|---|---|---:|"]
    for (step, flags), compiled in rows:
        early = messages_text([message for message in compiled.messages if message.is_early])
        found = [messages_text(compiled.messages, with_size=True), early, f"{compiled.seconds:.0f} s"]
        cells = [compiled.reason.replace("|", "/"), "", ""] if compiled.reason else found
        lines.append(f"| {step} | {flags_text(flags)} | {' | '.join(cells)} |")
    return lines


def flags_text(flags: Sequence[str]) -> str:
    if flags == PODSCALE:
        return "Podscale's"
    return " ".join(f"`{flag.removeprefix('--')}`" for flag in flags) or "none"


def messages_text(messages: Sequence[Collective], *, with_size: bool = False) -> str:
    """Return the number of messages of each kind, and their bytes."""
    counts = Counter(message.kind for message in messages)
    sizes = {kind: sum(message.bytes for message in messages if message.kind == kind) for kind in counts}
    texts = [
        format_count(counts[kind], kind) + (f" ({format_bytes(sizes[kind])})" if with_size else "")
        for kind in sorted(counts)
    ]
    return ", ".join(texts) or "0"


if __name__ == "__main__":
    main()
