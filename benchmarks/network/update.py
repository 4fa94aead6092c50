"""Cost of an update if every rank does all of it, and if each does its share and gathers the rest."""

import statistics
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from benchmarks.network.lab import Lab
from benchmarks.network.meter import measure
from podscale import models
from podscale.config import ModelSection, TrainSection
from podscale.pytorch.models import build_model
from podscale.pytorch.optim import HyperParams
from podscale.pytorch.precision import build_precision
from podscale.pytorch.trainer import build_reducer_and_optimizer
from podscale.pytorch.world import World

ROUNDS = 5


class Cost(NamedTuple):
    """CPU seconds of one rank's update; seconds and bytes a rank sends to gather the weights; bytes of state."""

    update: float
    gather: float
    sent: float
    state: int


def costs(world: World, lab: Lab, model: ModelSection, sections: Mapping[str, dict[str, Any]]) -> dict[str, Cost]:
    """{section: Cost} of a network, on rank 0. CPU time, since the ranks take turns on few cores."""
    return {name: _cost(world, lab, model, TrainSection.model_validate(section)) for name, section in sections.items()}


def _cost(world: World, lab: Lab, model: ModelSection, train: TrainSection) -> Cost:
    network = build_model(model, 1000)
    precision = build_precision(train, world)
    reducer, weights, optimizer = build_reducer_and_optimizer(
        train, network, models.model_spec(model, 1000), precision, world, 40.0, extra=1
    )
    hyper, finite = HyperParams(*torch.tensor([0.1, 0.9, 1e-4, 2.0]).unbind()), torch.tensor(True)
    seconds = []
    for _ in range(ROUNDS):
        for part in reducer.buffer.averages:
            part.fill_(1e-3)
        world.barrier()
        before = time.process_time()
        optimizer.step(hyper, finite)
        seconds.append(time.process_time() - before)
    gather = measure(world, lab, weights.all_gather, 2)
    state = sum(moment.nbytes for moment in optimizer.moments.values()) + weights.masters.nbytes
    reducer.close()
    return Cost(
        statistics.median(seconds[1:]), gather.median if reducer.sharded_all_reduce else 0.0, gather.rank_bytes, state
    )
