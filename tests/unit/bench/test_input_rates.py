"""Rates of the input pipeline: rounds in turns, the batches of a training."""

from collections.abc import Generator, Iterator

import numpy as np
import pytest

from podscale.bench import input_rates
from podscale.bench.input_rates import InputRow, InputSettings, Rate, loader_config, measure_loaders, measure_rounds
from podscale.config import InputSection, RunConfig, load
from podscale.data.loaders.base import Batch
from podscale.data.shard_set import ShardSet
from podscale.errors import InputError
from tests.support.loading import needs_native, train
from tests.support.refusals import refused
from tests.support.shard_set import Sample, encode_image, smooth_pixels

SMALL = InputSettings(batch=8, seconds=0.02, rounds=2)


class Clock:
    """Clock that pipelines advance, in place of wall and CPU time; a CPU-second takes 2 seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(input_rates.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(input_rates.time, "process_time", lambda: self.now / 2)


class Pipeline:
    """Pipeline of batches of 10 images, one in `seconds`; the first ones take a minute."""

    def __init__(self, clock: Clock, seconds: float, log: list[str], name: str, *, fails_in_round: int = 9) -> None:
        self._clock, self._seconds, self._log, self._name = clock, seconds, log, name
        self._fails_in_round, self._opened = fails_in_round, 0

    def __call__(self) -> Generator[int, None, None]:
        self._opened += 1
        self._log.append(f"{self._name} opens")
        try:
            for number in range(10**9):
                if self._opened == self._fails_in_round and number == input_rates.WARMUP_BATCHES:
                    raise RuntimeError("out of memory")
                self._clock.now += 60 if number < input_rates.WARMUP_BATCHES else self._seconds
                yield 10
        finally:
            self._log.append(f"{self._name} closes")


def test_pipelines_take_turns_without_their_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, log = Clock(monkeypatch), list[str]()
    pipelines = {"a": Pipeline(clock, 0.5, log, "a"), "b": Pipeline(clock, 2.0, log, "b")}
    rates, errors = measure_rounds(pipelines, 3, seconds=3.0)
    assert rates == {"a": [Rate(40.0, 20.0)] * 3, "b": [Rate(10.0, 5.0)] * 3}
    assert errors == {}
    assert log[::2] == [f"{name} opens" for name in "abbaab"]
    assert log[1::2] == [f"{name} closes" for name in "abbaab"]


def test_at_least_as_many_images_and_seconds_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    start = clock.now
    input_rates.measure_round(Pipeline(clock, 1.0, [], "a"), images=35)
    assert clock.now - start == 60 * input_rates.WARMUP_BATCHES + 4


def test_a_pipeline_that_fails_is_left_out_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, log = Clock(monkeypatch), list[str]()
    pipelines = {"a": Pipeline(clock, 1.0, log, "a", fails_in_round=2), "b": Pipeline(clock, 1.0, log, "b")}
    rates, errors = measure_rounds(pipelines, 3, seconds=1.0)
    assert str(errors.pop("a")) == "out of memory"
    assert errors == {}
    assert len(rates["b"]) == 3
    assert log.count("a opens") == log.count("a closes") == 2


def test_the_batches_are_those_of_a_training(make_shard_set) -> None:
    directory = make_shard_set()
    base = load(None, ["input.image_size=24", "input.interpolation=bicubic", "model.stem=small"]).input
    delivered: list[Batch] = []

    def keep(batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            delivered.append(batch)
            yield batch

    split = ShardSet.open(directory).split("train")
    row = InputRow("reference", 2)
    (done,) = measure_loaders(base, split, [row], InputSettings(8, 0.01, rounds=1), deliver=keep)
    assert done.per_second > 0
    assert done.per_cpu_second > 0
    document = loader_config(base, row, 8)
    assert document.input.model_dump(exclude={"loader", "workers"}) == base.model_dump(exclude={"loader", "workers"})
    wanted = train(document, directory, 0, 4)
    for batch, other in zip(delivered, wanted, strict=False):
        assert batch.images.shape == (8, 24, 24, 3)
        assert np.array_equal(batch.images, other.images)
        assert np.array_equal(batch.keys, other.keys)


@needs_native
def test_images_that_the_extension_refuses_are_counted(make_shard_set) -> None:
    samples = [Sample(encode_image(smooth_pixels(i, 40, 40), kind="PNG" if i < 4 else "JPEG"), i % 4) for i in range(8)]
    split = ShardSet.open(make_shard_set({"train": samples, "validation": samples})).split("train")
    rows = [InputRow("native", 1), InputRow("reference", 1), InputRow("dali", None, reason="not here")]
    native, reference, dali = measure_loaders(InputSection(image_size=16), split, rows, SMALL)
    assert native.refused >= 4 * input_rates.WARMUP_BATCHES
    assert reference.refused == 0
    assert dali == rows[2]


def test_a_loader_that_fails_has_the_reason_and_alone_it_is_the_error(make_shard_set, monkeypatch) -> None:
    split = ShardSet.open(make_shard_set()).split("train")
    base = InputSection.model_validate({"image_size": 16, "augment": {"policy": "trivial_augment"}})
    rows = [InputRow("reference", 1), InputRow("nvjpeg", None)]
    reference, nvjpeg = measure_loaders(base, split, rows, SMALL)
    assert len(reference.rates) == 2
    assert "input.augment" in nvjpeg.reason
    with refused("input.augment", kind=InputError):
        measure_loaders(base, split, rows[1:], SMALL)
    with refused("48", field="--batch", got=49):
        measure_loaders(base, split, rows, InputSettings(49, 1.0))


def test_all_loaders_are_values_of_the_option() -> None:
    for name in input_rates.LOADERS:
        assert RunConfig.model_validate({"input": {"loader": name}}).input.loader == name
    with pytest.raises(InputError):
        load(None, ["input.loader=other"])
