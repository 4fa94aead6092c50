"""Runner of a study: starts trials as processes, several at a time or one by one in a pod, and records each at its end.

A diverged trial is a result. A failed trial gets no record: the study continues and reports it at the end, and the same
command runs it again. A stop request is forwarded; the trainings save and resume in the next launch.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from podscale.config import RunConfig, data_fingerprint
from podscale.config.preflight import preflight
from podscale.errors import ExitCode, InputError, PodscaleError
from podscale.runs import Lease, RunDirectory, read_outcomes
from podscale.stages import local
from podscale.study.budget import TrialCosts
from podscale.study.grid import TrialGrid
from podscale.study.protocol import record_launch
from podscale.study.records import RecordStore, TrialRecord
from podscale.study.sweep_series import SweepSeries, Trial
from podscale.study.trial import build_record, read_trial_history, trial_directories, trial_outcome
from podscale.util import host_info
from podscale.util.files import write_atomically
from podscale.util.formatting import format_count
from podscale.util.processes import defer_signals

POLL_SECONDS = 0.05
MAX_CONSECUTIVE_FAILURES = 3
"""Trials in a row whose failure, other than divergence, ends the study: the cause is then not a single trial's."""
SHARDS_LEASE = "shards.lease"
SHARDS_WAIT_SECONDS = 24 * 3600.0
"""Timeout for another pod to build the shard set, seconds."""

TrialCallback = Callable[[Trial, TrialRecord | None, str], None]
"""Called when a trial ends, with its record, or with None and the error."""


@dataclass
class RunningTrial:
    trial: Trial
    process: "subprocess.Popen[bytes]"
    log: Path
    started: float
    is_fresh: bool
    """True if this launch started it, so that its time is that of the whole trial."""


@dataclass
class StudyRunner:
    """Runner of the trials of a study in the workspace of its run document.

    Args:
        jobs: Trials at a time.
        time_box_seconds: Wall time; a trial starts only if it is expected to finish in it.
        series: Part of the grid to run; default: all of it.
        keep_runs: Keep the run directories of finished trials.
    """

    grid: TrialGrid
    records: RecordStore
    jobs: int
    time_box_seconds: float | None = None
    series: Sequence[SweepSeries] | None = None
    keep_runs: bool = False
    on_trial_end: TrialCallback = lambda trial, record, error: None
    failures: dict[str, str] = field(default_factory=dict)
    """Errors by name of the trial."""
    ended: set[str] = field(default_factory=set)
    """Keys of the trials that finished in this launch."""
    _running: list[RunningTrial] = field(default_factory=list)
    _shard_sets: dict[str, tuple[str, int]] = field(default_factory=dict)
    _consecutive_failures: int = 0

    def prepare(self) -> None:
        """Build the missing shard sets, check that every series can run here, and log the launch. Raises InputError."""
        self._check_pretraining()
        for trial in self.grid.unfinished_trials(self.records.get, self.series):
            if trial.priority <= 0:
                self._shard_set(trial.config)
                preflight(trial.config, local.preflight_target())
        record_launch(self.grid.study, self.study_directory)

    def run(self) -> None:
        """Run due trials until none is left or the time box is full.

        Raises:
            InputError: A trial rejects its input.
            PodscaleError: MAX_CONSECUTIVE_FAILURES trials in a row failed.
        """
        started = time.monotonic()
        try:
            while True:
                for trial in self._next_trials(time.monotonic() - started):
                    self._start_trial(trial)
                if not self._running:
                    return
                self._wait_for_trial()
        finally:
            self._stop_running()
            self._remove_pretraining()

    def _check_pretraining(self) -> None:
        """Delete the record of a pretraining whose model is gone and needed, so that it runs again.

        All series count, also those of other pods: the pod of the pretraining is the one that runs it again.

        Raises:
            InputError: A pretraining that is needed has diverged.
        """
        needed = [trial for series in self.grid.series for trial in series.needed_pretraining(self.records.get)]
        for trial in needed:
            record = self.records.get(trial.key)
            if record is None:
                continue
            _check_converged(trial, record)
            if not RunDirectory.for_config(trial.config).path.exists():
                self.records.delete(trial.key)

    def _remove_pretraining(self) -> None:
        """Remove the models of the pretraining, unless the study has trials left."""
        if not self.keep_runs and not self.grid.due_trials(self.records.get):
            for trial in self.grid.pretraining_trials.values():
                _remove_run_directories(trial)

    def _next_trials(self, elapsed: float) -> list[Trial]:
        busy = {running.trial.key for running in self._running}
        free = self.jobs - len(self._running)
        due = [
            trial for trial in self.grid.due_trials(self.records.get, self.series) if trial.name not in self.failures
        ]
        chosen = [trial for trial in due if trial.key not in busy][: max(0, free)]
        if self.time_box_seconds is None or not chosen:
            return chosen
        trials, guess = self.grid.known_trials(self.records.get).values(), self.grid.study.cell_seconds
        costs = TrialCosts(trials, self.records.get, guess, jobs=self.jobs, ended=self.ended)
        return [trial for trial in chosen if elapsed + (costs.seconds(trial) or 0.0) <= self.time_box_seconds]

    def _start_trial(self, trial: Trial) -> None:
        config = _config_for_machine(trial.config, self.jobs)
        location, _ = self._shard_set(config)
        directory = self.study_directory
        (directory / "logs").mkdir(parents=True, exist_ok=True)
        document, log = directory / "logs" / f"{trial.key}.json", directory / "logs" / f"{trial.key}.log"
        write_atomically(document, config.model_dump_json(indent=1))
        command = [sys.executable, "-m", "podscale.study.trial", str(document), location, str(os.getpid())]
        is_fresh = not RunDirectory.for_config(config).path.exists()
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that Ctrl-C reaches only this process
            )
        self._running.append(RunningTrial(trial, process, log, time.monotonic(), is_fresh))

    def _wait_for_trial(self) -> None:
        while True:
            with defer_signals():  # reap, record and clean up a trial without interruption
                for running in self._running:
                    pid, status, used = os.wait4(running.process.pid, os.WNOHANG)
                    if pid:
                        running.process.returncode = os.waitstatus_to_exitcode(status)
                        self._running.remove(running)
                        return self._finish_trial(running, used.ru_utime + used.ru_stime)
            time.sleep(POLL_SECONDS)

    def _finish_trial(self, running: RunningTrial, cpu_seconds: float) -> None:
        trial, code = running.trial, running.process.returncode
        run, history = RunDirectory.for_config(trial.config), read_trial_history(trial)
        error = _trial_error(running, run)
        ended = trial_outcome(code, error, history)
        if ended is not None:
            record = build_record(trial, ended, error, history, images=self._shard_set(trial.config)[1])
            if running.is_fresh:
                seconds = time.monotonic() - running.started
                record = replace(record, seconds=seconds, cpu_seconds=cpu_seconds)
            self.records.add(record)
            self.ended.add(trial.key)
            self._consecutive_failures = 0
            is_pretraining = trial.key in self.grid.pretraining_trials
            if not self.keep_runs and not is_pretraining:
                _remove_run_directories(trial)
            for path in (running.log, running.log.with_suffix(".json")):
                path.unlink(missing_ok=True)
            self.on_trial_end(trial, record, "")
            if is_pretraining:
                _check_converged(trial, record)
            return
        self.failures[trial.name] = f"exit code {code}: {error}"
        self._consecutive_failures += 1
        self.on_trial_end(trial, None, self.failures[trial.name])
        if code == ExitCode.BAD_INPUT:
            raise InputError(error, field=trial.name)
        if self._consecutive_failures >= MAX_CONSECUTIVE_FAILURES:
            raise PodscaleError(
                f"{MAX_CONSECUTIVE_FAILURES} trials in a row failed, the last with: {error}", field=trial.name
            )

    def _stop_running(self) -> None:
        """Send SIGTERM to the running trials, so that they save; kill those that exceed the grace time."""
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
        return self.records.study_directory(self.grid.study.name)

    def _shard_set(self, config: RunConfig) -> tuple[str, int]:
        """Return location and number of training images of a trial's shard set; build it if missing."""
        name = data_fingerprint(config.data)
        if name not in self._shard_sets:
            shard_set = local.shard(config.data, config.run.workspace, workers=config.launch.shard_workers)
            assert shard_set is not None, "all parts at once"
            self._shard_sets[name] = (shard_set.location, shard_set.manifest.splits["train"].count)
        return self._shard_sets[name]


def _check_converged(pretraining: Trial, record: TrialRecord) -> None:
    """Raise InputError if a pretraining diverged."""
    if record.ended == "diverged":
        hint = "Change its options, such as the learning rate."
        raise InputError("it diverged, so nothing can start from it", field=pretraining.name, hint=hint)


def _remove_run_directories(trial: Trial) -> None:
    for path in trial_directories(trial.config):
        shutil.rmtree(path, ignore_errors=True)


def _config_for_machine(config: RunConfig, jobs: int) -> RunConfig:
    """Return a trial's document for a shared machine: no metrics port and a share of the cores."""
    processes = config.launch.processes or host_info.default_processes_per_node()
    threads = config.launch.threads or max(1, host_info.cpu_count() // (jobs * processes))
    launch = config.launch.model_copy(update={"backend": "local", "threads": threads})
    telemetry = config.telemetry.model_copy(update={"enabled": False, "trackers": ()})
    return config.model_copy(update={"launch": launch, "telemetry": telemetry})


def _trial_error(running: RunningTrial, run: RunDirectory) -> str:
    """Return the error that the stage recorded, or the last line that it printed."""
    if running.process.returncode == ExitCode.DONE:
        return ""
    outcome = read_outcomes(run.outcome).get("train")
    if outcome is not None and not outcome.is_done:
        return outcome.error
    lines = running.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "nothing was printed"


def run_in_pod(grid: TrialGrid, series: Sequence[SweepSeries], *, field: str) -> RecordStore:
    """Run the missing trials of some series, one at a time, and print each result; return the records of the workspace.

    Pods of one study start at the same time: one of them builds a missing shard set while the others wait.

    Args:
        field: Field of the error.

    Raises:
        PodscaleError: A trial failed.
    """
    records = RecordStore(grid.workspace)
    runner = StudyRunner(grid, records, jobs=1, series=series, on_trial_end=_print_trial)
    runner.study_directory.mkdir(parents=True, exist_ok=True)
    lease = Lease.hold(runner.study_directory / SHARDS_LEASE, wait_seconds=SHARDS_WAIT_SECONDS)
    try:
        runner.prepare()
    finally:
        lease.release()
    runner.run()
    if runner.failures:
        listing = "\n".join(f"{name}: {error}" for name, error in runner.failures.items())
        raise PodscaleError(f"{format_count(len(runner.failures), 'trial')} failed:\n{listing}", field=field)
    return records


def _print_trial(trial: Trial, record: TrialRecord | None, error: str) -> None:
    """Print the end of a trial: its top-1, or how it ended."""
    if record is not None:
        error = record.ended if record.top1 is None else f"top-1 {record.top1:.2%}"
    print(f"{trial.name}: {error}", flush=True)
