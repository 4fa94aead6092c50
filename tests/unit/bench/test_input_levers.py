"""Levers of the input pipeline: which apply to a set, how they are measured, and the report's arithmetic."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podscale.bench import input_levers
from podscale.bench.input_lever_report import LeverReport
from podscale.bench.input_levers import LeverRow, MeasuredLevers, Variant, measure_levers, sample_rows
from podscale.bench.input_rates import InputRow, InputSettings, Rate
from podscale.config import InputSection
from podscale.config.data import DataSection
from podscale.data.shard_set import ShardSet
from podscale.data.sharding.decode_indexes import index_shards
from tests.support.golden import assert_golden
from tests.support.loading import needs_native
from tests.support.shard_set import Sample, encode_image, smooth_pixels

TABLE = Path(__file__).with_suffix(".txt")
QUICK = InputSettings(batch=64, seconds=0.04, rounds=2)


def photographs(make_shard_set: Any, *, side: int = 80, kind: str = "JPEG") -> Path:
    samples = [Sample(encode_image(smooth_pixels(i, side, side + i, 3), kind=kind), i % 4) for i in range(20)]
    directory: Path = make_shard_set({"train": samples, "validation": samples[:4]}, name=f"{kind}-{side}")
    return directory


def measure(directory: Path, folder: Path, loader: str = "native", image_size: int = 32) -> MeasuredLevers:
    split = ShardSet.open(directory).split("train")
    section = InputSection(image_size=image_size)
    return measure_levers(section, DataSection(), split, InputRow(loader, 1), QUICK, folder)


def names(levers: MeasuredLevers) -> list[str]:
    return [row.variant.name for row in levers.changes]


@needs_native
def test_levers_of_a_set_without_an_index_and_of_an_indexed_one(make_shard_set: Any, tmp_path: Path) -> None:
    directory = photographs(make_shard_set)
    levers = measure(directory, tmp_path / "a")
    in_memory = ["coefficients in memory", "decoded images in memory"]
    assert names(levers) == ["decode index", *in_memory, "smaller images"]
    assert (levers.has_index, levers.images, levers.base.index_share) == (False, 20, 0.0)
    index, coefficients, pixels, smaller = levers.changes
    assert 0 < index.index_share < 0.1
    assert pixels.bytes_per_image == pytest.approx(3 * 80 * np.mean(range(80, 100)), rel=1e-6)
    assert 0 < coefficients.bytes_per_image < pixels.bytes_per_image
    assert smaller.variant.short_side == 37
    assert smaller.bytes_per_image < levers.base.bytes_per_image
    assert all(len(row.rates) == QUICK.rounds for row in (levers.base, *levers.changes))
    index_shards(directory, 8)
    indexed = measure(directory, tmp_path / "b")
    assert indexed.has_index
    assert indexed.base.index_share > 0
    assert names(indexed) == [*in_memory, "smaller images"]


@needs_native
def test_levers_of_images_that_the_extension_does_not_decode_and_of_the_reference(
    make_shard_set: Any, tmp_path: Path
) -> None:
    assert names(measure(photographs(make_shard_set, kind="PNG"), tmp_path / "a")) == [
        "decoded images in memory",
        "smaller images",
    ]
    small = photographs(make_shard_set, side=36)
    assert names(measure(small, tmp_path / "b", "reference")) == ["decoded images in memory"]


@needs_native
def test_images_in_memory_are_timed_when_all_are_kept(
    make_shard_set: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch has a quarter of the sample, so five batches of warm-up have been decoded before the clock starts."""
    asked: list[dict[str, Any]] = []
    measure_rounds = input_levers.measure_rounds

    def spy(pipelines: Any, rounds: int, **options: Any) -> Any:
        asked.append(options)
        return measure_rounds(pipelines, rounds, **options)

    monkeypatch.setattr(input_levers, "measure_rounds", spy)
    measure(photographs(make_shard_set), tmp_path / "a")
    assert asked[0]["warmup"] == 5
    assert asked[0]["seconds"] == pytest.approx(0.3 * 0.04 / 2)


def test_a_sample_is_bounded_in_number_and_memory(make_shard_set: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    split = ShardSet.open(photographs(make_shard_set)).split("train")
    assert sample_rows(split) == list(range(20))
    monkeypatch.setattr(input_levers, "SAMPLE_IMAGES", 5)
    assert sample_rows(split) == [0, 4, 9, 14, 19]
    monkeypatch.setattr(input_levers, "SAMPLE_PIXEL_BYTES", 1)
    monkeypatch.setattr(input_levers, "MIN_SAMPLE_IMAGES", 2)
    assert sample_rows(split) == [0, 19]


NO_SPLIT: Any = None


def lever(name: str, rate: float, size: float, **options: Any) -> LeverRow:
    share = 0.02 if name == "decode index" else 0.0
    return LeverRow(Variant(name, NO_SPLIT, **options), (Rate(rate, rate),), size, share)


def report(host_images: int | None, free_memory: int, processes: int = 1) -> LeverReport:
    changes = (
        lever("decode index", 1500.0, 100e3),
        lever("coefficients in memory", 3000.0, 200e3, cache="coefficients"),
        lever("smaller images", 2000.0, 30e3, short_side=256),
    )
    levers = MeasuredLevers("native", 250, False, lever("", 1000.0, 100e3), changes)
    return LeverReport(levers, 4500.0, host_images, free_memory, processes)


def rows_of(found: LeverReport) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = found.values()["rows"]
    return rows


def test_each_lever_has_its_gain_its_cores_and_its_setting() -> None:
    found = report(1000, 10**9)
    rows = rows_of(found)
    assert [row["times"] for row in rows] == [1.0, 1.5, 3.0, 2.0]
    assert [row["cores_needed"] for row in rows] == [4.5, 3.0, 1.5, 2.25]
    cache = "`input.decoded_cache_bytes=200278016`, `input.decoded_cache_form=coefficients`"
    settings = ["", "`podscale shard RUN --decode-index`", cache, "`data.resize_short=256`"]
    assert [row["set"] for row in rows] == settings
    assert rows[2]["fraction_that_fits"] == 1


def test_the_table_of_levers() -> None:
    """Its last lines are those of a cache that is too large, and of a lever that failed."""
    failed = LeverRow(Variant("decode index", NO_SPLIT), (), 0.0, reason="out of memory")
    large = lever("decoded images in memory", 4000.0, 2e6, cache="pixels")
    found = report(1000, 10**9)
    levers = replace(found.levers, changes=(*found.levers.changes, large, failed))
    assert_golden(TABLE, "\n".join([*replace(found, levers=levers).lines(), ""]))


def test_a_cache_that_is_too_large_has_the_rate_of_the_part_that_fits() -> None:
    found = report(1000, 125 * 10**6, processes=2)  # 100 MB of the 200 MB
    row = rows_of(found)[2]
    assert row["fraction_that_fits"] == pytest.approx(0.5)
    assert "=50331648`" in row["set"], "bytes of each of two processes, in whole MiB"
    assert " 1,500 |" in "\n".join(found.lines())


def test_a_set_of_unknown_size_has_bytes_for_each_image() -> None:
    found = report(None, 10**9)
    row = rows_of(found)[2]
    assert (row["bytes_per_image"], row["fraction_that_fits"]) == (200e3, 1)
    assert row["set"].startswith("`input.decoded_cache_bytes`, ")
    assert "195 KiB" in "\n".join(found.lines())


def test_a_lever_that_failed_has_its_reason() -> None:
    failed = LeverRow(Variant("decode index", NO_SPLIT), (), 0.0, reason="out of memory")
    levers = MeasuredLevers("native", 250, False, lever("", 1000.0, 1e5), (failed,))
    row = rows_of(LeverReport(levers, 4500.0, 10, 0))[1]
    assert (row["change"], row["reason"]) == ("decode index", failed.reason)
    assert "times" not in row
