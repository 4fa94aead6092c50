"""Where faults are put in: a real training of the digits on two ranks, and a real Prometheus with our rules that
scrapes it every second. The rules are those that are shipped, with every duration divided by one number."""

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

TROUBLES = Path(__file__).parent.parent / "troubles"
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
PATIENCE = 900.0
"""Seconds for anything to happen on a loaded machine."""
LOOK_SECONDS = 0.25
CADENCE = ScrapeIntervals(scrape_seconds=1, evaluation_seconds=1)


@dataclass
class Seen:
    """An alert: when its condition began to hold, by Prometheus, and when it was first seen to fire (unix seconds)."""

    labels: dict[str, str]
    active: float
    firing: float | None = None

    @property
    def name(self) -> str:
        return self.labels["alertname"]


class Scene:
    """A training that goes on, starts again where it has ended, and is watched; made by `scene`."""

    def __init__(self, workspace: Path, place: Path, *, mounted: bool) -> None:
        self.workspace, self.mounted = workspace, mounted
        self.run = workspace / "runs" / RUN
        self.switches = place / "switches"
        self._place = place
        self._watched = place / "watched"  # not in the workspace, whose disk will be full
        self._stack = ExitStack()
        self._shorten = 0.0
        self._local: LocalPrometheus | None = None
        self._command: Command | None = None
        self._seen: dict[tuple[tuple[str, str], ...], Seen] = {}
        self.now: list[Seen] = []
        """Alerts that are pending or fire."""
        for folder in (self.switches, self._watched):
            folder.mkdir()
        (self._watched / RUN).symlink_to(self.run)
        (workspace / "run.yaml").write_text(DOCUMENT, encoding="utf-8")

    @property
    def command(self) -> Command:
        assert self._command is not None, "the training was not started"
        return self._command

    def rank(self, number: int) -> int | None:
        """Process id of a rank that is alive."""
        with suppress(OSError, ValueError):  # the ranks are being started again
            pid = self.command.ranks().get(number)
            return pid if pid is not None and alive(pid) else None
        return None

    def records(self, since: float, event: str) -> list[EventRecord]:
        """Events of the run's log after a moment."""
        lines = read_records(self.run / "metrics.jsonl")
        return [line for line in lines if line["time"] >= since and line.get("event") == event]

    @property
    def step(self) -> int:
        """Steps done, by the run's log."""
        return newest_step(self.run / "metrics.jsonl")

    def value(self, query: str) -> float | None:
        """What Prometheus says now; None where it has no sample."""
        found = Prometheus(self._prometheus.url).instant(query, time.time())
        return float(found[0]["value"][1]) if found else None

    def until(self, holds: Callable[[], Any], what: str) -> None:
        """Returns when `holds()`, and looks at the alerts meanwhile; AssertionError after `PATIENCE`."""
        deadline = time.monotonic() + PATIENCE
        while True:
            self._look()
            if holds():
                return
            told = ", ".join(f"{seen.name} since {time.time() - seen.active:.0f} s" for seen in self.now)
            assert time.monotonic() < deadline, f"{what}: not within {PATIENCE:.0f} s; alerts: {told or 'none'}"
            time.sleep(LOOK_SECONDS)

    def seen(self, since: float) -> list[Seen]:
        """Alerts whose condition came to hold after a moment, whatever became of them."""
        return [seen for seen in self._seen.values() if seen.active >= since - 1]

    def calm(self, shorten: float, aside: Sequence[str]) -> None:
        """Returns when it has trained for as long as five minutes are now, and no alert but for `aside` is on."""
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
        """Returns when there are further updates; starts the training where it has ended."""
        self.start_if_ended()
        reached = self.step
        self.until(lambda: self.step >= reached + 2 * LOG_EVERY, "the training goes on")

    def start_if_ended(self) -> None:
        """Gives the command that trains, where it does not run: the same one each time."""
        if self._command is None:
            packed = podscale(self.workspace, "shard", "run.yaml")
            assert packed.code == 0, packed.err
        elif self._command.process.poll() is None:
            return
        printed = self._place / f"printed-{time.monotonic_ns()}"
        printed.mkdir()
        variables = {"PYTHONPATH": str(TROUBLES), "TROUBLE": f"files:{self.switches}", "OMP_NUM_THREADS": "1"}
        self._command = Command(self.workspace, "train", "run.yaml", variables=variables, output=printed)

    def close(self) -> None:
        if self._command is not None:
            self._command.kill()
        self._stack.close()

    @property
    def _prometheus(self) -> LocalPrometheus:
        assert self._local is not None, "nobody watches"
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
    """A scene in a temporary folder; its workspace is a small disk of its own where this process may mount one."""
    with tempfile.TemporaryDirectory(prefix="podscale-drills-") as folder, ExitStack() as stack:
        workspace = Path(folder) / "workspace"
        workspace.mkdir()
        try:
            stack.enter_context(small_disk(workspace, DISK))
            mounted = True
        except OSError:
            mounted = False
        made = Scene(workspace, Path(folder), mounted=mounted)
        stack.callback(made.close)
        yield made
