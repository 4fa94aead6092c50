"""One model of the mean weights of several (Izmailov 2018, "SWA"), as a comparison to averaging what they answer.

Batch norm's statistics of the members are not those of the mean weights, so they are estimated anew by passes over
training images without an update (section 3.2 there), as plain means over the batches and the ranks.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import distributed as dist
from torch import nn

from podscale.config import RunConfig
from podscale.data.loaders.build_loader import build_loader
from podscale.data.sampler import build_sampler
from podscale.data.shard_set import ShardSet
from podscale.distributed.waits import BATCH_NORM, waiting_for
from podscale.pytorch.batchnorm import BatchNorm
from podscale.pytorch.feed import DevicePrefetcher
from podscale.pytorch.normalise import Normalise
from podscale.pytorch.precision import Precision
from podscale.pytorch.world import World
from podscale.runs.model_files import read_weights
from podscale.training.schedules import image_phases
from podscale.training.training_logger import untimed


def mean_weights(model: nn.Module, files: Sequence[Path]) -> dict[str, npt.NDArray[Any]]:
    """The mean of exported weights and statistics by name: added in fp64, fp32. Raises InputError as read_weights."""
    shapes = {name: tuple(t.shape) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    sums: dict[str, npt.NDArray[Any]] = {name: np.zeros(shape) for name, shape in shapes.items()}
    for file in files:
        for name, array in read_weights(file, shapes).items():
            sums[name] += array
    return {name: (total / len(files)).astype(np.float32) for name, total in sums.items()}


@torch.no_grad()
def update_batch_norm(
    model: nn.Module,
    config: RunConfig,
    world: World,
    shard_set: ShardSet,
    prefetcher: DevicePrefetcher,
    precision: Precision,
) -> None:
    """Replaces batch norm's running statistics by their means over evaluate.statistics_images training images.

    Images are augmented as in the last part of the training: as in the collapse, where there is one.
    """
    layers = [module for module in model.modules() if isinstance(module, BatchNorm)]
    if not layers:
        return
    crop = config.ensemble.collapse.crop if config.ensemble.cycles else config.input.crop
    config = config.model_copy(
        update={
            "input": config.input.model_copy(update={"crop": crop}),
            "train": config.train.model_copy(update={"phases": ()}),
        }
    )
    split = shard_set.split("train")
    updates = max(1, min(config.evaluate.statistics_images, len(split)) // config.train.global_batch)
    order = build_sampler(config, split)
    loader = build_loader(
        config,
        split,
        order,
        phases=image_phases(config, len(split)),
        ranks=world.ranks,
        world_size=world.size,
        device=str(world.device),
    )
    normalise = Normalise(config.input, world, channels_last=config.train.channels_last)
    model.eval()  # dropout stays out of it
    momenta = [layer.momentum for layer in layers]
    try:
        for layer in layers:
            layer.train()
        for number, batch in enumerate(prefetcher(loader.batches(0, updates), untimed), start=1):
            for layer in layers:
                layer.momentum = 1.0 / number  # the first batch replaces what was there
            with precision.autocast():
                model(normalise(batch.images))
    finally:
        loader.close()
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
        model.train()
    for layer in layers:
        for statistics in (layer.running_mean, layer.running_var):
            with waiting_for(BATCH_NORM):
                dist.all_reduce(statistics)
            statistics /= world.size
