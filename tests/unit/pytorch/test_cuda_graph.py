"""When a CUDA graph is recorded again. The recording itself needs a GPU: tests/gpu/test_step_modes_gpu.py."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from podscale.data.loaders.base import Batch
from podscale.pytorch.cuda_graph import WARM_UP_STEPS, CudaGraphStep
from podscale.pytorch.device_prefetcher import DeviceBatch
from podscale.training.step_timer import untimed


class Scripted(CudaGraphStep):
    """Graph step that writes down what it would do on a GPU, with the number of images."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
        self.passes: list[int] = []
        eager: Any = SimpleNamespace(set_accumulation=self.passes.append, start_step=lambda step: None)
        world: Any = SimpleNamespace(on_gpu=True, device=torch.device("cpu"))
        super().__init__(eager, world, on_sampled=lambda seconds: None)
        self.done: list[tuple[str, int]] = []

    def _run_eager_step(self, static: DeviceBatch, phase: Any) -> Any:
        self.done.append(("eager", len(static.images)))

    def _capture_graph(self, static: DeviceBatch) -> None:
        self.done.append(("capture", len(static.images)))
        self._graph: Any = SimpleNamespace(reset=lambda: self.done.append(("reset", len(static.images))))

    def _replay_graph(self, phase: Any) -> Any:
        assert self._batch is not None
        self.done.append(("replay", len(self._batch.images)))

    def train(self, steps: int, images: int, side: int = 4) -> None:
        for number in range(steps):
            host = Batch(
                None, np.zeros(images, np.int64), np.zeros(images, np.uint64), np.ones(images, np.float32), number
            )
            pixels = torch.full((images, side, side, 3), number, dtype=torch.uint8)
            self(DeviceBatch(pixels, torch.zeros(images, dtype=torch.int64), host), untimed)
            assert self._batch is not None
            assert torch.equal(self._batch.images, pixels), "the graph reads this step's images"


def recorded(images: int, replays: int) -> list[tuple[str, int]]:
    return [*[("eager", images)] * WARM_UP_STEPS, ("capture", images), *[("replay", images)] * replays]


@pytest.mark.parametrize("change", ["batch", "side", "accumulation"])
def test_a_graph_is_recorded_again_when_the_shape_or_the_passes_change(
    monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    step = Scripted(monkeypatch)
    step.set_accumulation(1)
    step.train(WARM_UP_STEPS + 2, images=8)
    assert step.done == recorded(8, replays=2)
    step.done.clear()
    if change == "accumulation":
        step.set_accumulation(2)
    images, side = (24 if change == "batch" else 8), (6 if change == "side" else 4)
    step.train(WARM_UP_STEPS + 3, images, side)
    assert step.done == [("reset", 8), *recorded(images, replays=3)], "the old graph is freed first"
    assert step.passes == ([1, 2] if change == "accumulation" else [1])
