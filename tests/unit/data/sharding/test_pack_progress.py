"""Progress of a build, by split: from one process and from several, with the reasons of rejects."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from prometheus_client import CollectorRegistry

from podscale.config.data import DataSection
from podscale.data.sharding import pack
from podscale.data.sharding.build_shard_set import BuildResult, build_shard_set
from podscale.data.sharding.pack_progress import BuildPhase, PackProgress
from podscale.telemetry.metrics import ShardMetrics


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Make 40 images in two splits, 3 of them unusable for two reasons; 48 kB."""
    folder = tmp_path / "images"
    for seed in range(40):
        split, label = "val" if seed % 4 == 0 else "train", "dog" if seed > 30 else "cat"
        path = folder / split / label / f"{seed:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.random.default_rng(seed).integers(0, 256, (20, 20, 3), dtype=np.uint8)).save(path)
    (folder / "train" / "cat" / "001.png").write_bytes(b"")
    (folder / "train" / "cat" / "002.png").write_bytes(b"nonsense")
    (folder / "val" / "cat" / "004.png").write_bytes(b"")
    return folder


class RecordingObserver:
    """Observer that records its calls."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.totals: dict[str, int] = {}
        self.so_far: dict[str, list[PackProgress]] = {"train": [], "validation": []}
        self.shards: list[tuple[str, dict[str, int]]] = []

    def phase_started(self, name: BuildPhase) -> None:
        self.phases.append(name)

    def images_planned(self, split: str, images: int) -> None:
        self.totals[split] = images

    def images_packed(self, split: str, so_far: PackProgress) -> None:
        self.so_far[split].append(so_far)

    def shard_finished(self, split: str, rejects: Mapping[str, int]) -> None:
        self.shards.append((split, dict(rejects)))


def build(source: Path, out: Path, watch: RecordingObserver | ShardMetrics, workers: int = 1) -> BuildResult:
    data = DataSection(source=str(source), shard_bytes=16384, max_reject_rate=0.2)
    return build_shard_set(data, out, workers=workers, observer=watch)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_observer_gets_the_progress_of_a_build(
    source: Path, tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "SERIAL_PACK_BYTES", 0)  # use processes even for a small set
    observer = RecordingObserver()
    result = build(source, tmp_path / "out", observer, workers)
    assert observer.phases == ["plan", "pack", "merge"]
    assert observer.totals == {"train": 30, "validation": 10}
    last = {split: counts[-1] for split, counts in observer.so_far.items()}
    assert {split: (counts.images, counts.rejects) for split, counts in last.items()} == {
        "train": (30, 2),
        "validation": (10, 1),
    }
    sizes = {split: sum(path.stat().st_size for path in (source / folder).rglob("*.png")) for split, folder in FOLDERS}
    assert {split: counts.bytes_read for split, counts in last.items()} == sizes
    assert {split: counts.bytes_written for split, counts in last.items()} == {
        "train": sizes["train"] - 8,
        "validation": sizes["validation"],
    }
    for counts in observer.so_far.values():
        assert counts == sorted(counts), "counts never fall"
    assert len(observer.shards) == result.packed_shards > 2
    reasons: dict[str, int] = {}
    for _, rejects in observer.shards:
        for reason, images in rejects.items():
            reasons[reason] = reasons.get(reason, 0) + images
    assert reasons == {"empty": 2, "not_an_image": 1}


FOLDERS = (("train", "train"), ("validation", "val"))


def test_progress_is_exported_as_metrics(source: Path, tmp_path: Path) -> None:
    registry = CollectorRegistry()
    result = build(source, tmp_path / "out", ShardMetrics(registry, run="r"))
    value: Callable[..., float | None] = lambda name, **labels: registry.get_sample_value(  # noqa: E731
        f"podscale_{name}", {"run": "r", **labels}
    )
    assert value("shard_images_total", split="train") == 28
    assert value("shard_planned_images", split="validation") == 10
    assert value("shard_shards_total") == result.packed_shards
    assert value("shard_rejects_total", reason="empty") == 2
    assert value("shard_bytes_total", direction="read") == sum(p.stat().st_size for p in source.rglob("*.png"))
    seconds = [value("shard_phase_seconds_total", phase=phase) for phase in ("plan", "pack", "merge", "other")]
    assert all(second is not None and second > 0 for second in seconds)


def test_a_finished_set_plans_nothing(source: Path, tmp_path: Path) -> None:
    build(source, tmp_path / "out", RecordingObserver())
    observer = RecordingObserver()
    assert build(source, tmp_path / "out", observer).reused
    assert (observer.phases, observer.totals, observer.shards) == (["plan"], {}, [])
