"""Scene of the drills: a real training of the digits on two ranks, scraped every second by a real Prometheus.

The rules are the shipped ones, with every duration divided by one number.
"""

import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from podscale.monitoring.local_prometheus import LocalPrometheus, ScrapeIntervals, run_prometheus
from podscale.monitoring.rule_files import RuleSettings, parse_milliseconds
from podscale.telemetry.events import EventRecord, newest_step, read_records
from tests.support.commands import Command, alive, podscale
from tests.support.disk import small_disk
from tests.support.prometheus import Prometheus
from tests.support.tiny import TINY

FAULT_INJECTION = Path(__file__).parent.parent / "fault_injection"
RUN = "drill"
HOST = socket.gethostname()
LOG_EVERY = 10
SAVE_EVERY = 50
DOCUMENT = (
    TINY
    + f"""
run: {{id: {RUN}, workspace: ., seed: 1}}
train: {{epochs: 100000, global_batch: 64, schedule: {{learning_rate: 0.1, warmup_epochs: 1}}}}
evaluate: {{crop_fraction: 1.0, every_epochs: 0}}
checkpoint: {{every_epochs: 0, every_steps: {SAVE_EVERY}}}
telemetry: {{log_every: {LOG_EVERY}, linger_seconds: 10}}
launch: {{processes: 2, max_restarts: 50, grace_seconds: 60, hang_seconds: 60, timeout_seconds: 120}}
"""
)
DISK = "80m"
TIMEOUT_SECONDS = 240.0
"""Time limit for any event on a loaded machine, seconds."""
LOOK_SECONDS = 0.25
CADENCE = ScrapeIntervals(scrape_seconds=1, evaluation_seconds=1)


@dataclass
class Seen:
    """Alert; `active` is the start of its condition, `firing` the first time it was seen firing, unix seconds."""

    labels: dict[str, str]
    active: float
    firing: float | None = None

    @property
    def name(self) -> str:
        return self.labels["alertname"]


class Scene:
    """Watched training, which is restarted if it has exited; created by `scene`."""

    def __init__(self, workspace: Path, directory: Path, *, mounted: bool) -> None:
        self.workspace, self.mounted = workspace, mounted
        self.run = workspace / "runs" / RUN
        self.switches = directory / "switches"
        self._directory = directory
        self._watched = directory / "watched"  # outside the workspace, whose disk will be full
        self._stack = ExitStack()
        self._shorten = 0.0
        self._local: LocalPrometheus | None = None
        self._command: Command | None = None
        self._seen: dict[tuple[tuple[str, str], ...], Seen] = {}
        self.now: list[Seen] = []
        """Alerts that are pending or firing."""
        for folder in (self.switches, self._watched):
            folder.mkdir()
        (self._watched / RUN).symlink_to(self.run)
        (workspace / "run.yaml").write_text(DOCUMENT, encoding="utf-8")

    @property
    def command(self) -> Command:
        assert self._command is not None, "the training was not started"
        return self._command

    def rank(self, number: int) -> int | None:
        """Return the process id of a rank, or None if it is not running."""
        with suppress(OSError, ValueError):  # the ranks are restarting
            pid = self.command.ranks().get(number)
            return pid if pid is not None and alive(pid) else None
        return None

    def records(self, since: float, event: str) -> list[EventRecord]:
        """Return the events of a kind in the run's log since a time (unix seconds)."""
        lines = read_records(self.run / "metrics.jsonl")
        return [line for line in lines if line["time"] >= since and line.get("event") == event]

    @property
    def step(self) -> int:
        """Steps done, from the run's log."""
        return newest_step(self.run / "metrics.jsonl")

    def value(self, query: str) -> float | None:
        """Return the current value of a query; None without a sample."""
        samples = Prometheus(self._prometheus.url).instant(query, time.time())
        return float(samples[0]["value"][1]) if samples else None

    def until(self, holds: Callable[[], Any], what: str) -> None:
        """Wait until `holds()`, and poll the alerts meanwhile. Fails after `TIMEOUT_SECONDS`."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while True:
            self._look()
            if holds():
                return
            alerts = ", ".join(f"{seen.name} since {time.time() - seen.active:.0f} s" for seen in self.now)
            assert time.monotonic() < deadline, (
                f"{what}: not within {TIMEOUT_SECONDS:.0f} s; alerts: {alerts or 'none'}"
            )
            time.sleep(LOOK_SECONDS)

    def seen(self, since: float) -> list[Seen]:
        """Return all alerts whose condition began after a time, also resolved ones."""
        return [seen for seen in self._seen.values() if seen.active >= since - 1]

    def calm(self, shorten: float, aside: Sequence[str]) -> None:
        """Wait until the training ran for five (shortened) minutes without an alert other than those in `aside`."""
        self._watch(shorten)
        self.goes_on()
        since = time.monotonic()

        def quiet() -> bool:
            nonlocal since
            if any(seen.name not in aside for seen in self.now):
                since = time.monotonic()
            return time.monotonic() - since > parse_milliseconds("5m") / 1000 / shorten

        self.until(quiet, "no alert is on")

    def goes_on(self) -> None:
        """Wait for further steps; restart the training if it has exited."""
        self.start_if_ended()
        reached = self.step
        self.until(lambda: self.step >= reached + 2 * LOG_EVERY, "the training goes on")

    def start_if_ended(self) -> None:
        """Start the training if it is not running, with the same command each time."""
        if self._command is None:
            packed = podscale(self.workspace, "shard", "run.yaml")
            assert packed.code == 0, packed.err
        elif self._command.process.poll() is None:
            return
        printed = self._directory / f"printed-{time.monotonic_ns()}"
        printed.mkdir()
        variables = {
            "PYTHONPATH": str(FAULT_INJECTION),
            "INJECTED_FAULT": f"files:{self.switches}",
            "OMP_NUM_THREADS": "1",
        }
        self._command = Command(self.workspace, "train", "run.yaml", variables=variables, output=printed)

    def close(self) -> None:
        if self._command is not None:
            self._command.kill()
        self._stack.close()

    @property
    def _prometheus(self) -> LocalPrometheus:
        assert self._local is not None, "Prometheus was not started"
        return self._local

    def _watch(self, shorten: float) -> None:
        if shorten == self._shorten:
            return
        self._stack.close()
        self._shorten = shorten
        settings = RuleSettings(shorten=shorten)
        self._local = self._stack.enter_context(run_prometheus(self._watched, 0, settings=settings, intervals=CADENCE))

    def _look(self) -> None:
        self._prometheus.raise_if_exited()
        self._prometheus.update_targets()
        self.now = []
        for alert in Prometheus(self._prometheus.url).get("alerts")["alerts"]:
            active = datetime.fromisoformat(alert["activeAt"]).timestamp()
            key = (*sorted(alert["labels"].items()), ("active", f"{active:.3f}"))
            seen = self._seen.setdefault(key, Seen(alert["labels"], active))
            if alert["state"] == "firing" and seen.firing is None:
                seen.firing = time.time()
            self.now.append(seen)


@contextmanager
def scene() -> Iterator[Scene]:
    """Yield a scene in a temporary folder; its workspace is a small disk if this process may mount one."""
    with tempfile.TemporaryDirectory(prefix="podscale-drills-") as folder, ExitStack() as stack:
        workspace = Path(folder) / "workspace"
        workspace.mkdir()
        try:
            stack.enter_context(small_disk(workspace, DISK))
            mounted = True
        except OSError:
            mounted = False
        drill_scene = Scene(workspace, Path(folder), mounted=mounted)
        stack.callback(drill_scene.close)
        yield drill_scene
