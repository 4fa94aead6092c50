"""The Prometheus metrics of one rank.

The training loop adds to plain numbers; Prometheus objects are made when somebody collects, at most once a second and
on another thread. That keeps the loop's cost at about a microsecond per step and phase.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import perf_counter, time
from typing import Literal

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from podscale.telemetry.phases import PHASES, PhaseClock
from podscale.version import VERSION

# Up to 20 ms in powers of two (small images, or one GPU's share of a large job), then finer up to 4 s.
STEP_BUCKETS = (*(0.00125 * 2**i for i in range(4)), *(0.02 * 1.5**i for i in range(14)))
NONFINITE_KINDS = ("loss", "grad")
CHECKPOINT_OPS = ("save", "restore")


@dataclass(frozen=True)
class Lap:
    """What happened since the lap before: this rank's images, and wall seconds by phase."""

    steps: int
    images: int
    seconds: float
    phases: dict[str, float]

    @property
    def images_per_second(self) -> float:
        return self.images / self.seconds if self.seconds > 0 else 0.0


class TrainMetrics(Collector):
    """Counts one rank's training; registers itself with `registry`.

    Counters exist at 0 from the start, gauges once they are set (rank 0 sets loss, learning rate, epoch, evaluation
    and checkpoint values; the others leave them). Every sample carries `run` and `rank`.
    """

    def __init__(
        self, registry: CollectorRegistry, *, rank: int, run: str, info: Mapping[str, str] | None = None
    ) -> None:
        self._labels = {"run": run, "rank": str(rank)}
        self._clock = PhaseClock()
        self._shown = dict.fromkeys(PHASES, 0.0)
        self._buckets = [0] * (len(STEP_BUCKETS) + 1)
        self._step_seconds = 0.0
        self._images = 0
        self._skipped_steps = 0
        self._bad_samples = 0
        self._nonfinite = dict.fromkeys(NONFINITE_KINDS, 0)
        self._checkpoints = dict.fromkeys(CHECKPOINT_OPS, (0, 0.0))
        self._checkpoint_failures = 0
        self._gauges: dict[str, float] = {}
        self._infos: dict[str, Mapping[str, str]] = {"train_run": {"version": VERSION, **(info or {})}}
        self._sampled: dict[str, float] = {}
        self._lap = (0, 0, perf_counter(), dict.fromkeys(PHASES, 0.0))
        registry.register(self)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Books the time inside on a phase (one of PHASES); an inner phase interrupts the outer."""
        return self._clock.phase(name)

    def step(self, images: int, seconds: float) -> None:
        """Counts one update: this rank's images and the wall time since the update before, in seconds."""
        self._images += images
        self._step_seconds += seconds
        self._buckets[bisect_left(STEP_BUCKETS, seconds)] += 1
        self._gauges["train_last_step_timestamp_seconds"] = time()

    def state(
        self, *, epoch: float | None = None, loss: float | None = None, learning_rate: float | None = None
    ) -> None:
        """Sets what is known of the state of training."""
        self._set(train_epoch=epoch, train_loss=loss, train_learning_rate=learning_rate)

    def sampled(self, seconds: Mapping[str, float]) -> None:
        """Sets the times on the device of the newest sampled update, by phase."""
        self._sampled = dict(seconds)

    def world(self, size: int, global_batch: int) -> None:
        self._set(train_world_size=size, train_global_batch_size=global_batch)

    def all_reduce(self, info: Mapping[str, str]) -> None:
        """Says what `auto` measured and chose."""
        self._infos["train_all_reduce"] = info

    def nonfinite(self, kind: Literal["loss", "grad"], steps: int = 1) -> None:
        """Counts updates whose loss or gradient was not finite."""
        self._nonfinite[kind] += steps

    def skipped(self, steps: int = 1) -> None:
        """Counts updates that were masked."""
        self._skipped_steps += steps

    def bad_samples(self, total: int) -> None:
        """Sets this rank's count of undecodable records since its start (`Loader.bad_records`)."""
        self._bad_samples = total

    def checkpoint_saved(self, seconds: float, size: int) -> None:
        """Counts a finished save: the writer's seconds, and its bytes."""
        self._count_checkpoint("save", seconds)
        self._set(train_checkpoint_bytes=size, train_checkpoint_last_success_timestamp_seconds=time())

    def checkpoint_restored(self, seconds: float) -> None:
        self._count_checkpoint("restore", seconds)

    def checkpoint_failed(self) -> None:
        self._checkpoint_failures += 1

    def evaluated(self, top1: float, top5: float) -> None:
        """Sets the newest validation accuracies, as shares."""
        self._set(eval_top1_ratio=top1, eval_top5_ratio=top5)

    def lap(self) -> Lap:
        """What happened since the last call (or the start); for the event log, on the training thread."""
        steps, images, since, before = self._lap
        self._lap = (sum(self._buckets), self._images, perf_counter(), self._clock.seconds())
        now_steps, now_images, now, after = self._lap
        phases = {name: after[name] - before[name] for name in PHASES}
        return Lap(now_steps - steps, now_images - images, now - since, phases)

    def collect(self) -> Iterator[Metric]:
        """The metrics of this moment, for the registry."""
        yield from self._counters()
        yield self._histogram()
        yield from self._checkpoint_metrics()
        for name, value in list(self._gauges.items()):
            yield _add(GaugeMetricFamily(f"podscale_{name}", GAUGES[name], labels=[*self._labels]), self._labels, value)
        for name, values in list(self._infos.items()):
            info = {**self._labels, **values}
            yield _add(GaugeMetricFamily(f"podscale_{name}_info", INFOS[name], labels=[*info]), info, 1)
        if self._sampled:
            yield self._sampled_phases()

    def describe(self) -> list[Metric]:
        """Nothing: names are known when collected, and registration must not collect."""
        return []

    def _counters(self) -> Iterator[Metric]:
        steps = sum(self._buckets)
        yield self._counter("train_images", "Images this rank has trained on.", self._images)
        yield self._counter("train_steps", "Updates this rank has taken part in.", steps)
        yield self._counter("train_steps_skipped", "Updates masked because they were not finite.", self._skipped_steps)
        yield self._family(
            "train_nonfinite_steps", "Updates with a non-finite loss or gradient.", "kind", self._nonfinite
        )
        yield self._family(
            "train_samples_skipped", "Records replaced, by reason.", "reason", {"decode": self._bad_samples}
        )
        for name, seconds in self._clock.seconds().items():
            self._shown[name] = max(self._shown[name], seconds)  # a counter never falls, not even by a torn read
        yield self._family("train_phase_seconds", "Wall time by phase.", "phase", self._shown)

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return _add(CounterMetricFamily(f"podscale_{name}", text, labels=[*self._labels]), self._labels, value)

    def _family(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(f"podscale_{name}", text, labels=[*self._labels, label])
        for key, value in values.items():
            _add(family, {**self._labels, label: key}, value)
        return family

    def _sampled_phases(self) -> Metric:
        family = GaugeMetricFamily(
            "podscale_train_sampled_phase_seconds",
            "Device time of a phase in the newest sampled update (of a CUDA graph).",
            labels=[*self._labels, "phase"],
        )
        for name, seconds in self._sampled.items():
            _add(family, {**self._labels, "phase": name}, seconds)
        return family

    def _histogram(self) -> Metric:
        counts, cumulative, total = list(self._buckets), [], 0
        for bound, count in zip((*(f"{bound:.6g}" for bound in STEP_BUCKETS), "+Inf"), counts, strict=True):
            total += count
            cumulative.append((bound, total))
        family = HistogramMetricFamily(
            "podscale_train_step_duration_seconds", "Wall time of one update.", labels=[*self._labels]
        )
        family.add_metric([*self._labels.values()], cumulative, self._step_seconds)
        return family

    def _checkpoint_metrics(self) -> Iterator[Metric]:
        family = SummaryMetricFamily(
            "podscale_train_checkpoint_duration_seconds",
            "Time to write (beside training) or read a checkpoint.",
            labels=[*self._labels, "op"],
        )
        for op, (count, seconds) in self._checkpoints.items():
            family.add_metric([*self._labels.values(), op], count, seconds)
        yield family
        yield self._counter("train_checkpoint_failures", "Checkpoints not written.", self._checkpoint_failures)

    def _count_checkpoint(self, op: str, seconds: float) -> None:
        count, total = self._checkpoints[op]
        self._checkpoints[op] = (count + 1, total + seconds)

    def _set(self, **values: float | None) -> None:
        self._gauges.update({name: float(value) for name, value in values.items() if value is not None})


INFOS = {
    "train_run": "What is trained; always 1.",
    "train_all_reduce": "What all_reduce.algorithm: auto measured and chose; always 1.",
}
GAUGES = {
    "train_last_step_timestamp_seconds": "When the last update ended.",
    "train_epoch": "Passes over the training split so far.",
    "train_loss": "Training loss of the last logged update.",
    "train_learning_rate": "Learning rate of the last logged update.",
    "train_world_size": "Ranks of the run.",
    "train_global_batch_size": "Images per update over all ranks.",
    "train_checkpoint_bytes": "Size of the newest checkpoint.",
    "train_checkpoint_last_success_timestamp_seconds": "When the newest checkpoint was complete.",
    "eval_top1_ratio": "Top-1 accuracy of the newest evaluation.",
    "eval_top5_ratio": "Top-5 accuracy of the newest evaluation.",
}


def _add(
    family: CounterMetricFamily | GaugeMetricFamily, labels: Mapping[str, str], value: float
) -> CounterMetricFamily | GaugeMetricFamily:
    family.add_metric([*labels.values()], value)
    return family
