"""Metrics and event log of one rank's training, and the files that they are written to.

Every rank counts in its Prometheus metrics; rank 0 also writes the event log metrics.jsonl, the MLPerf log and the
state of goodput. The logger never waits for the device: losses arrive with the step statuses, some steps later.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from podscale.config.batch_phases import BatchPhase
from podscale.distributed.progress_tracker import ProgressTracker
from podscale.distributed.rank_group import World
from podscale.distributed.step_status import StepStatus
from podscale.distributed.worker_env import WorkerEnv
from podscale.errors import Preempted
from podscale.runs import RunDirectory
from podscale.runs.checkpoint import CheckpointReport, Failed, Restored, Saved
from podscale.runs.job_start import read_job_start
from podscale.telemetry.events import EventLog, newest_step
from podscale.telemetry.goodput import GoodputTracker, GoodputWriter, after_join, read_goodput_state
from podscale.telemetry.metrics import TrainMetrics
from podscale.telemetry.mlperf_log import MlperfLog
from podscale.telemetry.phases import RankComparison, StragglerDetector
from podscale.telemetry.registry import SampleSource, SnapshotWriter, snapshot_path
from podscale.training.run_progress import EvaluationResult
from podscale.training.startup_report import StartupReport
from podscale.training.step_timer import StepTimer


class TrainingLogger:
    """Logger and counter of one rank's training events. Between two log lines it only counts."""

    def __init__(
        self,
        timer: StepTimer,
        log: EventLog | None = None,
        mlperf: MlperfLog | None = None,
        hosts: Sequence[str] = (),
        startup: StartupReport | None = None,
    ) -> None:
        """Log with the timer's metrics.

        Args:
            log: None except on rank 0.
            hosts: Hosts of the ranks; without them, no stragglers are detected.
            startup: Report of the start of this launch; None except on rank 0.
        """
        self.timer, self.metrics = timer, timer.metrics
        self._log, self._mlperf, self._startup = log, mlperf, startup
        self.stragglers = StragglerDetector(hosts, self.log_event) if hosts and log is not None else None
        self._ranks, self._bad_records = 1, 0
        self._images_left: Callable[[int], int] | None = None
        self.choices: dict[str, dict[str, str]] = {}
        """Facts of the choices that this launch made by measurements, by the name of their event."""

    def restore_started(self) -> None:
        """Record that the trainer is built, and looks for a checkpoint."""
        self.timer.restore_started()
        if self._startup is not None:
            self._startup.build_done()

    def started(
        self,
        *,
        resumed: bool,
        step: int,
        total_steps: int,
        ranks: int,
        global_batch: int,
        images_left: Callable[[int], int] | None = None,
        **more: Any,
    ) -> None:
        """Log the start or resumption of training at `step`, before the first image is read.

        Args:
            images_left: returns the images that are left to train on after a step.
        """
        self._ranks, self._images_left = ranks, images_left
        self.timer.start(step, total_steps)
        self.metrics.set_world(ranks)
        self.metrics.set_global_batch(global_batch)
        self._set_progress(planned=total_steps, completed=step, done=False)
        described = {"step": step, "total_steps": total_steps, "ranks": ranks, "global_batch": global_batch}
        self.log_event("resumed" if resumed else "start", **described, **more)
        if self._mlperf is not None and step < total_steps:  # else the run was complete, and so is its log
            facts = {name: more[name] for name in ("device", "train_images", "validation_images")}
            self._mlperf.run_start(resumed=resumed, step=step, ranks=ranks, **facts)

    def batch_changed(self, step: int, phase: BatchPhase, *, epoch: float) -> None:
        """Log that the steps after `step` have another global batch or accumulation; their first may compile."""
        self.timer.batch_changed()
        self.metrics.set_global_batch(phase.global_batch)
        batch, accumulation = phase.global_batch, phase.accumulation
        self.log_event("batch", step=step, epoch=round(epoch, 4), global_batch=batch, accumulation=accumulation)

    def step_done(self, step: int, images: int, bad_records: int, *, steps: int = 1) -> None:
        """Count `steps` steps up to `step`, of `images` images of this rank each. Only the last one gets a log line.

        `bad_records` counts the records of this rank that were substituted so far.
        """
        self.timer.step_done(step, images, steps)
        self._set_progress(completed=step)
        self._log_startup()
        if bad_records > self._bad_records:
            self._bad_records = bad_records
            self.metrics.set_bad_samples(bad_records)
            self.log_event("bad_record", substituted=bad_records)

    def log_status(self, status: StepStatus, *, epoch: float, learning_rate: float) -> None:
        """Count a step when its status is known. Logs every `log_every`-th step and the last one."""
        if not status.is_finite:
            self.metrics.count_skipped()
            self.metrics.count_nonfinite("grad" if math.isfinite(status.loss) else "loss")
            self.log_event("skipped_update", step=status.step)
        is_compared = self.timer.completes_interval(status.step) and status.fastest_milliseconds > 0
        if self.stragglers is not None and is_compared:
            comparison = RankComparison(status.slowest_rank, status.slowest_milliseconds, status.fastest_milliseconds)
            self.stragglers.interval_done(status.step, comparison)
        interval = self.timer.pop_interval(status.step)
        if interval is None or self._log is None:
            return
        training_seconds = interval.seconds - interval.phases["evaluation"] - interval.phases["checkpoint"]
        grad_norm = status.grad_norm if status.is_finite else None
        self.metrics.set_state(epoch=epoch, loss=status.loss, learning_rate=learning_rate, grad_norm=grad_norm)
        self._log.step(
            status.step,
            epoch=epoch,
            loss=status.loss,
            learning_rate=learning_rate,
            images_per_second=interval.images * self._ranks / max(training_seconds, 1e-9),
            phases=interval.phases,
            slowest={"rank": status.slowest_rank, "milliseconds": status.slowest_milliseconds},
        )

    def evaluation_started(self, step: int) -> None:
        if self._mlperf is not None:
            self._mlperf.evaluation_started(step)

    def phases_sampled(self, seconds: dict[str, float]) -> None:
        """Record the device times of one step's phases, seconds, which a replayed CUDA graph cannot report."""
        self.metrics.set_sampled_phases(seconds)
        self.timer.busy_time.set_device_seconds(seconds.get("forward_backward", 0.0))
        self.log_event("sampled", **{f"{name}_seconds": round(value, 6) for name, value in seconds.items()})

    def evaluated(self, step: int, result: EvaluationResult, *, epoch: float, target_reached: bool = False) -> None:
        """Log an evaluation of the model and, if it ended the run, that the target is reached."""
        if self._mlperf is not None:
            self._mlperf.evaluated(step, result.top1, target_reached=target_reached)
        if self._log is None:
            return
        self.metrics.set_accuracies(result.top1, result.top5)
        speed = round(result.images / max(result.seconds, 1e-9), 2)
        self._log.evaluation(step, epoch=epoch, **result.scores, images_per_second=speed)
        if target_reached:
            self.log_event("target_reached", step=step, epoch=round(epoch, 4), top1=result.top1)

    def evaluated_other_weights(self, step: int, weights: str, result: EvaluationResult, *, epoch: float) -> None:
        """Log an evaluation of the weights that are not the model (see `evaluate.weights`)."""
        self.log_event("evaluated_beside", weights=weights, step=step, epoch=round(epoch, 4), **result.scores)

    def all_reduce_chosen(self, facts: Mapping[str, str], *, kept: bool) -> None:
        """Log the choice of `all_reduce.algorithm: auto`; `kept` if an earlier launch of this run made it."""
        self.metrics.set_all_reduce_info(facts)
        self._log_choice("all_reduce", facts, kept=kept)

    def fused_kernels_chosen(self, facts: Mapping[str, str], *, kept: bool) -> None:
        """Log the choice of `fused_kernels: auto`; `kept` if an earlier launch of this run made it."""
        self._log_choice("fused_kernels", facts, kept=kept)

    def gemm_loads_chosen(self, facts: Mapping[str, str]) -> None:
        """Log how the kernels of 1x1 convolutions load their tiles; every launch chooses again, on each rank."""
        self._log_choice("gemm_loads", facts)

    def _log_choice(self, event: str, facts: Mapping[str, str], **values: Any) -> None:
        self.choices[event] = dict(facts)
        self.log_event(event, **values, **facts)

    def checkpoint_reported(self, report: CheckpointReport) -> None:
        """Log the outcome of a checkpoint. Called from the writer's thread."""
        match report:
            case Saved():
                self.metrics.checkpoint_saved(report.seconds, report.bytes)
                self.log_event("checkpoint", step=report.step, bytes=report.bytes, seconds=round(report.seconds, 3))
            case Restored():
                self.metrics.checkpoint_restored(report.seconds)
            case Failed():
                # no log line: the log may be on the same full disk
                self.metrics.checkpoint_failed("disk_full" if report.disk_full else "other")
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
            left = self._images_left(completed) if self._images_left is not None else None
            self.metrics.set_progress(planned=planned, completed=completed, images_left=left, done=done)

    def _log_startup(self) -> None:
        """Log the start of this launch, after its first step."""
        if self._startup is not None and not self._startup.seconds:
            self._startup.first_step_done()
            parts = {part: round(seconds, 3) for part, seconds in self._startup.seconds.items()}
            self.log_event("startup", seconds=round(sum(self._startup.seconds.values()), 3), parts=parts)

    def _log_goodput(self) -> None:
        """Log the run's wall time by category so far."""
        if self.timer.goodput_tracker is not None:
            self.log_event("goodput", **self.timer.goodput_tracker.state().summary())

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
    registry, train, fence = CollectorRegistry(), config.train, worker_env.fence(run)
    info = {
        "model": config.model.name,
        "precision": train.precision,
        "optimizer": train.optimizer.name,
        "engine": train.engine,
    }
    metrics = TrainMetrics(registry, rank=world.rank, run=config.run.id, info=info)
    goodput_tracker = open_goodput_tracker(run, worker_env.startup.age()) if world.is_rank0 else None
    timer = StepTimer(metrics, config.telemetry.log_every, progress_tracker, goodput_tracker)
    with ExitStack() as stack:
        log = stack.enter_context(EventLog(run.metrics, fence)) if world.is_rank0 else None
        mlperf = MlperfLog(run.mlperf, config, fence) if world.is_rank0 and config.telemetry.mlperf_log else None
        if mlperf is not None:
            stack.callback(mlperf.close)
        startup = None
        if goodput_tracker is not None:
            startup = StartupReport(worker_env.startup, goodput_tracker, partial(read_job_start, run))
        logger = TrainingLogger(timer, log, mlperf, world.hosts(), startup)
        hang_limit = progress_tracker.hang_limit if progress_tracker is not None else None
        sources: list[SampleSource | None] = [timer.busy_time, hang_limit, logger.stragglers]
        for source in filter(None, [*sources, goodput_tracker, startup]):
            metrics.values.add_source(source)
        stack.enter_context(SnapshotWriter(registry, snapshot_path(worker_env.rank_directory, world.rank)))
        if goodput_tracker is not None:
            stack.enter_context(keep_goodput_file(goodput_tracker, run.goodput, fence))
        yield logger


def open_goodput_tracker(run: RunDirectory, launch_age: float) -> GoodputTracker:
    """Return the goodput tracker of a launch that began `launch_age` seconds ago; it continues the state before."""
    state = read_goodput_state(run.goodput)
    return GoodputTracker(after_join(state, time.time(), launch_age, newest_step(run.metrics)))


@contextmanager
def keep_goodput_file(tracker: GoodputTracker, path: Path, fence: Callable[[], None] | None) -> Iterator[None]:
    """Write goodput heartbeats until the block ends. The last one records the outcome, if it is known here."""
    writer = GoodputWriter(tracker, path, fence)
    outcome = ""
    try:
        yield
        outcome = "done"
    except Preempted:
        outcome = "preempted"
        raise
    finally:
        writer.close(outcome)
