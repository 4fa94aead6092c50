"""Metrics, event log and phase timing of one rank's training.

Every rank writes its Prometheus metrics; rank 0 also writes the lines of metrics.jsonl. The logger never waits for the
device: losses arrive with the step statuses, some steps later.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from podscale.distributed.progress_tracker import ProgressTracker
from podscale.distributed.rank_group import World
from podscale.distributed.step_status import StepStatus
from podscale.distributed.worker_env import WorkerEnv
from podscale.errors import Preempted
from podscale.runs import RunDirectory
from podscale.runs.checkpoint import CheckpointReport, Failed, Restored, Saved
from podscale.telemetry.events import EventLog, newest_step
from podscale.telemetry.goodput import GoodputTracker, GoodputWriter, after_join, read_goodput_state
from podscale.telemetry.metrics import Interval, TrainMetrics
from podscale.telemetry.mlperf_log import MlperfLog
from podscale.telemetry.phases import BusyTime, RankComparison, StragglerDetector, interval_steps
from podscale.telemetry.registry import SampleSource, SnapshotWriter, snapshot_path
from podscale.training.run_progress import EvaluationResult


class TrainingLogger:
    """Log and count training events of one rank. Between two log lines it only counts.

    A step begins when its data is requested. The rank counts as busy until it waits for other ranks. On a GPU, phases
    are host times: queued work shows up in the phase in which the host first waits for it.
    """

    def __init__(
        self,
        metrics: TrainMetrics,
        log: EventLog | None,
        *,
        log_every: int,
        mlperf: MlperfLog | None = None,
        progress_tracker: ProgressTracker | None = None,
        goodput_tracker: GoodputTracker | None = None,
        busy: BusyTime | None = None,
        hosts: Sequence[str] = (),
    ) -> None:
        self._goodput_tracker = goodput_tracker
        self._busy_time = busy or BusyTime()
        self.stragglers = StragglerDetector(hosts, self.log_event) if hosts and log is not None else None
        self._metrics, self._log, self._log_every, self._mlperf = metrics, log, log_every, mlperf
        self._progress_tracker = progress_tracker or ProgressTracker()
        self._step_started = time.perf_counter()
        self._last_step, self._ranks = 0, 1
        self._intervals: dict[int, Interval] = {}
        self._bad_records = 0
        self._interval_steps = interval_steps(log_every)

    @property
    def busy_seconds(self) -> float:
        """Mean busy time per step of this interval so far, seconds: before this rank waits for others."""
        return self._busy_time.mean

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time a block as one phase of the step (names: `telemetry.phases`)."""
        self._progress_tracker.enter_phase(name)
        if self._goodput_tracker is not None:
            self._goodput_tracker.enter_phase(name)
        if name == "data_wait":
            self._step_started = time.perf_counter()
        elif name == "allreduce_wait":
            self.wait_started()
        return self._metrics.phase(name)

    def wait_started(self) -> None:
        """Mark the end of this step's busy time: the rank waits for its devices or for other ranks."""
        self._busy_time.add(time.perf_counter() - self._step_started)

    def subphase(self, name: str) -> AbstractContextManager[None]:
        """Time nothing, but record progress: the time is counted in an enclosing phase."""
        self._progress_tracker.touch()
        return nullcontext()

    def restore_started(self) -> None:
        """Count the time until `started` as restore time."""
        if self._goodput_tracker is not None:
            self._goodput_tracker.enter_restore()

    def started(
        self, *, resumed: bool, step: int, total_steps: int, ranks: int, global_batch: int, **more: Any
    ) -> None:
        """Log the start or resumption of training at `step`, before the first image is read."""
        self._last_step, self._ranks = total_steps, ranks
        self._progress_tracker.start(step)
        if self._goodput_tracker is not None:
            self._goodput_tracker.start(step)
        self._metrics.set_world(ranks, global_batch)
        self._set_progress(planned=total_steps, completed=step, done=False)
        self._metrics.take_interval()
        self.log_event(
            "resumed" if resumed else "start",
            step=step,
            total_steps=total_steps,
            ranks=ranks,
            global_batch=global_batch,
            **more,
        )
        if self._mlperf is not None and step < total_steps:  # else the run was complete, and so is its log
            wanted = {name: more[name] for name in ("device", "train_images", "validation_images")}
            self._mlperf.run_start(resumed=resumed, step=step, ranks=ranks, **wanted)

    def step_done(self, step: int, images: int, bad_records: int, *, steps: int = 1) -> None:
        """Count a finished step.

        Args:
            step: number of the step, from 1.
            images: images of this rank in the step.
            bad_records: records of this rank that were substituted so far.
            steps: steps since data was requested, of `images` each. Only the last of them gets a log line.
        """
        seconds = (time.perf_counter() - self._step_started) / steps
        self._progress_tracker.step_done(step, seconds)
        if self._goodput_tracker is not None:
            self._goodput_tracker.step_done(step)
        for _ in range(steps):
            self._metrics.count_step(images, seconds)
        self._set_progress(completed=step)
        if bad_records > self._bad_records:
            self._bad_records = bad_records
            self._metrics.set_bad_samples(bad_records)
            self.log_event("bad_record", substituted=bad_records)
        if step % self._interval_steps == 0:
            self._busy_time.next_interval()
        if step % self._log_every == 0 or step == self._last_step:
            self._intervals[step] = self._metrics.take_interval()

    def log_status(self, status: StepStatus, *, epoch: float, learning_rate: float) -> None:
        """Count a step when its status is known. Logs every `log_every`-th step and the last one."""
        if not status.is_finite:
            self._metrics.count_skipped()
            self._metrics.count_nonfinite("grad" if math.isfinite(status.loss) else "loss")
            self.log_event("skipped_update", step=status.step)
        if self.stragglers is not None and status.step % self._interval_steps == 0 and status.fastest_milliseconds > 0:
            comparison = RankComparison(status.slowest_rank, status.slowest_milliseconds, status.fastest_milliseconds)
            self.stragglers.interval_done(status.step, comparison)
        interval = self._intervals.pop(status.step, None)
        if interval is None or self._log is None:
            return
        training_seconds = interval.seconds - interval.phases["evaluation"] - interval.phases["checkpoint"]
        grad_norm = status.grad_norm if status.is_finite else None
        self._metrics.set_state(epoch=epoch, loss=status.loss, learning_rate=learning_rate, grad_norm=grad_norm)
        self._log.step(
            status.step,
            epoch=epoch,
            loss=status.loss,
            learning_rate=learning_rate,
            images_per_second=interval.images * self._ranks / max(training_seconds, 1e-9),
            phases=interval.phases,
            slowest={"rank": status.slowest_rank, "milliseconds": status.slowest_milliseconds},
        )

    def add_gauges(self, meters: Callable[[TrainMetrics], None]) -> None:
        """Call `meters` with the metrics, to register values that are read at each collection."""
        meters(self._metrics)

    def set_flops_per_image(self, flops: float) -> None:
        """Set the FLOPs per image, forward and backward, from this step on."""
        self._metrics.set_flops_per_image(flops)

    def count_evaluated_images(self, images: int) -> None:
        """Count this rank's images in an evaluation."""
        self._metrics.count_evaluated_images(images)

    def evaluation_started(self, step: int) -> None:
        """Log the start of an evaluation after `step`."""
        if self._mlperf is not None:
            self._mlperf.evaluation_started(step)

    def phases_sampled(self, seconds: dict[str, float]) -> None:
        """Record the device times of one step's phases, seconds, which a replayed CUDA graph cannot report."""
        self._metrics.set_sampled_phases(seconds)
        self._busy_time.set_device_seconds(seconds.get("forward_backward", 0.0))
        self.log_event("sampled", **{f"{name}_seconds": round(value, 6) for name, value in seconds.items()})

    def evaluated(self, step: int, found: EvaluationResult, *, epoch: float, target_reached: bool = False) -> None:
        """Log an evaluation of the model and, if it ended the run, that the target is reached."""
        if self._mlperf is not None:
            self._mlperf.evaluated(step, found.top1, target_reached=target_reached)
        if self._log is None:
            return
        self._metrics.set_accuracies(found.top1, found.top5)
        self._log.evaluation(
            step,
            epoch=epoch,
            top1=found.top1,
            top5=found.top5,
            loss=found.loss,
            images_per_second=round(found.images / max(found.seconds, 1e-9), 2),
        )
        if target_reached:
            self.log_event("target_reached", step=step, epoch=round(epoch, 4), top1=found.top1)

    def evaluated_other_weights(self, step: int, weights: str, found: EvaluationResult, *, epoch: float) -> None:
        """Log an evaluation of the weights that are not the model (see `evaluate.weights`)."""
        figures = {"top1": found.top1, "top5": found.top5, "loss": found.loss}
        self.log_event("evaluated_beside", weights=weights, step=step, epoch=round(epoch, 4), **figures)

    def all_reduce_chosen(self, facts: Mapping[str, str], *, kept: bool) -> None:
        """Log the choice of `all_reduce.algorithm: auto`.

        Args:
            facts: labels of the choice.
            kept: the choice was made by an earlier launch of this run.
        """
        self._metrics.set_all_reduce_info(facts)
        self.log_event("all_reduce", kept=kept, **facts)

    def checkpoint_reported(self, report: CheckpointReport) -> None:
        """Log the outcome of a checkpoint. Called from the writer's thread."""
        match report:
            case Saved():
                self._metrics.checkpoint_saved(report.seconds, report.bytes)
                self.log_event("checkpoint", step=report.step, bytes=report.bytes, seconds=round(report.seconds, 3))
            case Restored():
                self._metrics.checkpoint_restored(report.seconds)
            case Failed():
                # no log line: the log may be on the same full disk
                self._metrics.checkpoint_failed("disk_full" if report.disk_full else "other")
            case _:
                self.log_event("checkpoint_passed", step=report.step, reason=report.reason)

    def finished(self, step: int, **values: Any) -> None:
        """Log the end of the training, once its model is written."""
        self._set_progress(completed=step, done=True)
        self._log_goodput()
        self.log_event("done", step=step, **values)

    def preempted(self, step: int) -> None:
        """Log a stop on request, once the state after `step` is saved."""
        self._log_goodput()
        self.log_event("preempted", step=step)

    def _set_progress(self, *, planned: int | None = None, completed: int, done: bool | None = None) -> None:
        """Set the run's progress metrics, on rank 0 only."""
        if self._log is not None:
            self._metrics.set_progress(planned=planned, completed=completed, done=done)

    def _log_goodput(self) -> None:
        """Log how the run's wall time was spent so far."""
        if self._goodput_tracker is not None:
            self.log_event("goodput", **self._goodput_tracker.state().summary())

    def log_event(self, event: str, **values: Any) -> None:
        """Write one event to the log, on rank 0."""
        if self._log is not None:
            self._log.event(event, **values)


@contextmanager
def open_training_logger(
    worker_env: WorkerEnv, world: World, progress_tracker: ProgressTracker | None = None
) -> Iterator[TrainingLogger]:
    """Open the training logger of one rank. Its metrics are written in the background until the block ends."""
    config, run = worker_env.config, RunDirectory.for_config(worker_env.config)
    fence = worker_env.fence(run)
    registry = CollectorRegistry()
    info = {
        "model": config.model.name,
        "precision": config.train.precision,
        "optimizer": config.train.optimizer.name,
        "engine": config.train.engine,
    }
    metrics = TrainMetrics(registry, rank=world.rank, run=config.run.id, info=info)
    busy = BusyTime()
    goodput = open_goodput_tracker(run, worker_env.launch_age()) if world.is_rank0 else None
    log = EventLog(run.metrics, fence) if world.is_rank0 else None
    mlperf = MlperfLog(run.mlperf, config, fence) if world.is_rank0 and config.telemetry.mlperf_log else None
    logger = TrainingLogger(
        metrics,
        log,
        log_every=config.telemetry.log_every,
        mlperf=mlperf,
        progress_tracker=progress_tracker,
        goodput_tracker=goodput,
        busy=busy,
        hosts=world.hosts(),
    )
    limit = progress_tracker.hang_limit if progress_tracker is not None else None
    sources: tuple[SampleSource | None, ...] = (busy, limit, logger.stragglers, goodput)
    for source in filter(None, sources):
        metrics.values.add_source(source)
    try:
        with (
            SnapshotWriter(registry, snapshot_path(worker_env.rank_directory, world.rank)),
            keep_goodput_file(goodput, run.goodput, fence),
        ):
            yield logger
    finally:
        if mlperf is not None:
            mlperf.close()
        if log is not None:
            log.close()


def open_goodput_tracker(run: RunDirectory, launch_age: float) -> GoodputTracker:
    """Return the goodput tracker of a launch that began `launch_age` seconds ago; it continues the state before."""
    state = read_goodput_state(run.goodput)
    return GoodputTracker(after_join(state, time.time(), launch_age, newest_step(run.metrics)))


@contextmanager
def keep_goodput_file(tracker: GoodputTracker | None, path: Path, fence: Callable[[], None] | None) -> Iterator[None]:
    """Write goodput heartbeats until the block ends. The last one records the outcome, if it is known here."""
    if tracker is None:
        yield
        return
    heartbeat = GoodputWriter(tracker, path, fence)
    outcome = ""
    try:
        yield
        outcome = "done"
    except Preempted:
        outcome = "preempted"
        raise
    finally:
        heartbeat.close(outcome)


PhaseTimer = Callable[[str], AbstractContextManager[None]]
"""Context manager that times one phase of a step, by name."""


def untimed(name: str) -> AbstractContextManager[None]:
    """Phase timer that measures nothing."""
    return nullcontext()
