"""Runs cells, some at a time, each in processes of its own, and keeps a record of each as it ends.

A cell that diverges is a result. One that an accident ended has no record: the study goes on without it, says so at
its end, and the same command runs it again. A stop request is passed on; trainings save and continue next time.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from podscale.config import RunConfig, data_fingerprint
from podscale.config.preflight import preflight
from podscale.errors import ExitCode, InputError, PodscaleError
from podscale.runs import RunDirectory, read_outcomes
from podscale.stages import local
from podscale.study.budget import TrialCosts
from podscale.study.grid import SweepSeries, Trial, TrialGrid
from podscale.study.records import RecordStore, TrialRecord
from podscale.study.trial import build_record, read_trial_history, trial_outcome
from podscale.util.files import write_atomically

POLL_SECONDS = 0.05
MAX_CONSECUTIVE_FAILURES = 3
"""So many cells that fail one after the other, none of them by diverging, end a study: something else is wrong."""

TrialCallback = Callable[[Trial, TrialRecord | None, str], None]
"""Called as a cell ends: its record, or none and why."""


@dataclass
class RunningTrial:
    """A cell at work."""

    trial: Trial
    process: "subprocess.Popen[bytes]"
    log: Path
    started: float
    is_fresh: bool
    """Not continued from an earlier launch, so that its time is that of the whole cell."""


@dataclass
class StudyRunner:
    """The cells of a study in the workspace of its run document.

    jobs: cells at a time. time_box_seconds: seconds after which no cell is to be at work. series: the part of the grid
    to run.
    """

    grid: TrialGrid
    records: RecordStore
    jobs: int
    time_box_seconds: float | None = None
    series: Sequence[SweepSeries] | None = None
    keep_runs: bool = False
    on_trial_end: TrialCallback = lambda cell, record, error: None
    failures: dict[str, str] = field(default_factory=dict)
    """Why, by the name of the cell."""
    ended: set[str] = field(default_factory=set)
    """Keys of the cells that ended in this launch."""
    _running: list[RunningTrial] = field(default_factory=list)
    _shard_sets: dict[str, tuple[str, int]] = field(default_factory=dict)
    _consecutive_failures: int = 0

    def prepare(self) -> None:
        """Makes the shard sets, or finds them, and checks that every chain can run here. Raises InputError."""
        for cell in self.grid.due_trials(self.records.get, self.series):
            if cell.priority == 0:
                self._shard_set(cell.config)
                preflight(cell.config, local.preflight_target())

    def run(self) -> None:
        """Runs what is due until nothing is, or the time box is full. Raises where more than a cell is wrong."""
        started = time.monotonic()
        try:
            while True:
                for cell in self._next_trials(time.monotonic() - started):
                    self._start_trial(cell)
                if not self._running:
                    return
                self._wait_for_trial()
        finally:
            self._stop_running()

    def _next_trials(self, elapsed: float) -> list[Trial]:
        """What is to be started now."""
        busy = {running.trial.key for running in self._running}
        free = self.jobs - len(self._running)
        due = [cell for cell in self.grid.due_trials(self.records.get, self.series) if cell.name not in self.failures]
        chosen = [cell for cell in due if cell.key not in busy][: max(0, free)]
        if self.time_box_seconds is None or not chosen:
            return chosen
        cells, guess = self.grid.known_trials(self.records.get).values(), self.grid.study.cell_seconds
        costs = TrialCosts(cells, self.records.get, guess, jobs=self.jobs, ended=self.ended)
        return [cell for cell in chosen if elapsed + (costs.seconds(cell) or 0.0) <= self.time_box_seconds]

    def _start_trial(self, trial: Trial) -> None:
        config = _config_for_machine(trial.config, self.jobs)
        location, _ = self._shard_set(config)
        folder = self.study_directory
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        document, log = folder / "logs" / f"{trial.key}.json", folder / "logs" / f"{trial.key}.log"
        write_atomically(document, config.model_dump_json(indent=1))
        command = [sys.executable, "-m", "podscale.study.trial", str(document), location, str(os.getpid())]
        anew = not RunDirectory.for_config(config).path.exists()
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the whole terminal: this process decides
            )
        self._running.append(RunningTrial(trial, process, log, time.monotonic(), anew))

    def _wait_for_trial(self) -> None:
        """Wait until a trial has exited, and record it."""
        while True:
            with defer_signals():  # a trial is reaped, recorded and cleaned up as a whole, or not at all
                for running in self._running:
                    pid, status, used = os.wait4(running.process.pid, os.WNOHANG)
                    if pid:
                        running.process.returncode = os.waitstatus_to_exitcode(status)
                        self._running.remove(running)
                        return self._finish_trial(running, used.ru_utime + used.ru_stime)
            time.sleep(POLL_SECONDS)

    def _finish_trial(self, running: RunningTrial, cpu_seconds: float) -> None:
        cell, code = running.trial, running.process.returncode
        run, history = RunDirectory.for_config(cell.config), read_trial_history(cell)
        error = _trial_error(running, run)
        ended = trial_outcome(code, error, history)
        if ended is not None:
            record = build_record(cell, ended, error, history, images=self._shard_set(cell.config)[1])
            if running.is_fresh:
                seconds = time.monotonic() - running.started
                record = replace(record, seconds=seconds, cpu_seconds=cpu_seconds)
            self.records.add(record)
            self.ended.add(cell.key)
            self._consecutive_failures = 0
            if not self.keep_runs:
                shutil.rmtree(run.path, ignore_errors=True)
            for path in (running.log, running.log.with_suffix(".json")):
                path.unlink(missing_ok=True)
            return self.on_trial_end(cell, record, "")
        self.failures[cell.name] = f"exit code {code}: {error}"
        self._consecutive_failures += 1
        self.on_trial_end(cell, None, self.failures[cell.name])
        if code == ExitCode.BAD_INPUT:
            raise InputError(error, field=cell.name)
        if self._consecutive_failures >= MAX_CONSECUTIVE_FAILURES:
            raise PodscaleError(
                f"{MAX_CONSECUTIVE_FAILURES} cells in a row failed, the last with: {error}", field=cell.name
            )
        return None

    def _stop_running(self) -> None:
        """Has what is still at work save and end; what does not in its time is killed."""
        for running in self._running:
            with suppress(ProcessLookupError):
                running.process.send_signal(signal.SIGTERM)
        for running in self._running:
            try:
                running.process.wait(running.trial.config.launch.grace_seconds)
            except subprocess.TimeoutExpired:
                running.process.kill()
                running.process.wait()
        self._running.clear()

    @property
    def study_directory(self) -> Path:
        """Of the study in the workspace."""
        return self.records.study_directory(self.grid.study.name)

    def _shard_set(self, config: RunConfig) -> tuple[str, int]:
        """Location and training images of the shard set of a cell; made where it is not there."""
        name = data_fingerprint(config.data)
        if name not in self._shard_sets:
            made = local.shard(config.data, config.run.workspace, workers=config.launch.shard_workers)
            assert made is not None, "all parts at once"
            self._shard_sets[name] = (made.location, made.manifest.splits["train"].count)
        return self._shard_sets[name]


@contextmanager
def defer_signals() -> Iterator[None]:
    """Hold back SIGTERM and SIGINT until the body is done, then deliver them.

    The handlers are replaced because a mask covers one thread only: the kernel gives the signal to another thread, and
    Python then runs the handler in the main thread. Does nothing outside the main thread, where no handler runs.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[int] = []
    found = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    handlers = {number: handler for number, handler in found.items() if handler is not None}  # None: not Python's
    try:
        for number in handlers:
            signal.signal(number, lambda received, _: pending.append(received))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for received in pending:
            signal.raise_signal(received)


def _config_for_machine(config: RunConfig, jobs: int) -> RunConfig:
    """The document of a cell as one of several on this machine: no port to quarrel about, and a share of the cores."""
    from podscale.util import host_info

    processes = config.launch.processes or host_info.default_processes_per_node()
    threads = config.launch.threads or max(1, host_info.cpu_count() // (jobs * processes))
    launch = config.launch.model_copy(update={"backend": "local", "threads": threads})
    telemetry = config.telemetry.model_copy(update={"enabled": False, "trackers": ()})
    return config.model_copy(update={"launch": launch, "telemetry": telemetry})


def _trial_error(running: RunningTrial, run: RunDirectory) -> str:
    """What the stage recorded, else the last that was printed."""
    if running.process.returncode == ExitCode.DONE:
        return ""
    outcome = read_outcomes(run.outcome).get("train")
    if outcome is not None and not outcome.is_done:
        return outcome.error
    lines = running.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "nothing was printed"
