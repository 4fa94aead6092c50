"""Drills: fault to inject into the training, series and alerts that show it, and Podscale's own reaction."""

import errno
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

from podscale.errors import ExitCode
from podscale.monitoring.rule_files import ALERT_RULES, RULE_GROUPS, find_ranges, parse_milliseconds
from podscale.monitoring.rule_types import AlertRule
from tests.support.disk import fill
from tests.support.faults import slowed, stopped
from tests.system.drills.scene import HOST, RUN, Scene

ASIDE: Mapping[str, str] = {
    "PodscaleTrainingNotStarted": "its time for a start is shortened, and a start is not",
    "PodscaleGoodputLow": "its hour is shortened, and a start is not",
    "PodscaleThroughputRegressed": "the training is really slower, by the fault or by other load of the machine",
}
"""Alerts that may fire in any drill, and why."""


@dataclass(frozen=True)
class Expected:
    """Alert that must fire with these labels; `window` is the rule whose longest range has to fill first."""

    alert: str
    labels: Mapping[str, str] = field(default_factory=dict)
    window: str | None = None

    @property
    def rule(self) -> AlertRule:
        return next(alert for alert in ALERT_RULES if alert.name == self.alert)

    @property
    def window_seconds(self) -> float:
        """Window of the shipped rule; 0 if the condition holds at once."""
        if self.window is None:
            return 0.0
        exprs = [rule.expr for group in RULE_GROUPS for rule in group.rules if rule.name == self.window]
        return parse_milliseconds(find_ranges(exprs[0])[0]) / 1000

    @property
    def wait_seconds(self) -> float:
        return parse_milliseconds(self.rule.hold_for) / 1000


@dataclass(frozen=True)
class Drill:
    """One fault.

    Args:
        how: Description of the fault.
        series: Description of the series that `query` reads.
        inject: Injects the fault during the block; may yield its time.
        itself: Waits for Podscale's own reaction and describes it.
        besides: Other alerts that may fire, with the reason.
        restarts: Whether the training is launched again.
        resolves: Whether the alerts end soon after the fault.
        shorten: Divisor of the durations of the rules.
    """

    name: str
    how: str
    series: str
    query: str
    alerts: tuple[Expected, ...]
    inject: Callable[[Scene], AbstractContextManager[float | None]]
    itself: Callable[[Scene, float], str]
    besides: Mapping[str, str] = field(default_factory=dict)
    restarts: bool = False
    resolves: bool = True
    needs_disk: bool = False
    shorten: float = 40


def _slow_rank(scene: Scene) -> AbstractContextManager[None]:
    return slowed(scene.rank(1), still=0.06, going=0.03)


def _names_the_straggler(scene: Scene, since: float) -> str:
    scene.until(lambda: scene.records(since, "straggler"), "the log names the straggler")
    event = scene.records(since, "straggler")[0]
    assert (event["rank"], event["host"]) == (1, HOST), event
    return (
        f"logs rank {event['rank']} and its host after {event['time'] - since:.0f} s (event `straggler`: "
        f"busy {event['ratio']:.1f} times as long as the fastest)"
    )


@contextmanager
def _switched(scene: Scene, name: str) -> Iterator[None]:
    switch = scene.switches / name
    switch.touch()
    try:
        yield
    finally:
        switch.unlink()


def _counts_the_wait(scene: Scene, since: float) -> str:
    share = scene.value(f'sum(run_phase:podscale_train_phase:ratio_5m{{run="{RUN}", phase="data_wait"}})')
    assert share is not None
    assert not scene.records(since, "straggler"), "all ranks starve alike"
    return f"continues, and logs the fraction of waiting in every step line (data {share:.0%})"


def _masks_steps(scene: Scene, since: float) -> str:
    masked = len(scene.records(since, "skipped_update"))
    assert masked > 0
    loss = scene.value(f'podscale_train_loss{{run="{RUN}"}}')
    assert loss is not None
    assert loss == loss, "the weights are lost"
    return f"masks the step on all ranks (event `skipped_update`, {masked} so far) and continues; the loss stays finite"


def _stopped_endpoint(scene: Scene) -> AbstractContextManager[None]:
    return stopped(scene.command.stage())


def _trains_unseen(scene: Scene, since: float) -> str:
    before = scene.step
    scene.until(lambda: scene.step > before, "it trains on")
    return f"continues without scrapes: the log went from step {before} to {scene.step} in that time"


@contextmanager
def _nearly_full(scene: Scene) -> Iterator[None]:
    ballast = fill(scene.workspace, leave=0.03)
    try:
        yield
    finally:
        ballast.unlink()


def _saves_on(scene: Scene, since: float) -> str:
    scene.until(lambda: scene.records(since, "checkpoint"), "there is room for a checkpoint")
    return "continues to train and to save while space is left"


@contextmanager
def _full(scene: Scene) -> Iterator[None]:
    ballast = fill(scene.workspace)
    try:
        yield
    finally:
        ballast.unlink()


def _ends_with_the_next_save(scene: Scene, since: float) -> str:
    scene.until(lambda: scene.command.process.poll() is not None, "the run ends")
    seconds = time.time() - since
    ended = scene.command.end()
    assert ended.code == ExitCode.FAILED, ended.err
    assert os.strerror(errno.ENOSPC) in ended.last
    return (
        f"exits at the save after the failed one, after {seconds:.0f} s, with exit code {int(ExitCode.FAILED)} and the "
        "reason; the newest complete checkpoint is kept, and the same command resumed once space was free"
    )


def _paused_rank(scene: Scene) -> AbstractContextManager[None]:
    return stopped(scene.rank(1))


def _calls_it_a_hang(scene: Scene, since: float) -> str:
    scene.until(lambda: scene.records(since, "restart"), "the run is started again")
    event = scene.records(since, "restart")[0]
    assert event["cause"] == "hang", event
    assert re.search(r"rank 1 .*stopped \(process \d+ ", event["error"]), event
    assert f" on {HOST}" in event["error"], event
    return (
        f"detects the hang after {event['time'] - since:.0f} s (`launch.hang_seconds: 60`), reports that rank 1 is "
        f"stopped and its host, exits that launch with code {int(ExitCode.HANG)} and resumes from the newest checkpoint"
    )


@contextmanager
def _killed_three_times(scene: Scene) -> Iterator[float]:
    killed = [0]
    for _ in range(3):
        scene.until(lambda: scene.rank(1) not in (None, *killed), "there is a rank to kill")
        killed.append(scene.rank(1) or 0)
        since = time.time()
        os.kill(killed[-1], signal.SIGKILL)
        scene.until(lambda since=since: scene.records(since, "restart"), "the run is started again")
    yield since


def _starts_again(scene: Scene, since: float) -> str:
    events = [event for event in scene.records(0, "restart") if event["cause"] == "lost_rank"]
    assert all("rank 1 (process" in event["error"] and "SIGKILL" in event["error"] for event in events), events
    scene.until(lambda: scene.records(since, "resumed"), "it goes on")
    seconds = scene.records(since, "resumed")[0]["time"] - since
    return (
        "reports that rank 1 was killed by SIGKILL, restarts all ranks each time (`launch.max_restarts`) and resumes "
        f"from the newest checkpoint, {seconds:.0f} s after the last kill"
    )


_STANDS = "nothing is saved while nothing is trained; checkpoints of this training are seconds apart"
# The full volume comes last: it is predicted to fill again for as long as the rule looks back, and a drill after it
# would wait for that.
DRILLS = (
    Drill(
        "slowed rank",
        "rank 1 is stopped (SIGSTOP) for 60 of every 90 ms",
        "`run_rank:podscale_train_busy_seconds:rate5m`, rank 1 over rank 0",
        f'max(run_rank:podscale_train_busy_seconds:rate5m{{run="{RUN}", rank="1"}})'
        f' / max(run_rank:podscale_train_busy_seconds:rate5m{{run="{RUN}", rank="0"}})',
        (Expected("PodscaleStraggler", {"rank": "1"}, "run_rank:podscale_train_busy_seconds:rate5m"),),
        _slow_rank,
        _names_the_straggler,
    ),
    Drill(
        "starved loader",
        "on both ranks every batch is delayed by the length of a step",
        "`run:podscale_train_data_wait:ratio_5m`",
        f'run:podscale_train_data_wait:ratio_5m{{run="{RUN}"}}',
        (Expected("PodscaleDataStarved", {}, "run_rank:podscale_train_data_wait:ratio_5m"),),
        lambda scene: _switched(scene, "starved"),
        _counts_the_wait,
    ),
    Drill(
        "NaN on one rank",
        "every fourth gradient of rank 1 is NaN; its loss is finite",
        '`podscale_train_nonfinite_steps_total{kind="grad"}`, share of all steps',
        f'max(rate(podscale_train_nonfinite_steps_total{{run="{RUN}", kind="grad"}}[8s]))'
        f' / max(rate(podscale_train_steps_total{{run="{RUN}"}}[8s]))',
        (
            Expected("PodscaleStepsSkippedHigh", {}, "PodscaleStepsSkippedHigh"),
            Expected("PodscaleNonFiniteSteps", {"kind": "grad"}, "PodscaleNonFiniteSteps"),
        ),
        lambda scene: _switched(scene, "nonfinite-1"),
        _masks_steps,
    ),
    Drill(
        "lost scrape",
        "the process that serves the metrics is stopped (SIGSTOP), so scrapes time out; the ranks keep running",
        "`up`",
        "min(up)",
        (Expected("PodscaleMetricsAbsent"),),
        _stopped_endpoint,
        _trains_unseen,
    ),
    Drill(
        "volume nearly full",
        "the workspace, a tmpfs of 80 MiB, is filled until 3 % of it is free",
        '`run_volume:podscale_disk_free:ratio{volume="workspace"}`',
        f'run_volume:podscale_disk_free:ratio{{run="{RUN}", volume="workspace"}}',
        (Expected("PodscaleDiskFilling", {"volume": "workspace"}),),
        _nearly_full,
        _saves_on,
        needs_disk=True,
    ),
    Drill(
        "paused rank",
        "rank 1 is stopped (SIGSTOP) and not continued",
        "`time() - podscale_train_last_step_timestamp_seconds`, in seconds",
        f'time() - max(podscale_train_last_step_timestamp_seconds{{run="{RUN}"}})',
        (Expected("PodscaleTrainingStalled", {}, "PodscaleTrainingStalled"),),
        _paused_rank,
        _calls_it_a_hang,
        restarts=True,
        besides={"PodscaleCheckpointStale": _STANDS},
    ),
    Drill(
        "killed rank, three times",
        "rank 1 is killed (SIGKILL) in training, and twice more during start-up; counted from the third kill",
        "`podscale_train_launches_total`",
        f'run:podscale_train_launches:max{{run="{RUN}"}}',
        (Expected("PodscaleRestartLoop"),),
        _killed_three_times,
        _starts_again,
        restarts=True,
        besides={"PodscaleCheckpointStale": _STANDS},
        resolves=False,
        shorten=6,
    ),
    Drill(
        "failing checkpoint target",
        "the workspace, a tmpfs of 80 MiB, is filled to the last byte",
        '`podscale_train_checkpoint_failures_total{reason="disk_full"}`',
        f'sum(podscale_train_checkpoint_failures_total{{run="{RUN}", reason="disk_full"}})',
        (Expected("PodscaleCheckpointFailing", {"reason": "disk_full"}),),
        _full,
        _ends_with_the_next_save,
        restarts=True,
        besides={
            "PodscaleDiskFilling": "the volume is full",
            "PodscaleCheckpointStale": "nothing is saved",
            "PodscaleRestartLoop": "the drills before this one restarted the run",
        },
        needs_disk=True,
    ),
)
