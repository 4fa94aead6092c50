"""GPU side of `podscale bench input`: batches that a training's prefetcher copies to the device."""

from collections.abc import Iterator

import torch

from podscale.data.loaders.base import Batch
from podscale.errors import InputError
from podscale.pytorch.device_prefetcher import DevicePrefetcher
from podscale.pytorch.world import World
from podscale.training.step_timer import untimed


def check_device(name: str) -> None:
    """Raise InputError if torch does not see the device, such as `cuda:0`."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError("not a device", field="--device", got=name, hint="Give cpu, cuda or cuda:0.") from None
    if device.type == "cpu" or (device.type == "cuda" and (device.index or 0) < torch.cuda.device_count()):
        return
    raise InputError(
        "torch sees no such device here",
        field="--device",
        got=name,
        hint="`podscale doctor` checks the driver. `--device cpu` measures batches in the host's memory.",
    )


def deliver_batches(batches: Iterator[Batch], device: str) -> Iterator[Batch]:
    """Yield each batch after its copy has been queued and the copy of the batch before has ended.

    A training too runs a step ahead of its device. The host sleeps while it waits, so the wait costs no CPU time.
    """
    world = World(0, 1, 0, 1, torch.device(device))
    previous: torch.cuda.Event | None = None
    for batch in DevicePrefetcher(world)(batches, untimed):
        if world.on_gpu:
            if previous is not None:
                previous.synchronize()
            previous = torch.cuda.Event(blocking=True)
            previous.record(torch.cuda.current_stream(world.device))
        yield batch.host_batch
