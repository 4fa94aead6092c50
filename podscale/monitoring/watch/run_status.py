"""Status of a run from its records, and per-rank statistics from its metrics."""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from podscale.telemetry.catalogue import CATALOGUE
from podscale.telemetry.events import EventRecord
from podscale.telemetry.phases import phase_fractions
from podscale.telemetry.step_log import EtaEstimator, format_record

RunState = Literal["waiting", "training", "trained", "evaluated", "stopped"]
MAX_RATES = 60
"""Throughput values kept for the sparkline."""
MAX_EVENTS = 6
HIDDEN_EVENTS = ("sampled", "checkpoint", "bad_record", "skipped_update", "all_reduce", "fused_kernels", "goodput")

_WALL_SECONDS = CATALOGUE["train_wall_seconds"].series
_RANK_SERIES = {
    CATALOGUE["train_images"].series: "images",
    f"{CATALOGUE['train_step_duration_seconds'].series}_sum": "seconds",
    CATALOGUE["train_phase_seconds"].series: "phases",
    CATALOGUE["train_memory_bytes"].series: "memory_bytes",
    CATALOGUE["train_data_queue_depth"].series: "queued_batches",
    CATALOGUE["train_samples_skipped"].series: "bad_records",
}
"""Per-rank series and the RankStats field that each sets."""


@dataclass
class RunStatus:
    """Status of a run after the records added so far; None is unknown.

    Args:
        phases: Fraction of the newest interval's step time by phase.
        wall_seconds: Wall time of the run by state, as logged at the end of a launch.
        updated_at: Unix time of the newest record.
    """

    state: RunState = "waiting"
    step: int = 0
    total_steps: int | None = None
    epoch: float | None = None
    loss: float | None = None
    learning_rate: float | None = None
    ranks: int | None = None
    device: str | None = None
    seconds_left: float | None = None
    phases: dict[str, float] = field(default_factory=dict)
    slowest: Mapping[str, Any] | None = None
    evaluation: EventRecord | None = None
    best_top1: float | None = None
    checkpoint: EventRecord | None = None
    launches: int = 0
    skipped_updates: int = 0
    bad_records: int = 0
    wall_seconds: dict[str, float] = field(default_factory=dict)
    updated_at: float | None = None
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_RATES))
    events: deque[EventRecord] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    _eta: EtaEstimator = field(default_factory=EtaEstimator, repr=False)

    @property
    def images_per_second(self) -> float | None:
        """Throughput of the newest interval over all ranks."""
        return self.rates[-1] if self.rates and self.state == "training" else None

    def add_record(self, record: EventRecord) -> None:
        self.updated_at = record.get("time", self.updated_at)
        seconds_left = self._eta.update(record)
        match record["kind"]:
            case "step":
                self._add_step(record)
                self.seconds_left = seconds_left
            case "evaluation":
                self._add_evaluation(record)
            case "event":
                self._add_event(record)

    def to_json(self) -> dict[str, Any]:
        evaluation = {name: value for name, value in (self.evaluation or {}).items() if name != "kind"}
        checkpoint_age = round((self.updated_at or 0.0) - self.checkpoint["time"], 3) if self.checkpoint else None
        return {
            "state": self.state,
            "step": self.step,
            "total_steps": self.total_steps,
            "epoch": self.epoch,
            "loss": self.loss,
            "learning_rate": self.learning_rate,
            "images_per_second": self.images_per_second,
            "seconds_left": self.seconds_left,
            "ranks": self.ranks,
            "device": self.device,
            "phases": self.phases,
            "slowest": self.slowest,
            "evaluation": evaluation or None,
            "best_top1": self.best_top1,
            "checkpoint_step": self.checkpoint["step"] if self.checkpoint else None,
            "checkpoint_seconds_ago": checkpoint_age,
            "launches": self.launches,
            "skipped_updates": self.skipped_updates,
            "bad_records": self.bad_records,
            "updated": self.updated_at,
            "events": [format_record(event) for event in self.events],
        }

    def _add_step(self, record: EventRecord) -> None:
        self.state, self.step = "training", record["step"]
        self.epoch, self.loss, self.learning_rate = record["epoch"], record["loss"], record["learning_rate"]
        self.slowest = record.get("slowest")
        self.rates.append(record["images_per_second"])
        self.phases = phase_fractions(record.get("phases") or {})

    def _add_evaluation(self, record: EventRecord) -> None:
        self.evaluation = record
        self.best_top1 = max(self.best_top1 or 0.0, record["top1"])

    def _add_event(self, record: EventRecord) -> None:
        name = record.get("event")
        match name:
            case "start" | "resumed":
                self._add_launch(record)
            case "checkpoint":
                self.checkpoint = record
            case "skipped_update":
                self.skipped_updates += 1
            case "bad_record":
                self.bad_records = record.get("substituted", self.bad_records)
            case "preempted":
                self.state = "stopped"
            case "done":
                self.state, self.step, self.seconds_left = "trained", record.get("step", self.step), 0.0
            case "evaluated":
                self.state = "evaluated"
            case "goodput":
                self.wall_seconds = record["seconds"]
        if name not in HIDDEN_EVENTS:
            self.events.append(record)

    def _add_launch(self, record: EventRecord) -> None:
        self.state, self.seconds_left = "training", None
        self.launches += 1
        self.step = int(record.get("step") or 0)
        self.total_steps = record.get("total_steps", self.total_steps)
        self.ranks, self.device = record.get("ranks", self.ranks), record.get("device", self.device)


@dataclass
class RankStats:
    """Statistics of one rank since its process started; `seconds` is the wall time of its steps."""

    rank: int
    images: float = 0.0
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    memory_bytes: float | None = None
    queued_batches: float | None = None
    bad_records: float = 0.0
    pod: str = ""

    def since(self, before: "RankStats | None") -> "RankStats":
        """Return the difference from an earlier sample, or `self` without one, or if there are no more images since."""
        if before is None or self.images <= before.images:
            return self
        phases = {name: seconds - before.phases.get(name, 0.0) for name, seconds in self.phases.items()}
        return replace(self, images=self.images - before.images, seconds=self.seconds - before.seconds, phases=phases)

    @property
    def images_per_second(self) -> float | None:
        return self.images / self.seconds if self.seconds > 0 else None

    def to_json(self) -> dict[str, Any]:
        phases = phase_fractions(self.phases)
        return {**asdict(self), "phases": phases, "images_per_second": self.images_per_second}


@dataclass
class RunStats:
    """Statistics of all ranks that answered, and the run's wall seconds by state (empty if not exported)."""

    ranks: dict[int, RankStats] = field(default_factory=dict)
    wall_seconds: dict[str, float] = field(default_factory=dict)


def read_run_stats(expositions: Mapping[str, str]) -> RunStats:
    """Parse the expositions of a run's pods, by pod name ('' on one machine)."""
    stats = RunStats()
    for pod, text in expositions.items():
        for name, labels, value in _samples(text):
            if name == _WALL_SECONDS:
                stats.wall_seconds[labels["state"]] = stats.wall_seconds.get(labels["state"], 0.0) + value
            elif name in _RANK_SERIES and labels.get("rank", "").isdigit():
                rank = int(labels["rank"])
                _set_stat(stats.ranks.setdefault(rank, RankStats(rank, pod=pod)), name, labels, value)
    return stats


def _samples(text: str) -> Iterator[tuple[str, Mapping[str, str], float]]:
    """Yield name, labels and value of each sample; nothing if the text cannot be parsed."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        families = list(text_string_to_metric_families(text))
    except ValueError:
        return
    for family in families:
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value


def _set_stat(rank: RankStats, name: str, labels: Mapping[str, str], value: float) -> None:
    match _RANK_SERIES[name]:
        case "phases":
            rank.phases[labels["phase"]] = value
        case "memory_bytes":  # of the device, if there is one
            if labels["kind"] == "device_allocated" or (labels["kind"] == "resident" and rank.memory_bytes is None):
                rank.memory_bytes = value
        case "bad_records":
            rank.bad_records += value
        case field_name:
            setattr(rank, field_name, value)
