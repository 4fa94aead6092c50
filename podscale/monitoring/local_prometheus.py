"""Local Prometheus with Podscale's rules, which scrapes the endpoints of all runs below a directory."""

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from podscale.errors import InputError, PodscaleError
from podscale.monitoring.rule_files import RuleSettings, rule_file
from podscale.runs import RunDirectory
from podscale.telemetry.endpoint import ClientCertFiles, Endpoint, EndpointError
from podscale.util.files import write_atomically
from podscale.util.processes import exit_with_parent

JOB_NAME = "podscale"
NAME_TIMEOUT_SECONDS = 2.0
"""Time limit for an endpoint to show its certificate."""


@dataclass(frozen=True)
class ScrapeIntervals:
    """Intervals of scrapes and of rule evaluations, whole seconds."""

    scrape_seconds: int = 2
    evaluation_seconds: int = 5


DEFAULT_INTERVALS = ScrapeIntervals()


@dataclass(frozen=True)
class ScrapeTarget:
    """One endpoint to scrape.

    Args:
        certificate_name: name in the endpoint's certificate, which Prometheus verifies; None: its address.
    """

    endpoint: Endpoint
    certificate_name: str | None = None


def find_endpoints(runs: Path) -> list[Endpoint]:
    """Return the endpoints served now by runs below a directory, or by the directory if it is a run."""
    directories = [RunDirectory(runs), *(RunDirectory(path) for path in sorted(runs.glob("*")))]
    found = [Endpoint.read(run.endpoint) for run in directories]
    return [endpoint for endpoint in found if endpoint is not None]


def build_targets(
    found: Iterable[Endpoint], known: Iterable[ScrapeTarget], client: ClientCertFiles | None
) -> list[ScrapeTarget]:
    """Return scrape targets for the endpoints; one that does not answer yet is left out.

    Args:
        known: targets of the previous call, which are reused.
        client: client certificate for endpoints that require one.
    """
    before = {target.endpoint: target for target in known}
    made = []
    for endpoint in found:
        if endpoint not in before:
            try:
                before[endpoint] = ScrapeTarget(endpoint, endpoint.certificate_name(NAME_TIMEOUT_SECONDS, client))
            except EndpointError:
                before[endpoint] = ScrapeTarget(endpoint)  # Prometheus reports the reason
            except OSError:
                continue
        made.append(before[endpoint])
    return made


def prometheus_configuration(
    folder: Path, found: Iterable[ScrapeTarget], intervals: ScrapeIntervals, client: ClientCertFiles | None = None
) -> dict[str, Any]:
    """Return the configuration that Prometheus reads at its start and whenever the targets change."""
    return {
        "global": {
            "scrape_interval": f"{intervals.scrape_seconds}s",
            "evaluation_interval": f"{intervals.evaluation_seconds}s",
        },
        "rule_files": [str(folder / "rules.yml")],
        "scrape_configs": [_scrape_config(target, client) for target in found],
    }


def _scrape_config(target: ScrapeTarget, client: ClientCertFiles | None) -> dict[str, Any]:
    """Return the scrape job of one endpoint; Prometheus sets TLS and credentials per job, not per target."""
    endpoint = target.endpoint
    scraping: dict[str, Any] = {
        "job_name": f"{JOB_NAME} {endpoint.url}",
        "static_configs": [{"targets": [endpoint.address], "labels": {"job": JOB_NAME}}],
    }
    if endpoint.certificate is not None:
        tls = {"ca_file": str(endpoint.certificate)}
        tls |= {"server_name": target.certificate_name} if target.certificate_name else {}
        tls |= {"cert_file": str(client.certificate), "key_file": str(client.key)} if client else {}
        scraping |= {"scheme": "https", "tls_config": tls}
    if endpoint.token_file is not None:
        scraping["authorization"] = {"credentials_file": str(endpoint.token_file)}
    return scraping


PROGRAM = "prometheus"
DIRECTORY_NAME = ".prometheus"
"""Directory below the runs with configuration and samples, which are kept after the exit."""
RETENTION = "30d"
START_TIMEOUT_SECONDS = 60.0
QUERY_TIMEOUT_SECONDS = 5.0
DEFAULT_SETTINGS = RuleSettings()


@dataclass(frozen=True)
class FiringAlert:
    """A firing alert."""

    name: str
    summary: str


class LocalPrometheus:
    """A running Prometheus that scrapes the targets of `update_targets`; created by `run_prometheus`."""

    def __init__(
        self,
        runs: Path,
        url: str,
        child: "subprocess.Popen[bytes]",
        client: ClientCertFiles | None,
        cadence: ScrapeIntervals,
    ) -> None:
        self.url = url
        self._runs, self._child, self._client, self._intervals = runs, child, client, cadence
        self._targets: list[ScrapeTarget] = []

    def update_targets(self) -> list[str]:
        """Find the endpoints of runs, configure Prometheus to scrape them, and return their addresses."""
        found = build_targets(find_endpoints(self._runs), self._targets, self._client)
        if found != self._targets:
            write_configuration(self._runs, found, self._intervals, self._client)
            self._child.send_signal(signal.SIGHUP)  # it reads its configuration again
            self._targets = found
        return [target.endpoint.address for target in found]

    def firing_alerts(self) -> list[FiringAlert]:
        """Return the firing alerts. Raises OSError if Prometheus does not answer."""
        firing = [alert for alert in self._query("alerts")["alerts"] if alert["state"] == "firing"]
        return [FiringAlert(alert["labels"]["alertname"], alert["annotations"].get("summary", "")) for alert in firing]

    def scrape_errors(self) -> dict[str, str]:
        """Return the error of the last failed scrape by address. Raises OSError if Prometheus does not answer."""
        down = [target for target in self._query("targets?state=active")["activeTargets"] if target["health"] == "down"]
        return {target["labels"]["instance"]: target["lastError"] for target in down}

    def _query(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}", timeout=QUERY_TIMEOUT_SECONDS) as answer:
            return json.load(answer)["data"]

    def raise_if_exited(self) -> None:
        """Raise PodscaleError with Prometheus' last error if it has exited."""
        if self._child.poll() is not None:
            code = self._child.returncode
            raise PodscaleError(f"exited: {_last_log_error(self._runs)}", field=PROGRAM, got=code)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=QUERY_TIMEOUT_SECONDS):
                return True
        except OSError:
            return False

    def wait_until_ready(self) -> None:
        """Wait until Prometheus answers. Raises PodscaleError if it exits or the timeout passes."""
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while not self._is_ready():
            self.raise_if_exited()
            if time.monotonic() > deadline:
                raise PodscaleError(
                    f"does not answer after {START_TIMEOUT_SECONDS:.0f} s", field=f"{PROGRAM} at {self.url}"
                )
            time.sleep(0.1)


@contextmanager
def run_prometheus(
    runs: Path,
    port: int,
    client: ClientCertFiles | None = None,
    *,
    settings: RuleSettings = DEFAULT_SETTINGS,
    intervals: ScrapeIntervals = DEFAULT_INTERVALS,
) -> Iterator[LocalPrometheus]:
    """Run Prometheus for the runs below `runs` inside the context; its samples are kept afterwards.

    Args:
        port: on 127.0.0.1; 0 is any free one.
        client: client certificate for endpoints that require one.
        settings: of the rules.

    Raises:
        InputError: the program is missing, the port is in use, or another Prometheus serves the same runs.
    """
    program = shutil.which(PROGRAM)
    if program is None:
        raise InputError(
            "not on the PATH",
            field=PROGRAM,
            hint="Debian and Ubuntu: apt-get install prometheus; macOS: brew install prometheus; else unpack a release "
            "of the Prometheus project and put it on the PATH.",
        )
    port = free_port(port)
    folder = runs / DIRECTORY_NAME
    lock = write_prometheus_files(runs, settings, intervals)
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
            preexec_fn=exit_with_parent,
            start_new_session=True,
        )
    try:
        prometheus = LocalPrometheus(runs, f"http://127.0.0.1:{port}", child, client, intervals)
        prometheus.wait_until_ready()
        yield prometheus
    finally:
        child.terminate()
        child.wait()
        os.close(lock)


def write_prometheus_files(
    runs: Path, settings: RuleSettings = DEFAULT_SETTINGS, intervals: ScrapeIntervals = DEFAULT_INTERVALS
) -> int:
    """Write configuration and rules for the runs below a directory; return the descriptor of the held lock file.

    Raises InputError if they cannot be written or another Prometheus holds the lock.
    """
    folder = runs.absolute() / DIRECTORY_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _open_lock(folder / "lock")
        write_atomically(folder / "rules.yml", yaml.safe_dump(rule_file(settings), sort_keys=False))
        write_configuration(runs, [], intervals)
    except OSError as error:
        problem = f"cannot be written: {error.strerror}"
        raise InputError(problem, field=str(folder), hint="Choose another folder of runs.") from error
    return lock


def _open_lock(path: Path) -> int:
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        problem = "`podscale monitor` works there already"
        raise InputError(problem, field=str(path.parent), hint="Use that one, or end it.") from None
    return lock


def write_configuration(
    runs: Path, found: list[ScrapeTarget], intervals: ScrapeIntervals, client: ClientCertFiles | None = None
) -> None:
    """Write prometheus.yml with these scrape targets."""
    folder = runs.absolute() / DIRECTORY_NAME
    text = yaml.safe_dump(prometheus_configuration(folder, found, intervals, client), sort_keys=False)
    write_atomically(folder / "prometheus.yml", text)


def free_port(port: int) -> int:
    """Return the port, or any free one for 0. Raises InputError if it is in use."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise InputError(
                str(error.strerror),
                field="--port",
                got=port,
                hint="A Prometheus may be there already. Choose another port, or 0 for any.",
            ) from error
        return int(probe.getsockname()[1])


def _last_log_error(runs: Path) -> str:
    """Return the last error in Prometheus' log."""
    text = (runs / DIRECTORY_NAME / "prometheus.log").read_text(encoding="utf-8", errors="replace")
    errors = [line for line in text.splitlines() if "err=" in line or "rror" in line]
    return (errors or text.splitlines() or ["it said nothing"])[-1]
