"""Rates of the input pipeline: rounds in turns, the batches of a training, and the report's arithmetic."""

import json
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from podscale.bench import input_rates
from podscale.bench.input_need import NeededRate
from podscale.bench.input_rates import InputRow, InputSettings, Rate, loader_config, measure_loaders, measure_rounds
from podscale.bench.input_report import InputReport, RunInput, describe
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


def report(need: float, device: str, rows: Sequence[InputRow], run: RunInput | None = None) -> InputReport:
    conditions = {
        "command": "podscale bench input", "date": "2026-11-28", "cores": 16, "cpu": "a CPU", "gpus": ["NVIDIA H100"],
        "load_average": 0.1, "versions": {"numpy": "2"}, "images": 500, "kilobytes": 110.0, "megapixels": 0.2,
        "image_size": 224, "interpolation": "bilinear", "batch": 256, "seconds": 1.0, "rounds": 3, "device": device,
        "decode_index_hint": "", "origin": "of a source",
    }  # fmt: skip
    return InputReport(conditions, NeededRate(need, "a reason"), rows, run)


def test_the_report_compares_rates_with_the_need() -> None:
    rates = [Rate(1000.0, 12000.0), Rate(1400.0, 14000.0), Rate(1200.0, 10000.0)]
    native = InputRow("native", 16, tuple(rates), refused=3)
    slow = InputRow("native", 1, (Rate(1300.0, 1250.0),))
    found = report(7200.0, "cuda:0", [native, slow, InputRow("dali", None, reason="not | installed")])
    text = "\n".join(found.lines())
    assert "| native | 16 | 12,000 | 10,000 to 14,000 | 1,200 | 10.0 | 6.0 |" in text
    assert "| native | 1 | 1,250 | 1,250 to 1,250 | 1,300 | 1.0 | 5.5 |" in text
    assert "Needed: 7,200 images/s: a reason." in text
    assert "- native, 16 workers: 12,000 images/s in all, 1,200 per core: headroom 1.67 times." in text
    assert "The need takes 6.0 of the 16 cores." in text
    assert "native, 1 worker: 1,250" not in text, "only the fastest row of a loader is compared"
    assert "The cores are enough." in text
    assert "refused 3 images" in text
    assert "| dali | not / installed |" in text
    assert "cuda:0" in text
    values = json.loads(json.dumps(found.values()))
    assert values["rows"][0]["cores_needed"] == pytest.approx(6.0)
    assert values["rows"][0]["rates"][1] == {"per_cpu_second": 1400.0, "per_second": 14000.0}
    assert values["rows"][0]["headroom"] == pytest.approx(12000 / 7200)
    assert values["rows"][1]["missing_images_per_second"] == pytest.approx(7200 - 1250)
    assert values["rows"][2]["reason"] == "not | installed"
    assert values["needed_rate"] == {"per_second": 7200.0, "source": "a reason"}


def test_the_report_says_what_a_starved_run_lacks() -> None:
    native = InputRow("native", 16, (Rate(1000.0, 15000.0),))
    reference = InputRow("reference", 16, (Rate(300.0, 4500.0),))
    text = "\n".join(report(20000.0, "cpu", [native, reference], RunInput("native", 1, 4)).lines())
    assert "- native, 16 workers (the loader of this run): 15,000 images/s in all, 1,000 per core: 0.75 times" in text
    assert "the host is short of 5,000 images/s. The need takes 20.0 cores like these, and the host has 16." in text
    assert "- reference, 16 workers: 4,500" in text
    assert "input.workers=1, 4 threads on this host: about 4,000 images/s. input.workers=4 uses all cores." in text
    assert "More cores: 20.0 like these give the need with the loader native, without another change." in text
    enough = "\n".join(report(20000.0, "cpu", [native, reference], RunInput("native", 4, 4)).lines())
    assert "input.workers" not in enough
    no_extension = [InputRow("native", None, reason="not installed"), reference]
    text = "\n".join(report(20000.0, "cpu", no_extension).lines())
    assert "The native extension: it is not usable here. `podscale doctor` prints the remedy." in text


def test_the_conditions_describe_the_images(make_shard_set: object, tmp_path: Path) -> None:
    samples = [Sample(encode_image(smooth_pixels(i, 40, 50)), i % 4) for i in range(8)]
    directory = make_shard_set({"train": samples, "validation": samples})  # type: ignore[operator]
    split = ShardSet.open(directory).split("train")
    found = describe("a command", split, InputSection(), SMALL, [], 0.5)
    assert found["images"] == 8
    assert found["kilobytes"] == pytest.approx(sum(len(sample.image) for sample in samples) / 8000)
    assert found["megapixels"] == pytest.approx(0.002)
    assert found["versions"]["numpy"] == np.__version__
    assert found["batch"] == 8


def test_all_loaders_are_values_of_the_option() -> None:
    for name in input_rates.LOADERS:
        assert RunConfig.model_validate({"input": {"loader": name}}).input.loader == name
    with pytest.raises(InputError):
        load(None, ["input.loader=other"])
