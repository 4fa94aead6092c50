"""Real Prometheus for tests, filled with history or scraping, queried over HTTP."""

import json
import shutil
import signal
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml


def program(name: str = "prometheus") -> str:
    """Return `prometheus` or `promtool` from the PATH; skip the test if it is missing."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not on the PATH; Debian and Ubuntu have it in the package prometheus")
    return path


def fill(directory: Path, openmetrics: str) -> None:
    """Write samples with their times into the data directory of a Prometheus that is not running."""
    text = directory.with_suffix(".openmetrics")
    text.write_text(openmetrics, encoding="utf-8")
    command = [program("promtool"), "tsdb", "create-blocks-from", "openmetrics", str(text), str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout


class Prometheus:
    """One server at `url`."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **parameters: str | float) -> Any:
        """Return `data` of an API response. Raises AssertionError with Prometheus' message if it is an error."""
        address = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(address, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None

    def instant(self, query: str, at: float) -> list[dict[str, Any]]:
        result: list[dict[str, Any]] = self.get("query", query=query, time=at)["result"]
        return result

    def course(self, query: str, begin: float, end: float, step: float) -> list[dict[str, Any]]:
        result: list[dict[str, Any]] = self.get("query_range", query=query, start=begin, end=end, step=step)["result"]
        return result


@contextmanager
def prometheus(
    data: Path,
    targets: Sequence[Mapping[str, Any]] = (),
    interval: str = "1s",
    relabeling: Sequence[Mapping[str, Any]] = (),
) -> Iterator[Prometheus]:
    """Run a server on `data` (created if missing) that scrapes `targets` (static_configs), inside the context."""
    scrape = {"job_name": "podscale", "scrape_interval": interval, "static_configs": [*targets]}
    scrapes = [{**scrape, "relabel_configs": [*relabeling]}]
    config = data.with_suffix(".yaml")
    config.write_text(yaml.safe_dump({"scrape_configs": scrapes if targets else []}), encoding="utf-8")
    log = data.with_suffix(".log")
    command = [program(), f"--config.file={config}", f"--storage.tsdb.path={data}", "--web.listen-address=127.0.0.1:0"]
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, "--storage.tsdb.retention.time=10y"], stdout=out, stderr=subprocess.STDOUT
        )
    try:
        yield Prometheus(_ready(process, log))
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ready(process: subprocess.Popen[bytes], log: Path) -> str:
    """Wait until the server answers, and return its address."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        lines = [line for line in log.read_text().splitlines() if "Listening on" in line]
        if lines:
            url = "http://" + lines[0].split("address=")[1].split()[0].strip('"')
            try:
                with urllib.request.urlopen(f"{url}/-/ready", timeout=5):
                    return url
            except OSError:
                pass
        time.sleep(0.1)
    raise AssertionError(f"Prometheus is not ready after a minute: {log.read_text()}")
