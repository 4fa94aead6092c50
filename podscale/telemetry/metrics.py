"""Prometheus metrics of one training rank, of an evaluation, and of a pod that packs shards."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import perf_counter, time
from typing import TYPE_CHECKING, Literal

from prometheus_client import CollectorRegistry

from podscale.telemetry.catalogue import CATALOGUE
from podscale.telemetry.phases import PHASES, PhaseClock
from podscale.telemetry.registry import MetricRegistry
from podscale.version import VERSION

if TYPE_CHECKING:
    from podscale.data.sharding.pack_progress import BuildPhase, PackProgress


# Powers of two up to 20 ms (small images, or one GPU's part of a large job), then finer up to 4 s.
STEP_SECONDS_BUCKETS = (*(0.00125 * 2**i for i in range(4)), *(0.02 * 1.5**i for i in range(14)))
TRAIN_COUNTERS = (
    "train_images",
    "train_steps",
    "train_model_flops",
    "train_steps_skipped",
    "train_nonfinite_steps",
    "train_samples_skipped",
    "train_phase_seconds",
    "train_checkpoint_duration_seconds",
    "train_checkpoint_failures",
    "eval_images",
)
"""Counters and summaries that are exported from 0 on, because PromQL's `increase` misses a series' first value."""
SHARD_COUNTERS = ("shard_images", "shard_shards", "shard_bytes", "shard_phase_seconds")


@dataclass(frozen=True)
class Interval:
    """Steps, images and wall seconds (total and by phase) of this rank in one interval."""

    steps: int
    images: int
    seconds: float
    phases: dict[str, float]

    @property
    def images_per_second(self) -> float:
        return self.images / self.seconds if self.seconds > 0 else 0.0


class TrainMetrics:
    """Metrics of one training rank, in `registry`, with the labels `run` and `rank`.

    Counters start at 0. Gauges exist once they are set; rank 0 sets loss, learning rate, epoch, evaluation and
    progress. `values` sets metrics that have no method here.
    """

    def __init__(
        self, registry: CollectorRegistry, *, rank: int, run: str, info: Mapping[str, str] | None = None
    ) -> None:
        self.values = MetricRegistry(run=run, rank=str(rank))
        self.values.declare(*(name for name in TRAIN_COUNTERS if rank == 0 or CATALOGUE[name].exporter != "rank 0"))
        self.values.set_info("train_run_info", {"version": VERSION, **(info or {})})
        self._clock = PhaseClock()
        self._step_seconds = self.values.histogram("train_step_duration_seconds", STEP_SECONDS_BUCKETS)
        self._images = 0
        self._flops, self._flops_per_image = 0.0, 0.0
        self._interval_start = (0, 0, perf_counter(), dict.fromkeys(PHASES, 0.0))
        self.values.on_collect(self._copy_counters)
        registry.register(self.values)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context manager that adds its time to a phase of PHASES; an inner phase interrupts an outer one."""
        return self._clock.phase(name)

    def count_step(self, images: int, seconds: float) -> None:
        """Count one step: this rank's images and the wall time since the last step, seconds."""
        self._images += images
        self._flops += images * self._flops_per_image
        self._step_seconds.observe(seconds)
        self.values.set("train_last_step_timestamp_seconds", time())

    def set_state(
        self,
        *,
        epoch: float | None = None,
        loss: float | None = None,
        learning_rate: float | None = None,
        grad_norm: float | None = None,
    ) -> None:
        self._set(train_epoch=epoch, train_loss=loss, train_learning_rate=learning_rate, train_grad_norm=grad_norm)

    def set_progress(
        self,
        *,
        planned: int | None = None,
        completed: int | None = None,
        images_left: int | None = None,
        done: bool | None = None,
    ) -> None:
        """Set the planned steps of the run, the completed ones over all launches, and the images of the others."""
        self._set(
            train_planned_steps=planned,
            train_completed_steps=completed,
            train_images_left=images_left,
            train_done=done,
        )

    def set_sampled_phases(self, seconds: Mapping[str, float]) -> None:
        """Set the device seconds by phase of the newest sampled step."""
        for phase, value in seconds.items():
            self.values.set("train_sampled_phase_seconds", value, phase)

    def set_world(self, size: int) -> None:
        self._set(train_world_size=size)

    def set_global_batch(self, images: int) -> None:
        self._set(train_global_batch_size=images)

    def set_flops(self, flops_per_image: float, peak: float) -> None:
        """Set the FLOPs per image, forward and backward, and the device's peak FLOP/s; 0 if unknown."""
        self.set_flops_per_image(flops_per_image)
        self._set(train_peak_flops=peak or None)

    def set_flops_per_image(self, flops: float) -> None:
        """Set `flops`, the FLOPs of an image forward and backward, as after a change of the image size."""
        self._flops_per_image = flops

    def set_all_reduce_info(self, info: Mapping[str, str]) -> None:
        """Set the measurements and the choice of the algorithm `auto`."""
        self.values.set_info("train_all_reduce_info", info)

    def count_nonfinite(self, kind: Literal["loss", "grad"]) -> None:
        self.values.add("train_nonfinite_steps", 1, kind)

    def count_skipped(self) -> None:
        """Count a step that was skipped because of a non-finite value."""
        self.values.add("train_steps_skipped", 1)

    def set_bad_samples(self, total: int) -> None:
        """Set the number of records that this rank could not decode (`Loader.bad_records`)."""
        self.values.set("train_samples_skipped", total, "decode")

    def checkpoint_saved(self, seconds: float, size: int) -> None:
        """Count a finished save, with the writer's seconds and bytes."""
        self.values.observe("train_checkpoint_duration_seconds", seconds, "save")
        self._set(train_checkpoint_bytes=size, train_checkpoint_last_success_timestamp_seconds=time())

    def checkpoint_restored(self, seconds: float) -> None:
        self.values.observe("train_checkpoint_duration_seconds", seconds, "restore")

    def checkpoint_failed(self, reason: Literal["disk_full", "other"]) -> None:
        self.values.add("train_checkpoint_failures", 1, reason)

    def count_evaluated_images(self, images: int) -> None:
        self.values.add("eval_images", images)

    def set_accuracies(self, top1: float, top5: float) -> None:
        """Set the newest validation accuracies, as fractions."""
        self._set(eval_top1_ratio=top1, eval_top5_ratio=top5, eval_last_timestamp_seconds=time())

    def take_interval(self) -> Interval:
        """Return the interval since the last call or the start, for the event log; call it on the training thread."""
        steps, images, start, phases = self._interval_start
        self._interval_start = (self._step_seconds.count, self._images, perf_counter(), self._clock.seconds())
        end_steps, end_images, end, end_phases = self._interval_start
        seconds = {name: end_phases[name] - phases[name] for name in PHASES}
        return Interval(end_steps - steps, end_images - images, end - start, seconds)

    def _copy_counters(self) -> None:
        values = self.values
        values.set("train_images", self._images)
        values.set("train_steps", self._step_seconds.count)
        values.set("train_model_flops", self._flops)
        for name, seconds in self._clock.seconds().items():  # a counter must not fall, even after a torn read
            values.set("train_phase_seconds", max(values.get("train_phase_seconds", name), seconds), name)

    def _set(self, **values: float | None) -> None:
        for name, value in values.items():
            if value is not None:
                self.values.set(name, value)


class EvaluationMetrics:
    """Metrics of one rank of an evaluation, in `registry`."""

    def __init__(self, registry: CollectorRegistry, *, rank: int, run: str) -> None:
        self._values = MetricRegistry(run=run, rank=str(rank))
        self._values.declare("eval_images")
        registry.register(self._values)

    def count_evaluated_images(self, images: int) -> None:
        self._values.add("eval_images", images)

    def set_accuracies(self, top1: float, top5: float) -> None:
        """Set the accuracies, as fractions, on rank 0."""
        self._values.set("eval_top1_ratio", top1)
        self._values.set("eval_top5_ratio", top5)
        self._values.set("eval_last_timestamp_seconds", time())


class ShardMetrics:
    """Metrics of a shard build (see data.sharding), in `registry`.

    Images and bytes are counted while a shard is packed, rejects when it is finished.
    """

    def __init__(self, registry: CollectorRegistry, *, run: str) -> None:
        self.values = MetricRegistry(run=run)
        self.values.declare(*SHARD_COUNTERS)
        self.values.on_collect(self._add_phase_seconds)
        self._running: tuple[BuildPhase, float] = ("other", perf_counter())
        self._lock = threading.Lock()
        self._packed: dict[str, PackProgress] = {}
        registry.register(self.values)

    def phase_started(self, name: BuildPhase) -> None:
        self._add_phase_seconds(name)

    def images_planned(self, split: str, images: int) -> None:
        self.values.set("shard_planned_images", images, split)

    def images_packed(self, split: str, progress: PackProgress) -> None:
        self._packed[split] = progress
        self.values.set("shard_images", progress.images - progress.rejects, split)
        self.values.set("shard_bytes", sum(packed.bytes_read for packed in self._packed.values()), "read")
        self.values.set("shard_bytes", sum(packed.bytes_written for packed in self._packed.values()), "written")

    def shard_finished(self, split: str, rejects: Mapping[str, int]) -> None:
        self.values.add("shard_shards")
        for reason, images in rejects.items():
            self.values.add("shard_rejects", images, reason)

    def _add_phase_seconds(self, name: BuildPhase | None = None) -> None:
        """Add the time so far to the current phase, and continue with `name` or the same phase."""
        with self._lock:
            now = perf_counter()
            phase, since = self._running
            self.values.add("shard_phase_seconds", now - since, phase)
            self._running = (name or phase, now)
