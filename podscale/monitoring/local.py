"""A Prometheus of one's own for the runs of a folder: the real program, with our rules, on this machine."""

import fcntl
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from podscale.errors import InputError, PodscaleError
from podscale.files import write_atomically
from podscale.monitoring.render import Settings, rule_file
from podscale.processes import die_with_parent
from podscale.rundir import RunDirectory

PROGRAM = "prometheus"
FOLDER = ".prometheus"
"""Below the runs: configuration and samples, which outlive the program."""
SCRAPE_SECONDS = 2
EVALUATION_SECONDS = 5
RETENTION = "30d"
START_SECONDS = 60.0
ASK_SECONDS = 5.0


@dataclass(frozen=True)
class Cadence:
    """Whole seconds between two scrapes, and between two looks at the rules and at what there is to scrape."""

    scrape: int = SCRAPE_SECONDS
    evaluation: int = EVALUATION_SECONDS


CADENCE = Cadence()
AS_SHIPPED = Settings()


@dataclass(frozen=True)
class Firing:
    """An alert that fires."""

    name: str
    summary: str


class LocalPrometheus:
    """A running Prometheus that scrapes what `follow` finds; made by `running`."""

    def __init__(self, runs: Path, url: str, child: "subprocess.Popen[bytes]") -> None:
        self.url = url
        self._runs, self._child = runs, child
        self._targets: list[str] = []

    def follow(self) -> list[str]:
        """Looks for endpoints of runs and has them scraped; the addresses there are now."""
        found = endpoints(self._runs)
        if found != self._targets:
            write_targets(self._runs, found)
            self._targets = found
        return found

    def alerts(self) -> list[Firing]:
        """The alerts that fire now. Raises OSError where Prometheus does not answer."""
        with urllib.request.urlopen(f"{self.url}/api/v1/alerts", timeout=ASK_SECONDS) as answer:
            listed = json.load(answer)["data"]["alerts"]
        firing = [alert for alert in listed if alert["state"] == "firing"]
        return [Firing(alert["labels"]["alertname"], alert["annotations"].get("summary", "")) for alert in firing]

    def check(self) -> None:
        """Raises PodscaleError with Prometheus' own words where it has ended."""
        if self._child.poll() is not None:
            raise PodscaleError(f"{PROGRAM} ended with {self._child.returncode}: {_last_words(self._runs)}")

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=ASK_SECONDS):
                return True
        except OSError:
            return False

    def wait(self) -> None:
        """Returns once it answers."""
        deadline = time.monotonic() + START_SECONDS
        while not self._ready():
            self.check()
            if time.monotonic() > deadline:
                raise PodscaleError(f"{PROGRAM} does not answer at {self.url} after {START_SECONDS:.0f} s")
            time.sleep(0.1)


@contextmanager
def running(
    runs: Path, port: int, settings: Settings = AS_SHIPPED, cadence: Cadence = CADENCE
) -> Iterator[LocalPrometheus]:
    """Starts Prometheus for the runs below `runs`, and ends it; what it has collected stays.

    port: on 127.0.0.1; 0 = any free one. settings: of the rules. Raises InputError where there is no program, the port
    is in use, or another Prometheus works for the same runs.
    """
    program = shutil.which(PROGRAM)
    if program is None:
        raise InputError(
            f"there is no program `{PROGRAM}` here. Debian and Ubuntu: apt-get install prometheus; macOS: brew install "
            "prometheus; else unpack a release of the Prometheus project and put it on the PATH"
        )
    port = free_port(port)
    folder = runs / FOLDER
    lock = prepare(runs, settings, cadence)
    command = [
        program,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--storage.tsdb.retention.time={RETENTION}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=die_with_parent,
            start_new_session=True,
        )
    try:
        prometheus = LocalPrometheus(runs, f"http://127.0.0.1:{port}", child)
        prometheus.wait()
        yield prometheus
    finally:
        child.terminate()
        child.wait()
        os.close(lock)


def prepare(runs: Path, settings: Settings = AS_SHIPPED, cadence: Cadence = CADENCE) -> int:
    """Writes configuration and rules for the runs below a folder; returns the open file whose lock says whose it is.

    Raises InputError where that cannot be written, or another Prometheus works there.
    """
    folder = runs.absolute() / FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _locked(folder / "lock")
        write_atomically(folder / "rules.yml", yaml.safe_dump(rule_file(settings), sort_keys=False))
        write_atomically(folder / "prometheus.yml", yaml.safe_dump(configuration(folder, cadence), sort_keys=False))
        write_targets(runs, endpoints(runs))
    except OSError as error:
        raise InputError(f"{folder}: cannot be written: {error.strerror}; choose another folder of runs") from error
    return lock


def _locked(path: Path) -> int:
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise InputError(f"{path.parent}: `podscale monitor` works there already; use that one, or end it") from None
    return lock


def configuration(folder: Path, cadence: Cadence) -> dict[str, Any]:
    """What Prometheus reads at its start; the endpoints to scrape stand in a file that it looks at again and again."""
    look = cadence.evaluation
    return {
        "global": {"scrape_interval": f"{cadence.scrape}s", "evaluation_interval": f"{look}s"},
        "rule_files": [str(folder / "rules.yml")],
        "scrape_configs": [
            {
                "job_name": "podscale",
                "file_sd_configs": [{"files": [str(folder / "targets.json")], "refresh_interval": f"{look}s"}],
            }
        ],
    }


def endpoints(runs: Path) -> list[str]:
    """Host and port of the endpoints that are served now by runs below a folder (or by the run that it is)."""
    directories = [RunDirectory(runs), *(RunDirectory(path) for path in sorted(runs.glob("*")))]
    found = []
    for run in directories:
        try:
            address = urlsplit(run.endpoint.read_text(encoding="utf-8").strip()).netloc
        except (OSError, ValueError):
            continue
        found.append(address.replace("0.0.0.0", "127.0.0.1"))
    return [address for address in found if address]


def write_targets(runs: Path, addresses: list[str]) -> None:
    """Tells Prometheus what to scrape from now on."""
    write_atomically(runs / FOLDER / "targets.json", json.dumps([{"targets": addresses}] if addresses else []))


def free_port(port: int) -> int:
    """The port, or any free one for 0. Raises InputError where it is in use."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise InputError(
                f"--port {port}: {error.strerror}; a Prometheus may be there already. Choose another, or 0 for any"
            ) from error
        return int(probe.getsockname()[1])


def _last_words(runs: Path) -> str:
    """Why Prometheus ended, by the last line of its log that says so."""
    text = (runs / FOLDER / "prometheus.log").read_text(encoding="utf-8", errors="replace")
    told = [line for line in text.splitlines() if "err=" in line or "rror" in line]
    return (told or text.splitlines() or ["it said nothing"])[-1]
