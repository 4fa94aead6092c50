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
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from podscale.errors import InputError, PodscaleError
from podscale.monitoring.rule_files import RuleSettings, rule_file
from podscale.runs import RunDirectory
from podscale.telemetry.endpoint import ClientCertFiles, Endpoint, EndpointError
from podscale.util.files import write_atomically
from podscale.util.processes import exit_with_parent

PROGRAM = "prometheus"
JOB_NAME = "podscale"
DIRECTORY_NAME = ".prometheus"
RETENTION = "30d"
START_TIMEOUT_SECONDS = 60.0
QUERY_TIMEOUT_SECONDS = 5.0
CERTIFICATE_TIMEOUT_SECONDS = 2.0
"""Time limit for reading an endpoint's certificate."""
DEFAULT_SETTINGS = RuleSettings()


@dataclass(frozen=True)
class ScrapeIntervals:
    """Intervals of scrapes and of rule evaluations, whole seconds."""

    scrape_seconds: int = 2
    evaluation_seconds: int = 5


DEFAULT_INTERVALS = ScrapeIntervals()


@dataclass(frozen=True)
class ScrapeTarget:
    """Endpoint to scrape. Prometheus verifies `certificate_name` in its certificate, or its address if that is None."""

    endpoint: Endpoint
    certificate_name: str | None = None


@dataclass(frozen=True)
class FiringAlert:
    """Alert that fires. Its labels identify it, because the value in its summary changes."""

    labels: frozenset[tuple[str, str]]
    name: str = field(compare=False)
    summary: str = field(compare=False)


class PrometheusDirectory:
    """Directory below the runs with lock, rules, configuration and samples; it remains after the exit.

    `client` is for endpoints that require a certificate. Raises InputError if it is locked or not writable.
    """

    def __init__(
        self,
        runs: Path,
        client: ClientCertFiles | None = None,
        settings: RuleSettings = DEFAULT_SETTINGS,
        intervals: ScrapeIntervals = DEFAULT_INTERVALS,
    ) -> None:
        self.path = runs.absolute() / DIRECTORY_NAME
        self.log = self.path / "prometheus.log"
        self.client, self._intervals = client, intervals
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _open_lock(self.path / "lock")
            write_atomically(self.path / "rules.yml", yaml.safe_dump(rule_file(settings), sort_keys=False))
            self.write_configuration([])
        except OSError as error:
            problem = f"cannot be written: {error.strerror}"
            raise InputError(problem, field=str(self.path), hint="Choose another folder of runs.") from error

    def write_configuration(self, targets: Iterable[ScrapeTarget]) -> None:
        """Write the configuration, which Prometheus reads when it starts and at SIGHUP."""
        configuration = {
            "global": {
                "scrape_interval": f"{self._intervals.scrape_seconds}s",
                "evaluation_interval": f"{self._intervals.evaluation_seconds}s",
            },
            "rule_files": [str(self.path / "rules.yml")],
            "scrape_configs": [_scrape_config(target, self.client) for target in targets],
        }
        write_atomically(self.path / "prometheus.yml", yaml.safe_dump(configuration, sort_keys=False))

    def last_error(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line for line in lines if "err=" in line or "rror" in line]
        return (errors or lines or ["its log is empty"])[-1]

    def close(self) -> None:
        os.close(self._lock)


class LocalPrometheus:
    """Running Prometheus that scrapes the targets of `update_targets`; created by `run_prometheus`."""

    def __init__(self, runs: Path, directory: PrometheusDirectory, url: str, child: "subprocess.Popen[bytes]") -> None:
        self.url = url
        self._runs, self._directory, self._child = runs, directory, child
        self._targets: list[ScrapeTarget] = []

    def update_targets(self) -> list[str]:
        """Find the endpoints of runs, make Prometheus scrape them, and return their addresses."""
        targets = build_targets(find_endpoints(self._runs), self._targets, self._directory.client)
        if targets != self._targets:
            self._directory.write_configuration(targets)
            self._child.send_signal(signal.SIGHUP)
            self._targets = targets
        return [target.endpoint.address for target in targets]

    def firing_alerts(self) -> list[FiringAlert]:
        """Return the firing alerts. Raises OSError if Prometheus does not answer."""
        firing = [alert for alert in self._query("alerts")["alerts"] if alert["state"] == "firing"]
        return [
            FiringAlert(
                frozenset(alert["labels"].items()),
                alert["labels"]["alertname"],
                alert["annotations"].get("summary", ""),
            )
            for alert in firing
        ]

    def scrape_errors(self) -> dict[str, str]:
        """Return the last error by address of failing targets. Raises OSError if Prometheus does not answer."""
        down = [target for target in self._query("targets?state=active")["activeTargets"] if target["health"] == "down"]
        return {target["labels"]["instance"]: target["lastError"] for target in down}

    def raise_if_exited(self) -> None:
        """Raise PodscaleError with the last error of the log if Prometheus has exited."""
        if (code := self._child.poll()) is not None:
            raise PodscaleError(f"exited: {self._directory.last_error()}", field=PROGRAM, got=code)

    def wait_until_ready(self) -> None:
        """Wait until Prometheus answers. Raises PodscaleError if it exits or does not answer in time."""
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while not self._is_ready():
            self.raise_if_exited()
            if time.monotonic() > deadline:
                problem = f"does not answer after {START_TIMEOUT_SECONDS:.0f} s"
                raise PodscaleError(problem, field=f"{PROGRAM} at {self.url}")
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=QUERY_TIMEOUT_SECONDS):
                return True
        except OSError:
            return False

    def _query(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}", timeout=QUERY_TIMEOUT_SECONDS) as answer:
            return json.load(answer)["data"]


@contextmanager
def run_prometheus(
    runs: Path,
    port: int,
    client: ClientCertFiles | None = None,
    *,
    settings: RuleSettings = DEFAULT_SETTINGS,
    intervals: ScrapeIntervals = DEFAULT_INTERVALS,
) -> Iterator[LocalPrometheus]:
    """Run Prometheus inside the context for the runs below `runs`; its samples remain afterwards.

    Args:
        port: Port on 127.0.0.1; 0 for any free one.
        client: Client certificate for endpoints that require one.

    Raises:
        InputError: The program is missing, the port is in use, or another Prometheus serves the same runs.
    """
    program = shutil.which(PROGRAM)
    if program is None:
        raise InputError(
            "not on the PATH",
            field=PROGRAM,
            hint="Install it: `apt-get install prometheus` (Debian, Ubuntu), `brew install prometheus` (macOS), or a "
            "release of the Prometheus project on the PATH.",
        )
    address = f"127.0.0.1:{_check_port(port)}"
    with closing(PrometheusDirectory(runs, client, settings, intervals)) as directory:
        command = [
            program,
            f"--config.file={directory.path / 'prometheus.yml'}",
            f"--storage.tsdb.path={directory.path / 'data'}",
            f"--storage.tsdb.retention.time={RETENTION}",
            f"--web.listen-address={address}",
        ]
        with directory.log.open("wb") as log:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=exit_with_parent,
                start_new_session=True,
            )
        try:
            prometheus = LocalPrometheus(runs, directory, f"http://{address}", child)
            prometheus.wait_until_ready()
            yield prometheus
        finally:
            child.terminate()
            child.wait()


def find_endpoints(runs: Path) -> list[Endpoint]:
    """Return the endpoints served now by `runs` itself and by the runs in it."""
    directories = [RunDirectory(runs), *(RunDirectory(path) for path in sorted(runs.glob("*")))]
    return [endpoint for run in directories if (endpoint := Endpoint.read(run.endpoint)) is not None]


def build_targets(
    endpoints: Iterable[Endpoint], known: Iterable[ScrapeTarget], client: ClientCertFiles | None
) -> list[ScrapeTarget]:
    """Return scrape targets for the endpoints, without TLS endpoints that do not answer yet.

    Args:
        known: Targets of the previous call, which are reused.
        client: Client certificate for endpoints that require one.
    """
    by_endpoint = {target.endpoint: target for target in known}
    targets = []
    for endpoint in endpoints:
        target = by_endpoint.get(endpoint)
        try:
            name = None if target else endpoint.certificate_name(CERTIFICATE_TIMEOUT_SECONDS, client)
        except EndpointError:
            name = None  # Prometheus reports the reason
        except OSError:
            continue
        targets.append(target or ScrapeTarget(endpoint, name))
    return targets


def _scrape_config(target: ScrapeTarget, client: ClientCertFiles | None) -> dict[str, Any]:
    """Return the scrape job of one endpoint; Prometheus sets TLS and credentials per job, not per target."""
    endpoint = target.endpoint
    config: dict[str, Any] = {
        "job_name": f"{JOB_NAME} {endpoint.url}",
        "static_configs": [{"targets": [endpoint.address], "labels": {"job": JOB_NAME}}],
    }
    if endpoint.certificate is not None:
        tls = {"ca_file": str(endpoint.certificate)}
        tls |= {"server_name": target.certificate_name} if target.certificate_name else {}
        tls |= {"cert_file": str(client.certificate), "key_file": str(client.key)} if client else {}
        config |= {"scheme": "https", "tls_config": tls}
    if endpoint.token_file is not None:
        config["authorization"] = {"credentials_file": str(endpoint.token_file)}
    return config


def _open_lock(path: Path) -> int:
    """Return the descriptor of the locked file. Raises InputError if another process holds the lock."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        problem = "another `podscale monitor` uses this directory"
        raise InputError(problem, field=str(path.parent), hint="Use it, or stop it.") from None
    return lock


def _check_port(port: int) -> int:
    """Return the port, or a free one for 0. Raises InputError if it is in use."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            hint = "Another Prometheus may use it. Choose another port, or 0 for any free one."
            raise InputError(str(error.strerror), field="--port", got=port, hint=hint) from error
        return int(probe.getsockname()[1])
