"""Outcomes of checkpoints reach the metrics of the rank that reads and writes them."""

import pytest
from prometheus_client import CollectorRegistry

from podscale.runs.checkpoint import CheckpointReport, Failed, Restored, Saved, Skipped
from podscale.telemetry.metrics import TrainMetrics
from podscale.training.step_timer import StepTimer
from podscale.training.training_logger import TrainingLogger

DURATION = "train_checkpoint_duration_seconds"


@pytest.mark.parametrize(
    ("report", "changed"),
    [
        (Saved(3, 100, 2.0, None), {(f"{DURATION}_count", "save"): 1, (f"{DURATION}_sum", "save"): 2.0}),
        (Restored(3, 0.5), {(f"{DURATION}_count", "restore"): 1, (f"{DURATION}_sum", "restore"): 0.5}),
        (Failed(3, "no room", disk_full=True), {("train_checkpoint_failures_total", "disk_full"): 1}),
        (Failed(3, "read only"), {("train_checkpoint_failures_total", "other"): 1}),
        (Skipped(3, "damaged"), {}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_checkpoint_is_counted_once(report: CheckpointReport, changed: dict[tuple[str, str], float]) -> None:
    registry = CollectorRegistry()
    monitor = TrainingLogger(StepTimer(TrainMetrics(registry, rank=0, run="r"), log_every=1))
    monitor.checkpoint_reported(report)
    counted = [(f"{DURATION}_{what}", op, "op") for what in ("count", "sum") for op in ("save", "restore")]
    failures = [("train_checkpoint_failures_total", reason, "reason") for reason in ("disk_full", "other")]
    for name, value, label in [*counted, *failures]:
        labels = {"run": "r", "rank": "0", label: value}
        assert registry.get_sample_value(f"podscale_{name}", labels) == changed.get((name, value), 0.0), (name, value)
