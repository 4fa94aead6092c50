"""Outcomes of checkpoints reach the metrics of their rank; choices by measurement reach the event log."""

import json
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from podscale.runs.checkpoint import CheckpointReport, Failed, Restored, Saved, Skipped
from podscale.telemetry.events import EventLog
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


def test_each_choice_is_an_event_and_is_kept_for_a_benchmark(tmp_path: Path) -> None:
    kernels = {"kernels": "gemm", "off_ms": "12.3", "gemm_ms": "10"}
    loads = {"loads": "pointers", "pointers_us": "900", "descriptors_us": "950", "bits": "same"}
    all_reduce = {"algorithm": "ring"}
    with EventLog(tmp_path / "metrics.jsonl") as log:
        timer = StepTimer(TrainMetrics(CollectorRegistry(), rank=0, run="r"), log_every=1)
        logger = TrainingLogger(timer, log)
        logger.all_reduce_chosen(all_reduce, kept=False)
        logger.fused_kernels_chosen(kernels, kept=True)
        logger.gemm_loads_chosen(loads)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    events = {line.pop("event"): {key: line[key] for key in line if key not in ("time", "kind")} for line in lines}
    assert events == {
        "all_reduce": {"kept": False, **all_reduce},
        "fused_kernels": {"kept": True, **kernels},
        "gemm_loads": loads,
    }
    assert logger.choices == {"all_reduce": all_reduce, "fused_kernels": kernels, "gemm_loads": loads}
