"""What a training tells the outside: the metrics of its rank and, on rank 0, lines of metrics.jsonl.

It never waits for the device: losses come with the control words, after the fact.

How the code of an engine lets the phases of a step be measured.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from podscale.config import RunConfig
from podscale.distributed.progress_tracker import ProgressTracker
from podscale.distributed.rank_group import World
from podscale.distributed.step_status import StepStatus
from podscale.distributed.worker_env import launch_age
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
    """Passes on what happens; between two lines of the log it only counts.

    A step begins when its data is asked for; the rank is busy until it begins to wait for others. On a GPU phases are
    the host's times: queued work shows where the host first waits for it.
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
        """Seconds of an update before this rank begins to wait for others, on average over the interval so far."""
        return self._busy_time.mean

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Books the time inside on a phase (names in telemetry.phases)."""
        self._progress_tracker.enter_phase(name)
        if self._goodput_tracker is not None:
            self._goodput_tracker.enter_phase(name)
        if name == "data_wait":
            self._step_started = time.perf_counter()
        elif name == "allreduce_wait":
            self.wait_started()
        return self._metrics.phase(name)

    def wait_started(self) -> None:
        """From now on this rank waits for its devices or for others, until it asks for data again."""
        self._busy_time.add(time.perf_counter() - self._step_started)

    def subphase(self, name: str) -> AbstractContextManager[None]:
        """A phase that is part of a larger one and counted there; a sign of progress all the same."""
        self._progress_tracker.touch()
        return nullcontext()

    def restore_started(self) -> None:
        """Looks for a state to continue from, until `started`."""
        if self._goodput_tracker is not None:
            self._goodput_tracker.enter_restore()

    def started(
        self, *, resumed: bool, step: int, total_steps: int, ranks: int, global_batch: int, **more: Any
    ) -> None:
        """The training begins after `step` updates; its first image has not been read yet."""
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
        if self._mlperf is not None and step < total_steps:  # else all was done before, and its log is complete
            wanted = {name: more[name] for name in ("device", "train_images", "validation_images")}
            self._mlperf.run_start(resumed=resumed, step=step, ranks=ranks, **wanted)

    def step_done(self, step: int, images: int, bad_records: int, *, steps: int = 1) -> None:
        """Ends update `step`, to which this rank brought `images`; so far `bad_records` of its own were substituted.

        steps: carried out since data was asked for, of as many images each; all but the last have no line in the log.
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
        """Counts an update once it is known how it went; logs every `log_every`-th and the last."""
        if not status.is_finite:
            self._metrics.count_skipped()
            self._metrics.count_nonfinite("grad" if math.isfinite(status.loss) else "loss")
            self.log_event("skipped_update", step=status.step)
        if self.stragglers is not None and status.step % self._interval_steps == 0 and status.fastest_milliseconds > 0:
            found = RankComparison(status.slowest_rank, status.slowest_milliseconds, status.fastest_milliseconds)
            self.stragglers.interval_done(status.step, found)
        lap = self._intervals.pop(status.step, None)
        if lap is None or self._log is None:
            return
        training = lap.seconds - lap.phases["evaluation"] - lap.phases["checkpoint"]
        norm = status.grad_norm if status.is_finite else None
        self._metrics.set_state(epoch=epoch, loss=status.loss, learning_rate=learning_rate, grad_norm=norm)
        self._log.step(
            status.step,
            epoch=epoch,
            loss=status.loss,
            learning_rate=learning_rate,
            images_per_second=lap.images * self._ranks / max(training, 1e-9),
            phases=lap.phases,
            slowest={"rank": status.slowest_rank, "milliseconds": status.slowest_milliseconds},
        )

    def add_gauges(self, meters: Callable[[TrainMetrics], None]) -> None:
        """Has `meters` set up what the metrics look up by themselves whenever they are written."""
        meters(self._metrics)

    def set_flops_per_image(self, flops: float) -> None:
        """What the model costs for each image from here on, forward and backward."""
        self._metrics.set_flops_per_image(flops)

    def count_evaluated_images(self, images: int) -> None:
        """Counts images of this rank in an evaluation."""
        self._metrics.count_evaluated_images(images)

    def evaluation_started(self, step: int) -> None:
        """An evaluation begins after `step` updates, all of which are done."""
        if self._mlperf is not None:
            self._mlperf.evaluation_started(step)

    def phases_sampled(self, seconds: dict[str, float]) -> None:
        """Takes the times on the device of one update's phases: what a replayed CUDA graph does not tell."""
        self._metrics.set_sampled_phases(seconds)
        self._busy_time.set_device_seconds(seconds.get("forward_backward", 0.0))
        self.log_event("sampled", **{f"{name}_seconds": round(value, 6) for name, value in seconds.items()})

    def evaluated(self, step: int, found: EvaluationResult, *, epoch: float, target_reached: bool = False) -> None:
        """Reports an evaluation, and whether it ends the run."""
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
        """Reports what those weights achieved which are not the model (evaluate.weights)."""
        figures = {"top1": found.top1, "top5": found.top5, "loss": found.loss}
        self.log_event("evaluated_beside", weights=weights, step=step, epoch=round(epoch, 4), **figures)

    def all_reduce_chosen(self, facts: Mapping[str, str], *, kept: bool) -> None:
        """Reports what `all_reduce.algorithm: auto` came to; kept: from an earlier launch of this run."""
        self._metrics.set_all_reduce_info(facts)
        self.log_event("all_reduce", kept=kept, **facts)

    def checkpoint_reported(self, report: CheckpointReport) -> None:
        """Reports what became of a checkpoint; from the writer's thread."""
        match report:
            case Saved():
                self._metrics.checkpoint_saved(report.seconds, report.bytes)
                self.log_event("checkpoint", step=report.step, bytes=report.bytes, seconds=round(report.seconds, 3))
            case Restored():
                self._metrics.checkpoint_restored(report.seconds)
            case Failed():
                # no line in the log, which may stand on the same full disk
                self._metrics.checkpoint_failed("disk_full" if report.disk_full else "other")
            case _:
                self.log_event("checkpoint_passed", step=report.step, reason=report.reason)

    def finished(self, step: int, **values: Any) -> None:
        """The training is done after `step` updates, and its model is written."""
        self._set_progress(completed=step, done=True)
        self._log_goodput()
        self.log_event("done", step=step, **values)

    def preempted(self, step: int) -> None:
        """All ranks end on request, and the state after `step` updates is saved."""
        self._log_goodput()
        self.log_event("preempted", step=step)

    def _set_progress(self, *, planned: int | None = None, completed: int, done: bool | None = None) -> None:
        """Rank 0 alone tells how far the run is."""
        if self._log is not None:
            self._metrics.set_progress(planned=planned, completed=completed, done=done)

    def _log_goodput(self) -> None:
        """Where the time of the run went until now."""
        if self._goodput_tracker is not None:
            self.log_event("goodput", **self._goodput_tracker.state().summary())

    def log_event(self, event: str, **values: Any) -> None:
        """Something that happens rarely."""
        if self._log is not None:
            self._log.event(event, **values)


@contextmanager
def open_training_logger(
    config: RunConfig,
    world: World,
    run: RunDirectory,
    rank_directory: Path,
    fence: Callable[[], None] | None,
    progress_tracker: ProgressTracker | None = None,
) -> Iterator[TrainingLogger]:
    """The monitor of one rank; its metrics are written beside training until the end of the block."""
    registry = CollectorRegistry()
    info = {
        "model": config.model.name,
        "precision": config.train.precision,
        "optimizer": config.train.optimizer.name,
        "engine": config.train.engine,
    }
    metrics = TrainMetrics(registry, rank=world.rank, run=config.run.id, info=info)
    busy = BusyTime()
    ledger = open_goodput_tracker(run) if world.is_rank0 else None
    log = EventLog(run.metrics, fence) if world.is_rank0 else None
    mlperf = MlperfLog(run.mlperf, config, fence) if world.is_rank0 and config.telemetry.mlperf_log else None
    monitor = TrainingLogger(
        metrics,
        log,
        log_every=config.telemetry.log_every,
        mlperf=mlperf,
        progress_tracker=progress_tracker,
        goodput_tracker=ledger,
        busy=busy,
        hosts=world.hosts(),
    )
    limit = progress_tracker.hang_limit if progress_tracker is not None else None
    sources: tuple[SampleSource | None, ...] = (busy, limit, monitor.stragglers, ledger)
    for source in filter(None, sources):
        metrics.values.add_source(source)
    try:
        with (
            SnapshotWriter(registry, snapshot_path(rank_directory, world.rank)),
            keep_goodput_file(ledger, run.goodput, fence),
        ):
            yield monitor
    finally:
        if mlperf is not None:
            mlperf.close()
        if log is not None:
            log.close()


def open_goodput_tracker(run: RunDirectory) -> GoodputTracker:
    """The ledger of this life, on top of what is known of those before."""
    found = read_goodput_state(run.goodput)
    return GoodputTracker(after_join(found, time.time(), launch_age(), newest_step(run.metrics)))


@contextmanager
def keep_goodput_file(tracker: GoodputTracker | None, path: Path, fence: Callable[[], None] | None) -> Iterator[None]:
    """Writes heartbeats until the end of the block, the last of which says how it ended, where that is known here."""
    if tracker is None:
        yield
        return
    heartbeat = GoodputWriter(tracker, path, fence)
    ended = ""
    try:
        yield
        ended = "done"
    except Preempted:
        ended = "preempted"
        raise
    finally:
        heartbeat.close(ended)


PhaseTimer = Callable[[str], AbstractContextManager[None]]
"""Measures one phase of a step by name."""


def untimed(name: str) -> AbstractContextManager[None]:
    """The Phase of those who do not measure, or count a larger one."""
    return nullcontext()
