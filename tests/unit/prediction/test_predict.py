"""Sharing of chunks among processes: in turn, in order, and only a few ahead."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from podscale.prediction import predict
from podscale.prediction.image_inputs import ImageItem
from podscale.prediction.predictor import PredictedItem, Prediction, PredictOptions, Predictor
from podscale.prediction.preparation import CHUNKS_AHEAD


class _FakeWorker:
    """Process that predicts when its results are received."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.most_pending = 0
        self.is_finished = False
        self._pending: deque[Sequence[ImageItem]] = deque()

    def send(self, chunk: Sequence[ImageItem] | None) -> None:
        if chunk is None:
            self.is_finished = True
            return
        self._pending.append(chunk)
        self.most_pending = max(self.most_pending, len(self._pending))
        self.names += [item.name for item in chunk]

    def receive(self) -> list[PredictedItem]:
        return [(item, Prediction(item.name)) for item in self._pending.popleft()]


def test_chunks_are_shared_in_turn_and_only_a_few_ahead(
    model_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = [_FakeWorker(), _FakeWorker(), _FakeWorker()]

    @contextmanager
    def start_worker(_: Predictor, index: int) -> Iterator[_FakeWorker]:
        yield workers[index]

    listed: list[int] = []

    def chunks() -> Iterator[list[ImageItem]]:
        for number in range(50):
            listed.append(number)
            yield [ImageItem(str(number), 0)]

    monkeypatch.setattr(predict, "_start_worker", start_worker)
    predictor = Predictor.open(model_run, [str(tmp_path)], PredictOptions(processes=3))
    rows = predict.predict_on_processes(predictor, chunks())
    next(rows)
    assert len(listed) == 3 * (CHUNKS_AHEAD + 1) + 1
    assert [prediction.image for row in rows for _, prediction in row] == [str(number) for number in range(1, 50)]
    for index, worker in enumerate(workers):
        assert worker.names == [str(number) for number in range(index, 50, 3)]
        assert worker.most_pending == CHUNKS_AHEAD + 1
        assert worker.is_finished
