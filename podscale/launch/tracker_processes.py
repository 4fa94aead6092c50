"""Processes of a training's trackers. The supervisor of the leading pod starts and stops them."""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE

from podscale.launch.process_cleanup import kill_launch_processes, start_bound
from podscale.launch.worker_group import StageResult
from podscale.launch.worker_spec import WorkerSpec
from podscale.telemetry.trackers import trainjob
from podscale.telemetry.trackers.base import FAILURE_PREFIX, LaunchExit
from podscale.util import env
from podscale.util.formatting import one_line

FINISH_SECONDS = 60.0
"""Time to send the last values after the end of a training, seconds; a new client is slow to connect."""
PREEMPTED_FINISH_SECONDS = 10.0
"""The same after a stop request, seconds, because the pod will be killed soon."""
POLL_SECONDS = 0.05


class TrackerProcesses:
    """Trackers of a training: the document's, and Kubeflow Trainer's if it is enabled. Main thread only.

    Args:
        print_line: Receives each line that a tracker prints.
        on_failure: Receives the name of a failed tracker and the reason.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs: Path,
        rank_dir: Path,
        print_line: Callable[[str], None],
        on_failure: Callable[[str, str], None],
    ) -> None:
        telemetry = spec.config.telemetry
        self._names: list[str] = [*telemetry.trackers] if spec.stage == "train" else []
        if spec.stage == "train" and trainjob.is_enabled(os.environ):
            self._names.append("trainjob")
        self._required = telemetry.trackers if telemetry.required else ()
        self._config, self._logs, self._rank_dir = spec.config, logs, rank_dir
        self._print_line, self._on_failure = print_line, on_failure
        self._running: dict[str, _TrackerProcess] | None = None
        self._stopped_at = 0.0
        self.failure = ""
        """Error of a tracker that the document requires; empty if there is none."""

    def start(self) -> None:
        """Start the trackers; later calls do nothing."""
        if self._running is None:
            variables = {
                **os.environ,
                env.CONFIG: self._config.model_dump_json(),
                env.SUPERVISOR: str(os.getpid()),
                env.TRACKERS: str(self._rank_dir),
                env.OMP_NUM_THREADS: "1",
            }
            self._running = {
                name: _TrackerProcess(name, variables, self._logs / f"tracker-{name}.log") for name in self._names
            }

    def poll(self) -> None:
        """Print the trackers' new lines, and report those that failed."""
        running = self._running or {}
        for name, process in list(running.items()):
            has_exited = process.has_exited  # before its output is read, which then includes its last lines
            for line in process.read_lines():
                self._print_line(line)
            if has_exited:
                running.pop(name).close()
                if process.exit_code:
                    self._record_failure(name, process.reason or f"it exited with code {process.exit_code}")

    def stop(self, result: StageResult) -> None:
        """Send the result of the training to the trackers, which then finish."""
        self._stopped_at = time.monotonic()
        for process in (self._running or {}).values():
            process.stop(LaunchExit(result.exit_code, result.error))

    def wait(self, is_hurried: Callable[[], bool]) -> None:
        """Wait until the trackers have exited; kill those that take too long."""
        while self._running:
            self.poll()
            if time.monotonic() - self._stopped_at > (PREEMPTED_FINISH_SECONDS if is_hurried() else FINISH_SECONDS):
                break
            time.sleep(POLL_SECONDS)
        for name in self._running or ():
            self._on_failure(name, "it did not finish in time; its last values may be missing")
        self.close()

    def close(self) -> None:
        """Kill the remaining trackers; safe to call twice."""
        if self._running is not None and self._names:
            kill_launch_processes(self._rank_dir, env.TRACKERS)
            for process in self._running.values():
                process.close()
            self._running.clear()

    def _record_failure(self, name: str, reason: str) -> None:
        log = self._logs / f"tracker-{name}.log"
        self._on_failure(name, f"{reason} (see {log})")
        if name in self._required and not self.failure:
            self.failure = (
                f"telemetry.trackers: {name} failed: {reason} (see {log}); set telemetry.required=false to train "
                "without it, or remove it"
            )


class _TrackerProcess:
    """Process of one tracker; the output of its packages goes to `log`."""

    def __init__(self, name: str, variables: Mapping[str, str], log: Path) -> None:
        module = ["-m", "podscale.telemetry.trackers", name]
        with log.open("ab") as file:
            self._process = start_bound(module, variables, stdin=PIPE, stdout=PIPE, stderr=file.fileno())
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._partial_line = b""
        self.reason = ""
        """Error that a failed tracker printed."""

    @property
    def has_exited(self) -> bool:
        return self._process.poll() is not None

    @property
    def exit_code(self) -> int:
        return int(self._process.returncode)

    def read_lines(self) -> list[str]:
        """Return the lines printed since the last call, without the failure line."""
        assert self._process.stdout is not None
        *complete, self._partial_line = (self._partial_line + (self._process.stdout.read() or b"")).split(b"\n")
        lines = [one_line(line) for line in complete]
        self.reason = next(
            (line.removeprefix(FAILURE_PREFIX) for line in lines if line.startswith(FAILURE_PREFIX)), self.reason
        )
        return [line for line in lines if not line.startswith(FAILURE_PREFIX)]

    def stop(self, launch_exit: LaunchExit) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # it has exited
            self._process.stdin.write(launch_exit.to_line())
        with suppress(OSError):
            self._process.stdin.close()

    def close(self) -> None:
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()
