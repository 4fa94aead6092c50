"""`podscale monitor`: a real Prometheus, with our rules, scrapes the endpoints of runs."""

import json
import shutil
import signal
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from podscale.config.telemetry import TelemetrySection
from podscale.monitoring.rule_files import ALERT_RULES
from podscale.telemetry.endpoint import Endpoint
from podscale.telemetry.pod_telemetry import StageTelemetry
from podscale.telemetry.server import MetricsServer
from tests.support.certificates import Authority
from tests.support.commands import TIMEOUT_SECONDS, Command, podscale
from tests.support.outcomes import assert_error
from tests.support.polling import until

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed (Debian: apt-get install prometheus)"
)
NONFINITE = 'podscale_train_nonfinite_steps_total{run="r",rank="0",kind="loss"} 1\n'


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Path]:
    """Folder with one run that serves metrics."""
    folder = tmp_path / "runs"
    (folder / "r").mkdir(parents=True)
    server = MetricsServer("127.0.0.1", 0, NONFINITE.encode).start()
    (folder / "r" / "metrics.url").write_text(server.url)
    yield folder
    server.close()


def ask(url: str, path: str, **query: str) -> Any:
    with urllib.request.urlopen(f"{url}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=30) as answer:
        return json.load(answer)["data"]


def test_runs_are_scraped_and_our_rules_are_loaded(runs: Path) -> None:
    command = Command(runs.parent, "monitor", "--port", "0")
    try:
        assert command.process.stdout is not None
        url = command.process.stdout.readline().split()[2].rstrip(",")
        until(lambda: ask(url, "query", query="podscale_train_nonfinite_steps_total")["result"], TIMEOUT_SECONDS)
        loaded = {rule["name"] for group in ask(url, "rules")["groups"] for rule in group["rules"]}
        assert {alert.name for alert in ALERT_RULES} <= loaded
        (runs / "r" / "metrics.url").unlink()  # the run has ended
        until(lambda: not ask(url, "targets", state="active")["activeTargets"], TIMEOUT_SECONDS)
        command.process.send_signal(signal.SIGTERM)  # a shell's background jobs ignore SIGINT
        ended = command.end()  # no process of it is left, Prometheus included
    finally:
        command.kill()
    assert ended.code == 0, ended.err
    assert (runs / ".prometheus" / "data").is_dir()


def test_a_port_in_use_is_one_readable_error(runs: Path) -> None:
    port = (runs / "r" / "metrics.url").read_text().rsplit(":", 1)[1].partition("/")[0]
    ended = podscale(runs.parent, "monitor", "--port", port)
    assert_error(ended.code, ended.err, port, field="--port")


def test_a_second_monitor_of_the_same_runs_is_refused(runs: Path) -> None:
    first = Command(runs.parent, "monitor", "--port", "0")
    try:
        assert first.process.stdout is not None
        assert "http://" in first.process.stdout.readline()
        second = podscale(runs.parent, "monitor", "--port", "0")
    finally:
        first.kill()
    assert_error(second.code, second.err, field=runs / ".prometheus")


def test_endpoints_with_tls_and_tokens_are_scraped(tmp_path: Path) -> None:
    """One Prometheus for runs that each serve in another way; the run that it cannot scrape is reported."""
    authority = Authority(tmp_path)
    pair, client = authority.sign("server", name="node-7.example"), authority.sign("me")
    (tmp_path / "token").write_text("s3cret\n")
    tls = {"tls_certificate": str(pair.certificate), "tls_key": str(pair.key)}
    token = {"bearer_token_file": str(tmp_path / "token")}
    ways = {
        "plain": {},
        "tls": tls,
        "token": token,
        "both": tls | token,
        "mutual": tls | {"tls_client_ca": str(authority.pair.certificate)},
        "broken": token,
    }
    shown = ("--client-certificate", str(client.certificate), "--client-key", str(client.key))
    command = Command(tmp_path, "monitor", "--port", "0", *shown)
    with ExitStack() as stack:
        stack.callback(command.kill)
        assert command.process.stdout is not None
        url = command.process.stdout.readline().split()[2].rstrip(",")
        for name, options in ways.items():  # while it runs: its configuration must change
            (tmp_path / "runs" / name).mkdir()
            section = TelemetrySection.model_validate(options)
            served = stack.enter_context(StageTelemetry(section, run=name, stage="train", volumes={}))
            served.start(tmp_path / "runs" / name / "metrics.url")
        (tmp_path / "other").write_text("wrong\n")
        broken = Endpoint(served.url or "", token_file=tmp_path / "other")
        broken.write(tmp_path / "runs" / "broken" / "metrics.url")

        def scraped() -> set[str]:
            samples = ask(url, "query", query='podscale_build_info{job="podscale"}')["result"]
            return {series["metric"]["run"] for series in samples}

        until(lambda: scraped() == ways.keys() - {"broken"}, TIMEOUT_SECONDS)
        for line in command.process.stdout:
            if line.startswith(broken.address):
                break
    assert "401" in line
