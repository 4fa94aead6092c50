"""Metrics of a rank: counting, snapshots, merging, and valid names."""

import threading
import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from podscale.telemetry.metrics import STEP_SECONDS_BUCKETS, TrainMetrics
from podscale.telemetry.phases import PHASES, PhaseClock
from podscale.telemetry.registry import MergedMetrics, SnapshotWriter, merge_expositions, snapshot_path
from podscale.version import VERSION

LABELS = {"run": "r", "rank": "3"}


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> TrainMetrics:
    return TrainMetrics(registry, rank=3, run="r", info={"model": "resnet50", "precision": "bf16"})


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"podscale_{name}", {**LABELS, **labels})


def test_counters_exist_at_zero_and_gauges_only_once_set(registry: CollectorRegistry, metrics: TrainMetrics) -> None:
    for name in ("train_images_total", "train_steps_total", "train_steps_skipped_total"):
        assert value(registry, name) == 0
    for kind in ("loss", "grad"):
        assert value(registry, "train_nonfinite_steps_total", kind=kind) == 0
    assert value(registry, "train_samples_skipped_total", reason="decode") == 0
    assert {phase: value(registry, "train_phase_seconds_total", phase=phase) is not None for phase in PHASES} == (
        dict.fromkeys(PHASES, True)
    )
    assert value(registry, "train_checkpoint_duration_seconds_count", op="save") is None  # only rank 0 saves
    assert value(registry, "train_loss") is None
    assert value(registry, "train_run_info", model="resnet50", precision="bf16", version=VERSION) == 1


def test_what_auto_chose_is_an_info_metric_once_it_is_known(registry: CollectorRegistry, metrics: TrainMetrics) -> None:
    facts = {"algorithm": "torus2d", "bucket_mb": "8", "row_latency_us": "12.5"}
    assert value(registry, "train_all_reduce_info", **facts) is None
    metrics.set_all_reduce_info(facts)
    assert value(registry, "train_all_reduce_info", **facts) == 1
    assert value(registry, "train_run_info", model="resnet50", precision="bf16", version=VERSION) == 1


def test_steps_count_images_and_fall_into_buckets(registry: CollectorRegistry, metrics: TrainMetrics) -> None:
    for seconds in (0.001, 0.02, 0.021, 100.0):
        metrics.count_step(32, seconds)
    assert value(registry, "train_images_total") == 128
    assert value(registry, "train_steps_total") == 4
    counts = {"0.00125": 1, "0.02": 2, "0.03": 3, "+Inf": 4}  # upper bounds are inclusive
    assert {le: value(registry, "train_step_duration_seconds_bucket", le=le) for le in counts} == counts
    assert value(registry, "train_step_duration_seconds_count") == 4
    assert value(registry, "train_step_duration_seconds_sum") == pytest.approx(100.042)
    stamp = value(registry, "train_last_step_timestamp_seconds")
    assert stamp is not None
    assert abs(stamp - time.time()) < 60


def test_buckets_rise_from_a_millisecond_to_four_seconds() -> None:
    assert list(STEP_SECONDS_BUCKETS) == sorted(set(STEP_SECONDS_BUCKETS))
    assert STEP_SECONDS_BUCKETS[4:] == tuple(0.02 * 1.5**i for i in range(14))


def test_gauges_and_checkpoints(registry: CollectorRegistry) -> None:
    metrics = TrainMetrics(registry, rank=0, run="r")
    first = {"rank": "0"}
    assert value(registry, "train_checkpoint_duration_seconds_count", op="restore", **first) == 0
    metrics.set_world(8)
    metrics.set_global_batch(256)
    metrics.set_state(epoch=1.5, loss=0.25, learning_rate=0.1)
    metrics.set_state(loss=0.5)
    metrics.set_accuracies(0.75, 0.9)
    metrics.checkpoint_saved(2.0, 1000)
    metrics.checkpoint_saved(4.0, 2000)
    metrics.checkpoint_failed("other")
    metrics.count_nonfinite("grad")
    metrics.count_skipped()
    metrics.count_skipped()
    metrics.set_bad_samples(7)
    expected = {
        "train_world_size": 8,
        "train_global_batch_size": 256,
        "train_epoch": 1.5,
        "train_loss": 0.5,
        "train_learning_rate": 0.1,
        "eval_top1_ratio": 0.75,
        "eval_top5_ratio": 0.9,
        "train_checkpoint_bytes": 2000,
        "train_steps_skipped_total": 2,
    }
    assert {name: value(registry, name, **first) for name in expected} == expected
    assert 0 <= time.time() - (value(registry, "eval_last_timestamp_seconds", **first) or 0) < 600
    assert value(registry, "train_checkpoint_failures_total", reason="other", **first) == 1
    assert value(registry, "train_checkpoint_failures_total", reason="disk_full", **first) == 0
    assert value(registry, "train_checkpoint_duration_seconds_sum", op="save", **first) == 6.0
    assert value(registry, "train_checkpoint_duration_seconds_count", op="save", **first) == 2
    assert value(registry, "train_nonfinite_steps_total", kind="grad", **first) == 1
    assert value(registry, "train_samples_skipped_total", reason="decode", **first) == 7


def test_times_of_a_sampled_step_replace_the_previous_ones(registry: CollectorRegistry, metrics: TrainMetrics) -> None:
    assert value(registry, "train_sampled_phase_seconds", phase="optimizer") is None
    metrics.set_sampled_phases({"forward_backward": 0.04, "optimizer": 0.002})
    metrics.set_sampled_phases({"forward_backward": 0.05, "optimizer": 0.001})
    assert value(registry, "train_sampled_phase_seconds", phase="forward_backward") == 0.05
    assert value(registry, "train_sampled_phase_seconds", phase="optimizer") == 0.001


def test_phases_are_exclusive_and_add_up_to_the_wall_time() -> None:
    begin = time.perf_counter()
    clock = PhaseClock()
    with clock.phase("evaluation"):
        time.sleep(0.02)
        with clock.phase("data_wait"):
            time.sleep(0.04)
        time.sleep(0.02)
    seconds = clock.seconds()
    wall = time.perf_counter() - begin
    assert 0.08 <= sum(seconds.values()) <= wall
    assert 0.04 <= seconds["evaluation"] <= wall - 0.04
    assert 0.04 <= seconds["data_wait"] <= wall - 0.04
    with pytest.raises(KeyError):
        clock.phase("lunch")


def test_a_phase_ends_with_an_error_too() -> None:
    clock = PhaseClock()
    with pytest.raises(RuntimeError), clock.phase("optimizer"):
        raise RuntimeError
    before = clock.seconds()["optimizer"]
    time.sleep(0.01)
    assert clock.seconds()["optimizer"] == before


def test_an_interval_holds_what_happened_since_the_last(metrics: TrainMetrics) -> None:
    metrics.count_step(10, 0.1)
    metrics.take_interval()
    with metrics.phase("optimizer"):
        time.sleep(0.01)
    metrics.count_step(32, 0.1)
    metrics.count_step(32, 0.1)
    interval = metrics.take_interval()
    assert (interval.steps, interval.images) == (2, 64)
    assert interval.phases["optimizer"] >= 0.01
    assert sum(interval.phases.values()) == pytest.approx(interval.seconds, abs=0.1)
    assert interval.images_per_second == pytest.approx(64 / interval.seconds)


def test_counters_never_fall_while_the_loop_runs(registry: CollectorRegistry, metrics: TrainMetrics) -> None:
    stop = threading.Event()

    def loop() -> None:
        while not stop.is_set():
            for phase in ("data_wait", "forward_backward", "optimizer"):
                with metrics.phase(phase):
                    pass
            metrics.count_step(1, 1e-5)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        before: dict[tuple[str, str], float] = {}
        for _ in range(200):
            for family in registry.collect():
                for sample in family.samples:
                    if family.type in ("counter", "histogram"):
                        key = (sample.name, str(sorted(sample.labels.items())))
                        assert sample.value >= before.get(key, 0.0)
                        before[key] = sample.value
    finally:
        stop.set()
        thread.join()


def test_text_has_no_created_series_and_is_readable_by_the_parser(
    registry: CollectorRegistry, metrics: TrainMetrics
) -> None:
    text = generate_latest(registry).decode()
    assert "_created" not in text
    families = {family.name for family in text_string_to_metric_families(text)}
    assert "podscale_train_images" in families


def test_snapshots_of_ranks_are_merged_into_one_exposition(tmp_path: Path) -> None:
    for rank in (0, 1, 10):
        registry = CollectorRegistry()
        TrainMetrics(registry, rank=rank, run='odd "name"\n# HELP x').count_step(rank, 0.1)
        SnapshotWriter(registry, snapshot_path(tmp_path, rank), interval=3600).close()
    text = MergedMetrics(tmp_path, CollectorRegistry())().decode()
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)  # one block each
    (images,) = [family for family in families if family.name == "podscale_train_images"]
    assert [(s.labels["rank"], s.value) for s in images.samples] == [("0", 0), ("1", 1), ("10", 10)]
    assert text.count("# HELP podscale_train_images_total ") == 1
    assert text.count("# TYPE podscale_train_images_total ") == 1


def test_merging_one_text_changes_nothing(registry: CollectorRegistry, metrics: TrainMetrics) -> None:
    text = generate_latest(registry).decode()
    assert merge_expositions([text]) == text


def test_rendered_at_most_once_an_interval(tmp_path: Path) -> None:
    now = [0.0]
    path = snapshot_path(tmp_path, 0)
    merged = MergedMetrics(tmp_path, CollectorRegistry(), interval=1.0, clock=lambda: now[0])
    path.write_text("# HELP a b\n# TYPE a counter\na 1\n")
    first = merged()
    path.write_text("# HELP a b\n# TYPE a counter\na 2\n")
    now[0] = 0.9
    assert merged() is first
    now[0] = 1.1
    assert merged().endswith(b"a 2\n")
    path.unlink()
    merged.refresh()
    assert merged() == b""


def test_the_snapshot_writer_writes_without_being_asked(
    tmp_path: Path, registry: CollectorRegistry, metrics: TrainMetrics
) -> None:
    path = snapshot_path(tmp_path, 3)
    with SnapshotWriter(registry, path, interval=0.01):
        metrics.count_step(5, 0.1)
        deadline = time.monotonic() + 10
        while 'podscale_train_images_total{rank="3",run="r"} 5.0' not in path.read_text():
            assert time.monotonic() < deadline
        metrics.count_step(5, 0.1)
    assert 'podscale_train_images_total{rank="3",run="r"} 10.0' in path.read_text()
