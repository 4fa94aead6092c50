"""Worker of `podscale bench train`: one measurement with the real trainer and loop, as the process of one rank.

    python -m podscale.pytorch.throughput_benchmark JOB.json RESULT.json

JOB holds the document (`config`), the location of a shard set, `timeout_seconds`, and numbers of steps: `warmup`,
`steps` (timed together, without waiting between them) and `parts` (timed phase by phase, eagerly). With `profile`, the
kernels of further steps are listed by name, and the bytes of one are counted. Rank 0 writes RESULT; a rank that fails
writes its error to RESULT.<rank>.
"""

import json
import os
import resource
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch

from podscale.config import RunConfig
from podscale.data.loaders.build_loader import open_shard_set
from podscale.distributed.step_status import StopRequest
from podscale.distributed.worker_env import WorkerEnv
from podscale.pytorch.all_reduce.auto import resolve_all_reduce
from podscale.pytorch.cuda_graph import CudaGraphStep
from podscale.pytorch.kernel_choice import resolve_fused_kernels
from podscale.pytorch.memory_traffic import compiled_bytes, count_compiled_graphs, count_traffic
from podscale.pytorch.stored_choice import StoredChoice
from podscale.pytorch.timing import DeviceTimer, record_mark, seconds_between
from podscale.pytorch.trainer import PyTorchTrainer, build_trainer
from podscale.pytorch.world import World, join_world, leave_world
from podscale.runs import RunDirectory
from podscale.training.step_timer import PhaseTimer
from podscale.training.training_logger import open_training_logger
from podscale.training.worker_stages import open_checkpoint_store
from podscale.util import env
from podscale.util.files import write_json
from podscale.util.processes import exit_with_parent

PROFILED_STEPS = 4
"""Steps of a profile: one between CUDA's profiler marks, the others by torch's profiler."""


def main() -> None:
    exit_with_parent()
    job, result_path = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    code = 0
    try:
        world = join_world(float(job["timeout_seconds"]))
        result = measure_throughput(job, world)
        if world.is_rank0:
            write_json(result_path, result)
        leave_world()
    except BaseException as error:
        code = 1
        kind = "out of memory" if isinstance(error, torch.OutOfMemoryError) else type(error).__name__
        text = " ".join(str(error).split())
        write_json(result_path.with_suffix(f".{env.read_number(env.RANK) or 0}"), {"error": f"{kind}: {text}"[:300]})
        if not isinstance(error, torch.OutOfMemoryError):
            sys.excepthook(type(error), error, error.__traceback__)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # after a failed collective, an orderly exit would wait for threads that wait for peers


def measure_throughput(job: dict[str, Any], world: World) -> dict[str, Any]:
    """Return the measurements of one rank. Every rank must call this at the same time."""
    config = RunConfig.model_validate(job["config"])
    if threads := env.read_number(env.OMP_NUM_THREADS):
        torch.set_num_threads(threads)
    if config.train.compile != "off":
        count_compiled_graphs()  # also without `profile`, because the compiler's cache keeps the count
    shard_set, run = open_shard_set(job["shard_set"], config), RunDirectory.for_config(config).create()
    checkpoints = open_checkpoint_store(config, run, shard_set)
    ranks = run.path / "ranks"
    ranks.mkdir(exist_ok=True)
    with open_training_logger(WorkerEnv(config, "train", job["shard_set"], ranks), world) as logger:
        classes = len(shard_set.classes)
        algorithm = StoredChoice(run.all_reduce, None, logger.all_reduce_chosen)
        kernels = StoredChoice(run.fused_kernels, None, logger.fused_kernels_chosen)
        config = resolve_all_reduce(config, world, classes, algorithm)
        config = resolve_fused_kernels(config, world, classes, kernels)
        trainer = build_trainer(config, world, shard_set, checkpoints, logger, StopRequest())
        try:
            return _measure_trainer(trainer, job["warmup"], job["steps"], job["parts"], profile=job["profile"])
        finally:
            trainer.close()


def _measure_trainer(trainer: PyTorchTrainer, warmup: int, steps: int, parts: int, *, profile: bool) -> dict[str, Any]:
    world, config = trainer.world, trainer.config
    host = DeviceTimer(on_gpu=False)
    profiled, counted = (PROFILED_STEPS, 1) if profile else (0, 0)
    batches = trainer.loader.batches(0, warmup + steps + profiled + parts + counted)
    train_steps = _train_steps(trainer, batches, host.time_part)
    trainer.step.seek(0)
    begin = time.perf_counter()
    next(train_steps)
    _synchronize(world)
    first_seconds = time.perf_counter() - begin
    for _ in range(warmup - 1):
        next(train_steps)
    _synchronize(world)
    host.clear()
    begin, marks = time.perf_counter(), [record_mark(on_gpu=world.on_gpu)]
    for _ in range(steps):
        next(train_steps)
        marks.append(record_mark(on_gpu=world.on_gpu))
    _synchronize(world)
    elapsed = time.perf_counter() - begin
    step_seconds = [seconds_between(*pair) for pair in pairwise(marks)]
    images = config.train.global_batch
    rate = steps * images / elapsed / world.size
    host_seconds = {name: seconds / steps for name, seconds in host.seconds().items()}
    kernels = _profile_kernels(train_steps, world) if profile else []
    return {
        "device": world.device_name,
        "versions": _versions(world),
        "ranks": world.size,
        "batch": images // world.size,
        "images_per_second": rate,
        "step_seconds": elapsed / steps,
        "step_median_seconds": statistics.median(step_seconds),
        "step_p95_seconds": sorted(step_seconds)[int(0.95 * (steps - 1))],
        "first_step_seconds": first_seconds,
        "host_seconds": host_seconds,
        "kernels": kernels,
        "part_seconds": _measure_parts(trainer, islice(batches, parts), parts),
        "memory_bytes": _peak_memory_bytes(world),
        "training_flops_per_image": trainer.spec.training_flops(config.input.image_size),
        "bad_records": trainer.loader.bad_records,
        "choices": trainer.training_logger.choices,
        **(_count_bytes(trainer, batches) if profile else {}),
    }


def _profile_kernels(train_steps: Iterator[None], world: World) -> list[dict[str, Any]]:
    """Return name, launches and seconds of each kernel in a step; [] on a CPU.

    The steps are between CUDA's profiler marks, so that ncu records these alone with `--profile-from-start off`.
    """
    if not world.on_gpu:
        return []
    _synchronize(world)
    torch.cuda.profiler.start()
    next(train_steps)
    _synchronize(world)
    torch.cuda.profiler.stop()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_STEPS - 1):
            next(train_steps)
        _synchronize(world)
    kernels: dict[str, list[float]] = {}
    for event in profiler.events():
        if event.device_type.name == "CUDA":
            kernels.setdefault(event.name, []).append(event.time_range.elapsed_us() / 1e6)
    steps = PROFILED_STEPS - 1
    return [
        {"name": name, "launches": len(seconds) / steps, "seconds": sum(seconds) / steps}
        for name, seconds in sorted(kernels.items(), key=lambda item: -sum(item[1]))
    ]


def _count_bytes(trainer: PyTorchTrainer, batches: Iterator[Any]) -> dict[str, Any]:
    """Return `counted_bytes` of an ordinary step by operator and kernel, or `compiled_bytes`, inductor's count.

    A compiled step is not counted by operator, because it would run without the compiler then.
    """
    if trainer.config.train.compile != "off":
        return {"compiled_bytes": compiled_bytes()}
    step = trainer.step.eager if isinstance(trainer.step, CudaGraphStep) else trainer.step
    untimed = DeviceTimer(on_gpu=False).time_part
    batch = next(trainer.prefetcher(batches, untimed))
    try:
        with count_traffic(trainer.world.device.type) as sizes:
            step(batch, untimed)
        _synchronize(trainer.world)
    except Exception:  # the row was measured: it must not be lost
        traceback.print_exc()
        return {}
    return {"counted_bytes": dict(sizes.most_common())}


def _train_steps(trainer: PyTorchTrainer, batches: Iterator[Any], phase: PhaseTimer) -> Iterator[None]:
    """Run the trainer's steps between checkpoints, one for each `next`."""
    for number, batch in enumerate(trainer.prefetcher(batches, phase), start=1):
        result = trainer.step(batch, phase)
        trainer.step_sync.send(number, result, busy_seconds=0.0, stop=False)
        trainer.step_sync.ready()
        yield


def _measure_parts(trainer: PyTorchTrainer, batches: Iterator[Any], count: int) -> dict[str, float]:
    """Return mean seconds of each part of an eager step; {} if the memory beside a CUDA graph does not suffice."""
    step = trainer.step.eager if isinstance(trainer.step, CudaGraphStep) else trainer.step
    times = DeviceTimer(on_gpu=trainer.world.on_gpu)
    backward = trainer.reducer.backward

    def timed(loss: torch.Tensor, *, last: bool) -> None:
        with times.time_part("backward"):
            backward(loss, last=last)

    trainer.reducer.backward = timed  # type: ignore[method-assign]
    try:
        for batch in trainer.prefetcher(batches, DeviceTimer(on_gpu=False).time_part):
            step(batch, times.time_part)
        _synchronize(trainer.world)
    except torch.OutOfMemoryError:
        return {}
    finally:
        trainer.reducer.backward = backward  # type: ignore[method-assign]
    parts = {name: seconds / count for name, seconds in times.seconds().items()}
    return {"forward": parts.pop("forward_backward", 0.0) - parts.get("backward", 0.0), **parts}


def _synchronize(world: World) -> None:
    """Wait for all ranks and their devices."""
    if world.on_gpu:
        torch.cuda.synchronize(world.device)
    world.barrier()


def _peak_memory_bytes(world: World) -> int:
    """Return the peak of torch's memory on the device, with graphs and caches; on a CPU, of the process."""
    if world.on_gpu:
        return torch.cuda.max_memory_reserved(world.device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _versions(world: World) -> dict[str, str]:
    versions = {"torch": str(torch.__version__)}
    if world.on_gpu:
        versions |= {
            "CUDA": torch.version.cuda or "",
            "cuDNN": str(torch.backends.cudnn.version()),
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return versions


if __name__ == "__main__":
    main()
