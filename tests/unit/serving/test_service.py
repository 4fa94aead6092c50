"""Admission of images: the queue, the time after which to try again, and the server's health after failures."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest
from prometheus_client import CollectorRegistry

from podscale.prediction.model import open_model
from podscale.serving import service as service_module
from podscale.serving.batcher import MAX_FAILED_BATCHES
from podscale.serving.metrics import ServingMetrics
from podscale.serving.options import ServeOptions
from podscale.serving.service import MODEL_FAILED, ClassificationService, status_of
from podscale.serving.uploads import RequestError
from tests.support.prediction import CLASSES, photograph, write_model_run

QUEUE = 4


class Gated:
    """Classifier that predicts one batch for each release; an `output` below 0 is an error."""

    def __init__(self) -> None:
        self.releases = threading.Semaphore(1)  # for the warm-up
        self.output = 0.0

    def log_probabilities(self, images: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        self.releases.acquire()
        if self.output < 0:
            raise MemoryError("out of memory")
        return np.full((len(images), len(CLASSES)), self.output, np.float32)


@pytest.fixture
def model() -> Gated:
    return Gated()


@pytest.fixture
def service(model: Gated, metrics: ServingMetrics, tmp_path: Path) -> Iterator[ClassificationService]:
    """Service whose batches are single images."""
    config = write_model_run(tmp_path)
    opened = open_model(Path(config.run.workspace) / "runs" / config.run.id)
    service = ClassificationService(opened, lambda: model, ServeOptions(max_batch=1, queue=QUEUE), metrics)
    yield service
    model.releases.release(100)
    service.close()


async def until_ready(service: ClassificationService) -> None:
    service.start()
    while not service.is_ready:
        await asyncio.sleep(0.001)


def test_a_full_queue_names_the_time_that_its_images_take(
    service: ClassificationService, model: Gated, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(service_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    async def run() -> None:
        await until_ready(service)
        requests = [asyncio.ensure_future(service.classify_body("", photograph(1), 1)) for _ in range(QUEUE)]
        model.releases.release(2)
        await asyncio.wait(requests, return_when=asyncio.FIRST_COMPLETED)
        while sum(request.done() for request in requests) < 2:
            await asyncio.sleep(0.001)
        requests += [asyncio.ensure_future(service.classify_body("", photograph(1), 1)) for _ in range(2)]
        labels = {"model": "small", "process": "0"}
        while registry.get_sample_value("podscale_serve_queue_images", labels) != QUEUE:
            await asyncio.sleep(0.001)
        clock[0] += 5.0  # two images in five seconds
        with pytest.raises(RequestError) as error:
            await service.classify_body("", photograph(1), 1)
        assert (error.value.status, error.value.reason, error.value.retry_after) == (503, "overloaded", 10)
        model.releases.release(QUEUE)
        await asyncio.gather(*requests)

    asyncio.run(run())


def test_failures_of_the_model_are_rows_and_end_the_health(service: ClassificationService, model: Gated) -> None:
    async def run() -> None:
        await until_ready(service)
        for output, reason in ((float("nan"), "not_finite"), *[(-1.0, MODEL_FAILED)] * MAX_FAILED_BATCHES):
            assert service.is_healthy
            model.output = output
            model.releases.release()
            predictions = await service.classify_body("", photograph(1), 1)
            assert [one.failure.reason for one in predictions if one.failure] == [reason]
            assert status_of(predictions) == 500
        assert not service.is_healthy

    asyncio.run(run())
