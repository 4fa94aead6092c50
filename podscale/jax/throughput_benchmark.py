"""Worker of `podscale bench train` on JAX: one measurement with the real trainer and train step.

    python -m podscale.jax.throughput_benchmark JOB.json RESULT.json

JOB and RESULT are those of podscale.pytorch.throughput_benchmark. A step is one program, so its parts have no times of
their own: `part_seconds` is empty, and the job's `parts` steps do not run. A rank of the result is a device. JAX is
imported once the compiler's flags are in the environment.
"""

import json
import os
import re
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podscale.config import RunConfig
from podscale.data.loaders.build_loader import open_shard_set
from podscale.distributed.rank_group import RankGroup
from podscale.distributed.step_status import StepStatus, StopRequest
from podscale.distributed.store import StoreServer
from podscale.distributed.worker_env import RankEnv, WorkerEnv
from podscale.jax.gpu_checks import check_gpus, choose_gpus, device_kind
from podscale.jax.software import keep_to_cpu_without_gpus, library_versions
from podscale.jax.xla_flags import xla_environment
from podscale.runs import RunDirectory
from podscale.training.training_logger import open_training_logger
from podscale.training.worker_stages import open_checkpoint_store
from podscale.util import env, host_info
from podscale.util.files import write_json
from podscale.util.processes import exit_with_parent

if TYPE_CHECKING:
    from podscale.jax.device_prefetcher import DeviceBatches
    from podscale.jax.trainer import JaxTrainer
    from podscale.jax.world import World

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
"""Status in the text of JAX's errors for memory that does not suffice."""


def main() -> None:
    exit_with_parent()
    job, result_path = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    code = 0
    try:
        prepare_environment()
        serve_store()
        world = join_ranks(float(job["timeout_seconds"]))
        result = measure_throughput(job, world)
        if world.is_rank0:
            write_json(result_path, result)
        world.rank_group.leave()
    except BaseException as error:
        code = 1
        kind = "out of memory" if OUT_OF_MEMORY in str(error) else type(error).__name__
        text = " ".join(str(error).split())
        write_json(result_path.with_suffix(f".{env.read_number(env.RANK) or 0}"), {"error": f"{kind}: {text}"[:300]})
        sys.excepthook(type(error), error, error.__traceback__)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # after a failed collective, an orderly exit would wait for threads that wait for peers


def prepare_environment() -> None:
    """Set the compiler's flags as `jax.worker` does. On a GPU host JAX must find CUDA: it would use the CPU."""
    keep_to_cpu_without_gpus()
    device = device_kind()
    if device == "cuda":
        os.environ.setdefault("JAX_PLATFORMS", "cuda,cpu")
    os.environ.update(xla_environment(device, os.environ, next(iter(host_info.tpu_chips()), None)))


def serve_store() -> None:
    """Set the address of the ranks' store; rank 0 serves it on a thread until it exits. A single rank needs none."""
    if env.read_number(env.WORLD_SIZE) in (None, 1):
        return
    address, port = env.require_text(env.MASTER_ADDR), env.require_number(env.MASTER_PORT)
    os.environ[env.STORE] = f"{address}:{port}"
    if env.read_number(env.RANK) == 0:
        StoreServer(address, port)


def join_ranks(timeout_seconds: float) -> "World":
    from podscale.jax.world import join_world

    rank_env = RankEnv.read()
    rank_group = RankGroup.join(rank_env, timeout_seconds)
    world = join_world(rank_group, gpus=choose_gpus(rank_group, rank_env))
    check_gpus(device_kind(), world.devices, world.rank)
    return world


def measure_throughput(job: dict[str, Any], world: "World") -> dict[str, Any]:
    """Return the measurements of one process. Every process must call this at the same time."""
    from podscale.jax.trainer import build_trainer

    warmup, steps = job["warmup"], job["steps"]
    config = RunConfig.model_validate(job["config"])
    # A log line takes the times of its interval, which are read here.
    telemetry = config.telemetry.model_copy(update={"log_every": warmup + steps + 1})
    config = config.model_copy(update={"telemetry": telemetry})
    shard_set, run = open_shard_set(job["shard_set"], config), RunDirectory.for_config(config).create()
    checkpoints = open_checkpoint_store(config, run, shard_set)
    ranks = run.path / "ranks"
    ranks.mkdir(exist_ok=True)
    with open_training_logger(WorkerEnv(config, "train", job["shard_set"], ranks), world) as logger:
        trainer = build_trainer(config, world, shard_set, checkpoints, logger, StopRequest())
        try:
            return _measure_trainer(trainer, warmup, steps)
        finally:
            trainer.close()


def _measure_trainer(trainer: "JaxTrainer", warmup: int, steps: int) -> dict[str, Any]:
    world, config, metrics = trainer.world, trainer.config, trainer.training_logger.metrics
    trainer.state.load_from_rank0(None)
    trainer.batch_phase = trainer.plan.batch_phase_after(0)
    trainer.log_start(resumed=False)
    first = min(trainer.prefetcher.length, warmup)
    batches = _device_batches(trainer, [first, warmup, warmup + steps])
    first_seconds = sum(time_steps(trainer, batches, first))
    time_steps(trainer, batches, warmup)
    world.barrier()
    metrics.take_interval()
    step_seconds = time_steps(trainer, batches, warmup + steps)
    host_seconds = metrics.take_interval().phases
    elapsed, ranks, images = sum(step_seconds), len(world.devices), config.train.global_batch
    return {
        "device": world.device_name,
        "versions": _versions(world),
        "ranks": ranks,
        "batch": images // ranks,
        "images_per_second": steps * images / elapsed / ranks,
        "step_seconds": elapsed / steps,
        "step_median_seconds": statistics.median(step_seconds),
        "step_p95_seconds": sorted(step_seconds)[int(0.95 * (steps - 1))],
        "first_step_seconds": first_seconds,
        "host_seconds": {name: seconds / steps for name, seconds in host_seconds.items() if seconds},
        "part_seconds": {},
        "memory_bytes": _peak_memory_bytes(trainer),
        "training_flops_per_image": trainer.spec.training_flops(config.input.image_size),
        "bad_records": trainer.loader.bad_records,
    }


def _device_batches(trainer: "JaxTrainer", ends: list[int]) -> "Iterator[DeviceBatches]":
    """Yield the batches of each call: `train.steps_per_call` steps, fewer before one of `ends`, the last included."""

    def next_step_count() -> int:
        step = trainer.progress.step
        return min(trainer.prefetcher.length, next((end for end in ends if end > step), step) - step)

    return trainer.prefetcher(trainer.loader.batches(0, ends[-1]), trainer.training_logger.timer.phase, next_step_count)


def time_steps(trainer: "JaxTrainer", batches: "Iterator[DeviceBatches]", end: int) -> list[float]:
    """Train up to step `end`; return the seconds of each step, from the end of the step before to its own.

    A call returns before its steps are done, so the times are those at which their results arrive: `train_step` waits
    for the results of an earlier call, and nothing is left to do for the devices when this returns. Steps whose results
    arrive together share their time equally. The sum is the time of all steps.
    """
    import jax

    seconds: list[float] = []
    before = time.perf_counter()

    def count(arrived: list[StepStatus]) -> None:
        nonlocal before
        if arrived:
            now = time.perf_counter()
            seconds.extend([(now - before) / len(arrived)] * len(arrived))
            before = now

    while trainer.progress.step < end:
        statuses = trainer.train_step(next(batches))
        count(statuses)
        trainer.apply_status(statuses)
    statuses = trainer.step_sync.drain()
    jax.block_until_ready(trainer.state.device_state)
    count(statuses)
    return seconds


def _peak_memory_bytes(trainer: "JaxTrainer") -> int:
    """Return the peak of JAX's memory on a device, the mean of this process's; on a CPU, of the process."""
    if peak := trainer.device_memory().get("device_peak"):
        return peak // len(trainer.world.local_devices)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _versions(world: "World") -> dict[str, str]:
    versions = {name: library_versions()[name] for name in ("jax", "jaxlib")}
    if cuda := re.search(r"cuda (\d+)(\d\d)\d\b", world.local_devices[0].client.platform_version):
        versions["CUDA"] = f"{cuda[1]}.{int(cuda[2])}"
    return versions


if __name__ == "__main__":
    main()
