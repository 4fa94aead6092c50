"""What the metrics of a run say beside its records: each rank's own figures, and the goodput of the whole."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from podscale.telemetry.catalogue import CATALOGUE
from podscale.telemetry.phases import phase_fractions


@dataclass
class RankStats:
    """One rank, since its process began."""

    rank: int
    images: float = 0.0
    seconds: float = 0.0
    """Wall time of its updates."""
    phases: dict[str, float] = field(default_factory=dict)
    memory_bytes: float | None = None
    queued_batches: float | None = None
    bad_records: float = 0.0
    pod: str = ""

    def since(self, before: "RankStats | None") -> "RankStats":
        """The same over the time since an earlier look; over all its time where there was none, or it began anew."""
        if before is None or self.images <= before.images:
            return self
        phases = {name: seconds - before.phases.get(name, 0.0) for name, seconds in self.phases.items()}
        return RankStats(
            self.rank,
            self.images - before.images,
            self.seconds - before.seconds,
            phases,
            self.memory_bytes,
            self.queued_batches,
            self.bad_records,
            self.pod,
        )

    @property
    def images_per_second(self) -> float | None:
        return self.images / self.seconds if self.seconds > 0 else None

    def to_json(self) -> dict[str, Any]:
        found = asdict(self)
        return {**found, "phases": phase_fractions(self.phases), "images_per_second": self.images_per_second}


@dataclass
class RunStats:
    """All ranks that answered, and the run's wall seconds by what they were spent on (empty: not told)."""

    ranks: dict[int, RankStats] = field(default_factory=dict)
    wall_seconds: dict[str, float] = field(default_factory=dict)


def read_run_stats(expositions: Mapping[str, str]) -> RunStats:
    """The figures in the metrics texts of a run's pods, by pod name ('' on one machine)."""
    found = RunStats()
    for pod, text in expositions.items():
        for name, labels, value in _samples(text):
            if name == _SPENT:
                found.wall_seconds[labels["state"]] = found.wall_seconds.get(labels["state"], 0.0) + value
            elif name in _OF_RANKS and labels.get("rank", "").isdigit():
                number = int(labels["rank"])
                _set_stat(found.ranks.setdefault(number, RankStats(number, pod=pod)), name, labels, value)
    return found


def _samples(text: str) -> Iterator[tuple[str, Mapping[str, str], float]]:
    """Name, labels and value of each sample; nothing of a text that is no exposition."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        families = list(text_string_to_metric_families(text))
    except ValueError:
        return
    for family in families:
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value


def _set_stat(rank: RankStats, name: str, labels: Mapping[str, str], value: float) -> None:
    match _OF_RANKS[name]:
        case "phases":
            rank.phases[labels["phase"]] = value
        case "memory_bytes":  # of the device, where there is one
            if labels["kind"] == "device_allocated" or (labels["kind"] == "resident" and rank.memory_bytes is None):
                rank.memory_bytes = value
        case "bad_records":
            rank.bad_records += value
        case plain:
            setattr(rank, plain, value)


_SPENT = CATALOGUE["train_wall_seconds"].series
_OF_RANKS = {
    CATALOGUE["train_images"].series: "images",
    f"{CATALOGUE['train_step_duration_seconds'].series}_sum": "seconds",
    CATALOGUE["train_phase_seconds"].series: "phases",
    CATALOGUE["train_memory_bytes"].series: "memory_bytes",
    CATALOGUE["train_data_queue_depth"].series: "queued_batches",
    CATALOGUE["train_samples_skipped"].series: "bad_records",
}
"""Series of single ranks, and the figure that each one feeds."""


def stats_since(now: Iterable[RankStats], before: RunStats) -> list[RankStats]:
    """Each rank over the time since the look before, in order."""
    return sorted((rank.since(before.ranks.get(rank.rank)) for rank in now), key=lambda rank: rank.rank)
