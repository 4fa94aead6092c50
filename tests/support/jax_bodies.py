"""What ranks of a JAX world do in tests."""

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
UPDATES = 1000
READ = 9
"""Steps that `reads` reads for."""


def meets(world: World, whereabouts: ProgressTracker) -> dict[str, Any]:
    """Who everybody is, by every way of asking."""
    world.barrier("the first barrier")
    told = world.broadcast({"seed": 7} if world.is_rank0 else None)
    return {
        "rank": world.rank,
        "size": world.size,
        "ranks": list(world.ranks),
        "devices": [device.process_index for device in world.devices],
        "mine": [device.process_index for device in world.local_devices],
        "told": told,
        "gathered": world.gather(world.rank**2),
        "hosts": len(world.hosts()),
        "sum": float(_sum(world)(float(world.rank + 1))),
        "begun together": _begin(world),
    }


class Program:
    """Takes its time to be compiled, and knows when it was, and when it began."""

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
    """Whether no process began a program before the last one had compiled it, once; process 0 is the fastest."""
    program = Program(0.4 * world.rank)
    call = synchronize_first_call(program, world, "a program")
    call(1.0)
    call(2.0)
    told = world.gather([program.compiled, program.begun])
    return all(len(compiled) == 1 for compiled, _ in told) and min(b for _, begun in told for b in begun) >= max(
        c for compiled, _ in told for c in compiled
    )


def keeps(world: World, whereabouts: ProgressTracker) -> dict[str, Any]:
    """How often this process found a program that was kept, and what it computes; the last one keeps its own
    elsewhere, as on a machine of another kind."""
    from jax._src import monitoring

    hits: list[str] = []
    monitoring.register_event_listener(lambda name, **_: hits.append(name) if name.endswith("/cache_hits") else None)
    enable_program_cache(
        Path(os.environ["PODSCALE_RANK_DIR"]) / ("other" if world.rank == world.size - 1 else "programs")
    )
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    mesh = Mesh(np.array(world.devices), ("ranks",))
    split, whole = NamedSharding(mesh, PartitionSpec("ranks")), NamedSharding(mesh, PartitionSpec())
    call = synchronize_first_call(jax.jit(jnp.sum, out_shardings=whole), world, "a program")
    mine = np.full(len(world.local_devices), world.rank + 1, np.float32)
    total = call(jax.make_array_from_process_local_data(split, mine))
    return {"hits": len(hits), "sum": float(total)}


def reads(world: World, whereabouts: ProgressTracker) -> dict[str, Any]:
    """They meet, and read for a training: sample ids, digests of what each device is given, shards that were opened."""
    met = meets(world, whereabouts)
    config = RunConfig.model_validate_json(os.environ["PODSCALE_CONFIG"])
    split = ShardSet.open(os.environ["PODSCALE_SHARD_SET"]).split("train")
    mesh = mesh_for_config(config, world.devices)
    loader = build_training_loader(config, world, mesh, split)
    keys, pixels = [], []
    for batch in DevicePrefetcher(mesh)(loader.batches(0, READ), untimed):
        keys.append(batch.host_batches[0].keys.tolist())
        parts = sorted(batch.device_batches.images.addressable_shards, key=lambda part: part.index[1].start or 0)
        pixels.append([hashlib.sha256(np.asarray(part.data).tobytes()).hexdigest() for part in parts])
    loader.close()
    opened = [Path(line.split()[-1]) for line in Path("/proc/self/maps").read_text().splitlines() if ".tar" in line]
    return {"met": met, "keys": keys, "pixels": pixels, "opened": sorted({path.name for path in opened})}


def loses(world: World, whereabouts: ProgressTracker) -> None:
    """Steps with one collective each, in one of which PODSCALE_TEST_VICTIM is hit by PODSCALE_TEST_SIGNAL."""
    victim, number = int(os.environ["PODSCALE_TEST_VICTIM"]), int(os.environ["PODSCALE_TEST_SIGNAL"])
    directory, add = Path(os.environ["PODSCALE_RANK_DIR"]), _sum(world)
    for step in range(UPDATES):
        whereabouts.enter_phase("forward_backward")
        if step == DIES_AT and world.rank == victim:
            time.sleep(0.5)  # the others are waiting by now
            (directory / "hit").write_text(str(os.getpid()))
            os.kill(os.getpid(), number)
        add(1.0).block_until_ready()
        whereabouts.step_done(step + 1)


def stays_away(world: World, whereabouts: ProgressTracker) -> None:
    """One process does not come to a barrier, before which all were together."""
    world.barrier("the first barrier")
    if world.rank == 1:
        time.sleep(world.timeout_seconds + 8)
        return
    world.barrier("the save")


def _sum(world: World) -> Any:
    """A function that adds one number of every device: a collective over all processes."""
    mesh = Mesh(np.array(world.devices), ("ranks",))
    split, whole = NamedSharding(mesh, PartitionSpec("ranks")), NamedSharding(mesh, PartitionSpec())
    add = jax.jit(jnp.sum, out_shardings=whole)

    def call(value: float) -> jax.Array:
        mine = np.full(len(world.local_devices), value, np.float32)
        return add(jax.make_array_from_process_local_data(split, mine))  # type: ignore[no-any-return]

    return call
