"""Hint of the loader native: logged once, and only for sets that an index would make faster."""

import logging
from pathlib import Path
from typing import Any

import pytest

from podscale.cli.bench_input import input_rates
from podscale.data.loaders.build_loader import MIN_INDEXED_BYTES, open_shard_set
from tests.support.loading import add_indexes, document, evaluate, needs_native, open_loader
from tests.support.shard_set import Sample, encode_image, smooth_pixels

pytestmark = needs_native

COMMAND = "podscale shard RUN --decode-index"


def photographs(**options: Any) -> list[Sample]:
    samples = [Sample(encode_image(smooth_pixels(i, 160, 170), quality=95, **options), i % 4) for i in range(12)]
    assert all(len(sample.image) > MIN_INDEXED_BYTES for sample in samples)
    return samples


@pytest.fixture
def directory(make_shard_set) -> Path:
    samples = photographs()
    made: Path = make_shard_set({"train": samples, "validation": samples})
    return made


def hints(directory: Path, caplog: pytest.LogCaptureFixture, name: str = "native", **section: Any) -> list[str]:
    """Return the lines that two ranks of a training log."""
    caplog.set_level(logging.INFO)
    caplog.clear()
    config = document(name, input=section)
    split = open_shard_set(str(directory), config).split("train")
    for rank in range(2):
        with open_loader(config, split, ranks=range(rank, rank + 1), world=2):
            pass
    return [record.getMessage() for record in caplog.records if COMMAND in record.getMessage()]


def test_rank_0_says_once_what_an_index_would_bring(directory, caplog) -> None:
    (line,) = hints(directory, caplog)
    assert "train" in line
    assert {record.levelno for record in caplog.records} == {logging.INFO}
    assert len(hints(directory, caplog, "auto")) == 1
    evaluate(document("native"), directory)
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("name", "section"),
    [("reference", {}), ("native", {"crop": {"padding": 4}}), ("native", {"decoded_cache_bytes": 10**6})],
)
def test_no_hint_if_an_index_would_not_be_used(name, section, directory, caplog) -> None:
    assert hints(directory, caplog, name, **section) == []


def test_no_hint_for_an_indexed_set(directory, caplog) -> None:
    add_indexes(directory)
    assert hints(directory, caplog) == []


@pytest.mark.parametrize("kind", ["small", "progressive", "png"])
def test_no_hint_for_images_that_an_index_does_not_help(kind, make_shard_set, caplog) -> None:
    samples = {
        "small": [Sample(encode_image(smooth_pixels(i, 60, 70)), 0) for i in range(12)],
        "progressive": photographs(progressive=True),
        "png": [Sample(encode_image(smooth_pixels(i, 160, 170), kind="PNG"), 0) for i in range(12)],
    }[kind]
    assert hints(make_shard_set({"train": samples, "validation": samples}), caplog) == []


def test_the_input_benchmark_says_so_in_its_report(directory, capsys) -> None:
    options: dict[str, Any] = {"seconds": 0.1, "rounds": 1, "image_size": 16, "batch": 4, "device": "cpu"}
    for loaders, count in (("native,reference", 1), ("reference", 0)):
        input_rates(shard_set=str(directory), loaders=loaders, **options)
        assert capsys.readouterr().out.count(COMMAND) == count
    add_indexes(directory)
    input_rates(shard_set=str(directory), loaders="native", **options)
    assert COMMAND not in capsys.readouterr().out
