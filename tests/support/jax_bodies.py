"""Test bodies of the ranks of a JAX world."""

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from podscale.config import RunConfig
from podscale.data.shard_set import ShardSet
from podscale.distributed.progress_tracker import ProgressTracker
from podscale.jax.device_prefetcher import DevicePrefetcher
from podscale.jax.mesh import mesh_for_config
from podscale.jax.program_cache import enable_program_cache, synchronize_first_call
from podscale.jax.trainer import build_training_loader
from podscale.jax.world import World
from podscale.training.step_timer import untimed

DIES_AT = 3
STEPS = 1000
READ = 9
"""Number of steps of which `reads` reads the input."""


def describe_world(world: World, progress_tracker: ProgressTracker) -> dict[str, Any]:
    """Return the rank and world as reported by each source."""
    world.barrier("the first barrier")
    broadcast = world.broadcast({"seed": 7} if world.is_rank0 else None)
    return {
        "rank": world.rank,
        "size": world.size,
        "processes_per_node": world.processes_per_node,
        "ranks": list(world.ranks),
        "devices": [device.process_index for device in world.devices],
        "local_devices": [device.process_index for device in world.local_devices],
        "broadcast": broadcast,
        "gathered": world.gather(world.rank**2),
        "hosts": len(world.hosts()),
        "sum": float(_sum(world)(float(world.rank + 1))),
        "begun together": _begin(world),
    }


class Program:
    """Program that is slow to compile and records when it was compiled and when it began."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.compiled: list[float] = []
        self.begun: list[float] = []

    def lower(self, *arguments: Any) -> "Program":
        return self

    def compile(self) -> None:
        time.sleep(self._seconds)
        self.compiled.append(time.monotonic())

    def __call__(self, *arguments: Any) -> None:
        self.begun.append(time.monotonic())


def _begin(world: World) -> bool:
    """Check that no process began a program before the last process had compiled it; process 0 is the fastest."""
    program = Program(0.4 * world.rank)
    call = synchronize_first_call(program, world, "a program")
    call(1.0)
    call(2.0)
    times = world.gather([program.compiled, program.begun])
    return all(len(compiled) == 1 for compiled, _ in times) and min(b for _, begun in times for b in begun) >= max(
        c for compiled, _ in times for c in compiled
    )


def keeps(world: World, progress_tracker: ProgressTracker) -> dict[str, Any]:
    """Return the cache hits of this process and the program's result.

    The last process has another cache folder, as on a machine of another kind.
    """
    from jax._src import monitoring

    hits: list[str] = []
    monitoring.register_event_listener(lambda name, **_: hits.append(name) if name.endswith("/cache_hits") else None)
    enable_program_cache(
        Path(os.environ["PODSCALE_RANK_DIR"]) / ("other" if world.rank == world.size - 1 else "programs")
    )
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    mesh = Mesh(np.array(world.devices), ("ranks",))
    split, replicated = NamedSharding(mesh, PartitionSpec("ranks")), NamedSharding(mesh, PartitionSpec())
    call = synchronize_first_call(jax.jit(jnp.sum, out_shardings=replicated), world, "a program")
    local_values = np.full(len(world.local_devices), world.rank + 1, np.float32)
    total = call(jax.make_array_from_process_local_data(split, local_values))
    return {"hits": len(hits), "sum": float(total)}


def reads(world: World, progress_tracker: ProgressTracker) -> dict[str, Any]:
    """Join, then read training input: return sample ids, digests of each device's data, and the opened shards."""
    described = describe_world(world, progress_tracker)
    config = RunConfig.model_validate_json(os.environ["PODSCALE_CONFIG"])
    split = ShardSet.open(os.environ["PODSCALE_SHARD_SET"]).split("train")
    mesh = mesh_for_config(config, world.devices, world.processes_per_node)
    loader = build_training_loader(config, world, mesh, split)
    keys, pixels = [], []
    for batch in DevicePrefetcher(mesh)(loader.batches(0, READ), untimed):
        keys.append(batch.host_batches[0].keys.tolist())
        parts = sorted(batch.device_batches.images.addressable_shards, key=lambda part: part.index[1].start or 0)
        pixels.append([hashlib.sha256(np.asarray(part.data).tobytes()).hexdigest() for part in parts])
    loader.close()
    opened = [Path(line.split()[-1]) for line in Path("/proc/self/maps").read_text().splitlines() if ".tar" in line]
    return {"world": described, "keys": keys, "pixels": pixels, "opened": sorted({path.name for path in opened})}


def loses(world: World, progress_tracker: ProgressTracker) -> None:
    """Execute steps with one collective each; in one of them, PODSCALE_TEST_VICTIM gets PODSCALE_TEST_SIGNAL."""
    victim, number = int(os.environ["PODSCALE_TEST_VICTIM"]), int(os.environ["PODSCALE_TEST_SIGNAL"])
    directory, add = Path(os.environ["PODSCALE_RANK_DIR"]), _sum(world)
    for step in range(STEPS):
        progress_tracker.enter_phase("forward_backward")
        if step == DIES_AT and world.rank == victim:
            time.sleep(0.5)  # the others already wait
            (directory / "hit").write_text(str(os.getpid()))
            os.kill(os.getpid(), number)
        add(1.0).block_until_ready()
        progress_tracker.step_done(step + 1)


def stays_away(world: World, progress_tracker: ProgressTracker) -> None:
    """Let one process miss a barrier after all have joined."""
    world.barrier("the first barrier")
    if world.rank == 1:
        time.sleep(world.timeout_seconds + 8)
        return
    world.barrier("the save")


def _sum(world: World) -> Any:
    """Return a function that adds one number of every device: a collective over all processes."""
    mesh = Mesh(np.array(world.devices), ("ranks",))
    split, replicated = NamedSharding(mesh, PartitionSpec("ranks")), NamedSharding(mesh, PartitionSpec())
    add = jax.jit(jnp.sum, out_shardings=replicated)

    def call(value: float) -> jax.Array:
        local_values = np.full(len(world.local_devices), value, np.float32)
        return add(jax.make_array_from_process_local_data(split, local_values))  # type: ignore[no-any-return]

    return call
