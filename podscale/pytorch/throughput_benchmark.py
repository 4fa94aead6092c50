"""Worker of `podscale bench train`: one measurement with the real trainer and loop, as the process of one rank.

    python -m podscale.pytorch.throughput_benchmark JOB.json RESULT.json

JOB holds the document (`config`), the location of a shard set, and numbers of steps: `warmup`, `steps` (timed as a
whole, without waiting in between) and `parts` (timed phase by phase, as ordinary steps). Rank 0 writes RESULT; a rank
that fails writes its error to RESULT.<rank>.
"""

import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from podscale.config import RunConfig
from podscale.data.loaders.build_loader import open_shard_set
from podscale.distributed.step_status import StopRequest
from podscale.pytorch.all_reduce.auto import resolve_all_reduce
from podscale.pytorch.cuda_graph import CudaGraphStep
from podscale.pytorch.timing import DeviceTimer, record_mark, seconds_between
from podscale.pytorch.trainer import PyTorchTrainer, build_trainer
from podscale.pytorch.world import World, join_world, leave_world
from podscale.runs import RunDirectory
from podscale.training.step_timer import PhaseTimer
from podscale.training.telemetry_files import open_training_logger
from podscale.training.worker_stages import open_checkpoint_store
from podscale.util.files import write_json
from podscale.util.processes import exit_with_parent


def main() -> None:
    """Measures, writes what was found or why nothing was, and ends the process."""
    exit_with_parent()
    job, result = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    code = 0
    try:
        world = join_world(float(job["timeout_seconds"]))
        found = measure_throughput(job, world)
        if world.is_rank0:
            write_json(result, found)
        leave_world()
    except BaseException as error:
        code = 1
        kind = "out of memory" if isinstance(error, torch.OutOfMemoryError) else type(error).__name__
        text = " ".join(str(error).split())
        write_json(result.with_suffix(f".{os.environ.get('RANK', '0')}"), {"error": f"{kind}: {text}"[:300]})
        if not isinstance(error, torch.OutOfMemoryError):
            sys.excepthook(type(error), error, error.__traceback__)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # after a failed collective, an orderly end would wait for threads that wait for peers


def measure_throughput(job: dict[str, Any], world: World) -> dict[str, Any]:
    """The figures of one rank; all ranks take part."""
    config = RunConfig.model_validate(job["config"])
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    shard_set, run = open_shard_set(job["shard_set"], config), RunDirectory.for_config(config).create()
    checkpoints = open_checkpoint_store(config, run, shard_set)
    ranks = run.path / "ranks"
    ranks.mkdir(exist_ok=True)
    with open_training_logger(config, world, run, ranks, None) as monitor:
        classes, keep = len(shard_set.classes), run.all_reduce
        config = resolve_all_reduce(config, world, classes, keep, None, monitor.all_reduce_chosen)
        session = build_trainer(config, world, shard_set, checkpoints, monitor, StopRequest())
        try:
            return _measure_trainer(session, job["warmup"], job["steps"], job["parts"])
        finally:
            session.close()


def _measure_trainer(trainer: PyTorchTrainer, warmup: int, steps: int, parts: int) -> dict[str, Any]:
    world, config = trainer.world, trainer.config
    host = DeviceTimer(on_gpu=False)
    batches = trainer.loader.batches(0, warmup + steps + parts)
    updates = _train_steps(trainer, batches, host.time_part)
    trainer.step.seek(0)
    started = time.perf_counter()
    next(updates)
    _synchronize(world)
    first = time.perf_counter() - started
    for _ in range(warmup - 1):
        next(updates)
    _synchronize(world)
    host.clear()
    begin, marks = time.perf_counter(), [record_mark(on_gpu=world.on_gpu)]
    for _ in range(steps):
        next(updates)
        marks.append(record_mark(on_gpu=world.on_gpu))
    _synchronize(world)
    elapsed = time.perf_counter() - begin
    each = [seconds_between(*pair) for pair in pairwise(marks)]
    images = config.train.global_batch
    rate = steps * images / elapsed / world.size
    return {
        "device": world.device_name,
        "versions": _versions(world),
        "ranks": world.size,
        "batch": images // world.size,
        "images_per_second": rate,
        "step_seconds": elapsed / steps,
        "step_median_seconds": statistics.median(each),
        "step_p95_seconds": sorted(each)[int(0.95 * (len(each) - 1))],
        "first_step_seconds": first,
        "host_seconds": {name: seconds / steps for name, seconds in host.seconds().items()},
        "part_seconds": _measure_parts(trainer, batches, parts),
        "memory_bytes": _peak_memory_bytes(world),
        "training_flops_per_image": trainer.spec.training_flops(config.input.image_size),
        "bad_records": trainer.loader.bad_records,
    }


def _train_steps(trainer: PyTorchTrainer, batches: Iterator[Any], phase: PhaseTimer) -> Iterator[None]:
    """What the trainer does again and again between checkpoints, one update a time."""
    control = trainer.step_sync
    for number, batch in enumerate(trainer.prefetcher(batches, phase), start=1):
        result = trainer.step(batch, phase)
        control.send(number, result, busy_seconds=0.0, stop=False)
        control.ready()
        yield


def _measure_parts(trainer: PyTorchTrainer, batches: Iterator[Any], count: int) -> dict[str, float]:
    """Mean seconds of each part of an ordinary update; empty where memory does not suffice for it beside a graph."""
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
    found = {name: seconds / count for name, seconds in times.seconds().items()}
    return {"forward": found.pop("forward_backward", 0.0) - found.get("backward", 0.0), **found}


def _synchronize(world: World) -> None:
    """Until all ranks and their devices have done everything."""
    if world.on_gpu:
        torch.cuda.synchronize(world.device)
    world.barrier()


def _peak_memory_bytes(world: World) -> int:
    """Most bytes that torch held on the device, graphs and caches included; of a CPU, the process's peak."""
    if world.on_gpu:
        return torch.cuda.max_memory_reserved(world.device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _versions(world: World) -> dict[str, str]:
    found: dict[str, str] = {"torch": str(torch.__version__)}
    if world.on_gpu:
        found |= {
            "CUDA": torch.version.cuda or "",
            "cuDNN": str(torch.backends.cudnn.version()),
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return found


if __name__ == "__main__":
    main()
