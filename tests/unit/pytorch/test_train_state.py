"""State that is loaded on rank 0 and broadcast: a checkpoint that does not fit is refused on every rank."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from podscale.pytorch.flat_buffers import FlatWeights, GradientBuffer
from podscale.pytorch.optim import ParamShard, ParamSlice, Sgd
from podscale.pytorch.precision import Precision
from podscale.pytorch.train_state import TrainState
from podscale.runs.checkpoint import Snapshot
from podscale.training.run_progress import RunProgress
from tests.support.refusals import refused


def test_a_checkpoint_of_other_arrays_is_refused_on_every_rank() -> None:
    model, cpu = nn.Linear(3, 2), torch.device("cpu")
    buffer = GradientBuffer(model, cpu, bucket_elements=2**10)
    weights = FlatWeights(buffer)
    slices = [ParamSlice(name, buffer.offsets[name], p.numel(), True, True) for name, p in buffer.parameters.items()]
    optimizer = Sgd(ParamShard(slices, buffer.local_ranges, weights.masters, buffer.flat), nesterov=False)
    state = TrainState(model, weights, optimizer, Precision("fp32", cpu), RunProgress())
    sent: list[Any] = []

    def send(value: Any) -> Any:
        sent.append(value)
        return value

    rank0: Any = SimpleNamespace(is_rank0=True, broadcast=send)
    with refused("7", field="model/bias"):
        state.load_from_rank0(Snapshot(7, {"model/other": np.zeros(1)}, {}), rank0)
    other: Any = SimpleNamespace(is_rank0=False, broadcast=lambda value: sent[0])
    with refused("7", field="model/bias"):
        state.load_from_rank0(None, other)
