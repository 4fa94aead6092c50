"""Rows of a throughput sweep: which measurements a restarted sweep reuses, and which count as done."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from podscale.bench import sweep
from podscale.bench.sweep import SweepRow, SweepSettings, run_sweep
from podscale.bench.variants import BenchVariant
from podscale.config import load
from podscale.util import host_info
from tests.support.refusals import refused


class Workers:
    """Stand-in for the processes of a measurement: rank 0 writes a result, and all exit with `codes`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, self.codes, self.error = 0, list[int | None]([0]), ""
        self.modules: list[str] = []
        monkeypatch.setattr(sweep, "run_workers", self.run)
        monkeypatch.setattr(host_info, "visible_gpus", lambda: 1)
        monkeypatch.setattr(host_info, "gpu_names", lambda: ["NVIDIA H100"])

    def run(self, module: str, arguments: list[str], *rest: object, log: Path, **options: object) -> list[int | None]:
        self.calls += 1
        self.modules.append(module)
        result = Path(arguments[1])
        result.write_text(json.dumps({"images_per_second": float(self.calls)}))
        log.touch()
        if self.error:
            result.with_suffix(".1").write_text(json.dumps({"error": self.error}))
        return self.codes


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Workers:
    return Workers(monkeypatch)


def measure(
    folder: Path, *, real: bool = False, shard_set: str | None = None, parts: int = 2, engine: str = "pytorch"
) -> SweepRow:
    settings = SweepSettings(warmup=1, steps=2, parts=parts, shard_set=shard_set)
    variant = BenchVariant("one", {"launch.processes": 1, "train.engine": engine}, batch=4, real_images=real)
    (row,) = run_sweep(
        lambda changes: load(None, ["model.width=4", *changes]),
        [variant],
        settings,
        folder / "rows.json",
        lambda row, rows: None,
    )
    return row


def test_a_measured_row_is_reused(workers: Workers, tmp_path: Path) -> None:
    assert measure(tmp_path).found == measure(tmp_path).found
    assert workers.calls == 1


def test_another_device_is_measured_again(workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure(tmp_path)
    monkeypatch.setattr(host_info, "gpu_names", lambda: ["NVIDIA H200"])
    assert measure(tmp_path).found == {"images_per_second": 2.0}
    monkeypatch.setattr(host_info, "visible_gpus", lambda: 0)
    assert measure(tmp_path).found == {"images_per_second": 3.0}
    monkeypatch.undo()
    assert len(sweep.read_rows(tmp_path / "rows.json")) == 3


def test_other_parts_and_another_shard_set_are_measured_again(
    workers: Workers, tmp_path: Path, make_shard_set, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure(tmp_path)
    measure(tmp_path, parts=3)
    assert workers.calls == 2
    one, two = (str(make_shard_set(name=name)) for name in ("one", "two"))
    for shard_set in (one, two, one, two):
        measure(tmp_path, real=True, shard_set=shard_set)
    assert workers.calls == 4
    monkeypatch.chdir(tmp_path)
    measure(tmp_path, real=True, shard_set="one")  # the same, by its relative path
    measure(tmp_path, shard_set=one)  # synthetic images do not read it
    assert workers.calls == 4


def test_a_shard_set_that_is_not_there_is_refused(workers: Workers, tmp_path: Path) -> None:
    with refused(field=tmp_path / "absent"):
        measure(tmp_path, real=True, shard_set=str(tmp_path / "absent"))
    assert not workers.calls


@pytest.mark.parametrize("codes", [[0, 1], [0, None], [-9, 0]])
def test_a_result_counts_only_if_no_rank_failed_afterwards(
    workers: Workers, tmp_path: Path, codes: list[int | None]
) -> None:
    workers.codes, workers.error = codes, "RuntimeError: lost"
    row = measure(tmp_path)
    assert row.found is None
    assert row.reason == ("ran past its limit of 300 s" if None in codes else "RuntimeError: lost")
    workers.codes = [0, 0]
    assert measure(tmp_path).found == {"images_per_second": 2.0}


def test_each_engine_has_a_worker_that_exists(workers: Workers, tmp_path: Path) -> None:
    for engine in ("jax", "pytorch"):
        assert measure(tmp_path, engine=engine).found
        assert workers.modules[-1] == f"podscale.{engine}.throughput_benchmark"
        assert find_spec(workers.modules[-1]) is not None
    assert workers.calls == 2  # a row of its own for each
