"""Dynamic batches: full ones at once, others after their wait; failures stay within their batch."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable

import numpy as np
import numpy.typing as npt
import pytest

from podscale.serving import batcher as batching
from podscale.serving.batcher import MAX_FAILED_BATCHES, Batcher
from podscale.serving.metrics import ServingMetrics

SIZE = 2


class Recorder:
    """Classifier whose log-probabilities are an image's first value; it records the sizes of its batches."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.fails = False

    def log_probabilities(self, images: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        self.gate.wait()
        self.batches.append(len(images))
        if self.fails:
            raise MemoryError("out of memory")
        return images[:, 0, 0, :1].astype(np.float32)


def image(value: int) -> npt.NDArray[np.uint8]:
    return np.full((SIZE, SIZE, 3), value, np.uint8)


def with_batcher(
    body: Callable[[Batcher], Awaitable[None]], model: Recorder, metrics: ServingMetrics, max_batch: int, wait: float
) -> None:
    """Run `body` with a ready batcher, and close it."""

    async def run() -> None:
        batcher = Batcher(lambda: model, SIZE, max_batch, wait, metrics)
        batcher.start(asyncio.get_running_loop())
        while not batcher.is_ready:
            assert batcher.error is None
            await asyncio.sleep(0.001)
        model.batches.clear()  # of the warm-up
        try:
            await body(batcher)
        finally:
            model.gate.set()
            await asyncio.to_thread(batcher.close)

    asyncio.run(run())


def test_images_that_arrive_while_the_model_is_busy_share_a_batch(metrics: ServingMetrics) -> None:
    model = Recorder()

    async def body(batcher: Batcher) -> None:
        model.gate.clear()
        results = [batcher.submit(image(0))]
        while batcher.waiting:
            await asyncio.sleep(0.001)
        results += [batcher.submit(image(value)) for value in range(1, 10)]
        model.gate.set()
        rows = await asyncio.gather(*results)
        assert [float(row[0]) for row in rows] == [*range(10)], "each image has its own row"
        assert model.batches == [1, 4, 4, 1]

    with_batcher(body, model, metrics, 4, 0.0)
    assert metrics.batch_images.count == 4


def test_a_full_batch_does_not_wait_and_another_waits_its_time(metrics: ServingMetrics) -> None:
    model = Recorder()

    async def body(batcher: Batcher) -> None:
        started = time.monotonic()
        await asyncio.gather(*(batcher.submit(image(value)) for value in range(4)))
        assert time.monotonic() - started < 0.3
        first = batcher.submit(image(1))
        await asyncio.sleep(0.1)
        await asyncio.gather(first, batcher.submit(image(2)))
        assert 0.4 < time.monotonic() - started < 5
        assert model.batches == [4, 2]

    with_batcher(body, model, metrics, 4, 0.4)


def test_a_failed_batch_fails_its_images_only(metrics: ServingMetrics) -> None:
    model = Recorder()

    async def body(batcher: Batcher) -> None:
        model.fails = True
        for _ in range(MAX_FAILED_BATCHES - 1):
            with pytest.raises(MemoryError):
                await batcher.submit(image(1))
        assert batcher.is_healthy
        model.fails = False
        assert float((await batcher.submit(image(7)))[0]) == 7
        model.fails = True
        for _ in range(MAX_FAILED_BATCHES):
            with pytest.raises(MemoryError):
                await batcher.submit(image(1))
        assert not batcher.is_healthy

    with_batcher(body, model, metrics, 4, 0.0)


def test_a_batch_that_does_not_end_is_unhealthy(metrics: ServingMetrics, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Recorder()

    async def body(batcher: Batcher) -> None:
        model.gate.clear()
        result = batcher.submit(image(1))
        while batcher.waiting:
            await asyncio.sleep(0.001)
        assert batcher.is_healthy
        monkeypatch.setattr(batching, "STUCK_SECONDS", 0.0)
        await asyncio.sleep(0.01)
        assert not batcher.is_healthy
        model.gate.set()
        await result

    with_batcher(body, model, metrics, 4, 0.0)


def test_images_in_the_queue_are_predicted_before_the_end(metrics: ServingMetrics) -> None:
    model = Recorder()

    async def body(batcher: Batcher) -> None:
        model.gate.clear()
        results = [batcher.submit(image(value)) for value in range(5)]
        closing = asyncio.create_task(asyncio.to_thread(batcher.close))
        await asyncio.sleep(0.05)
        model.gate.set()
        await closing
        assert [float(row[0]) for row in await asyncio.gather(*results)] == [*range(5)]

    with_batcher(body, model, metrics, 2, 1.0)


def test_an_error_of_loading_is_kept(metrics: ServingMetrics) -> None:
    def load() -> Recorder:
        raise ValueError("no weights")

    async def run() -> None:
        batcher = Batcher(load, SIZE, 4, 0.0, metrics)
        batcher.start(asyncio.get_running_loop())
        batcher.close()
        assert str(batcher.error) == "no weights"
        assert not batcher.is_ready
        assert not batcher.is_healthy

    asyncio.run(run())
