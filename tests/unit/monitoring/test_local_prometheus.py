"""Requirements of `podscale monitor`, and its errors when one is missing."""

from pathlib import Path

import pytest
import yaml

from podscale.cli import main
from podscale.cli.monitoring import AlertPrinter
from podscale.monitoring import local_prometheus
from podscale.monitoring.local_prometheus import FiringAlert
from tests.support.outcomes import assert_error
from tests.support.refusals import refused


def test_without_the_program_people_learn_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code = main(["monitor", str(tmp_path), "--port", "0"])
    assert_error(code, capsys.readouterr().err, "apt-get install prometheus", field="prometheus")


def test_only_runs_that_serve_are_scraped(tmp_path: Path) -> None:
    for name, text in (("a", "http://0.0.0.0:9464/metrics\n"), ("b", "http://[::1]:1/metrics"), ("c", ""), ("d", None)):
        (tmp_path / name).mkdir()
        if text is not None:
            (tmp_path / name / "metrics.url").write_text(text)
    assert [found.address for found in local_prometheus.find_endpoints(tmp_path)] == ["127.0.0.1:9464", "[::1]:1"]
    assert [found.address for found in local_prometheus.find_endpoints(tmp_path / "a")] == ["127.0.0.1:9464"], "a run"


def test_the_configuration_names_files_wherever_it_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    local_prometheus.PrometheusDirectory(Path("runs")).close()
    written = yaml.safe_load((tmp_path / "runs" / ".prometheus" / "prometheus.yml").read_text())
    assert written["rule_files"] == [str(tmp_path / "runs" / ".prometheus" / "rules.yml")]


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refused(field=tmp_path / "file" / ".prometheus"):
        local_prometheus.PrometheusDirectory(tmp_path / "file")


def test_an_alert_is_printed_once_although_the_value_in_its_summary_changes(capsys: pytest.CaptureFixture[str]) -> None:
    printer = AlertPrinter()
    labels = [frozenset({("alertname", "Stale"), ("run", run)}) for run in ("a", "b")]
    for polled in ([(0, "1m")], [(0, "2m"), (1, "1m")], [(1, "2m")]):
        printer.print_changes({FiringAlert(labels[run], "Stale", age) for run, age in polled}, {}, [])
    assert capsys.readouterr().out.splitlines() == ["ALERT Stale: 1m", "ALERT Stale: 1m", "over  Stale: 2m"]
