"""Metrics of ranks that a supervisor serves, also to a real Prometheus, and a run that cannot serve them."""

import json
import socket
import time
from pathlib import Path

from tests.support.ports import free_port
from tests.support.prometheus import Prometheus, prometheus
from tests.support.supervised import Launch


def test_a_port_in_use_is_reported_before_any_rank_starts(launch: Launch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        port = occupied.getsockname()[1]
        run = launch(f"telemetry.port={port}", "telemetry.required=true", all="train")
        code, _, err = run.end()
    assert code == 2
    assert "telemetry.port" in err.splitlines()[-1]
    assert str(port) in err.splitlines()[-1]
    assert not (run.run_directory / "logs").exists()
    assert run.outcome()["exit_code"] == 2


def test_training_goes_on_without_metrics_unless_they_are_required(launch: Launch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        port = occupied.getsockname()[1]
        run = launch(f"telemetry.port={port}", all="train")
        code, _, err = run.end()
    assert code == 0, err
    assert any("telemetry.port" in line and str(port) in line for line in err.splitlines()), err
    assert not (run.run_directory / "metrics.url").exists()
    assert run.outcome()["exit_code"] == 0


def test_certificates_that_cannot_be_used_are_bad_input(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "pem").write_text("no certificate")
    options = [f"telemetry.tls_certificate={tmp_path}/pem", f"telemetry.tls_key={tmp_path}/missing"]
    run = launch(*options, all="train")
    code, _, err = run.end()
    assert code == 2, err
    last = err.splitlines()[-1]
    assert [part for part in ("telemetry.tls_key", f"{tmp_path}/missing") if part not in last] == [], last
    assert not (run.run_directory / "ready-0").exists()


def test_the_last_metrics_are_kept_after_the_endpoint_closes(launch: Launch) -> None:
    run = launch("launch.processes=2", all="train")
    assert run.end(120)[0] == 0
    series = json.loads((run.run_directory / "telemetry.json").read_text())["train"]["series"]
    assert series['podscale_train_images_total{rank="1",run="t"}'] == 5 * 32
    assert series['podscale_train_loss{rank="0",run="t"}'] == 1 / 5


def test_a_real_prometheus_scrapes_both_ranks(launch: Launch, tmp_path: Path) -> None:
    port = free_port()
    run = launch("launch.processes=2", f"telemetry.port={port}", "telemetry.linger_seconds=20", all="hundred")
    with prometheus(tmp_path / "data", [{"targets": [f"127.0.0.1:{port}"]}], "250ms") as server:
        images = 'podscale_train_images_total{run="t"}'
        run.wait_for(lambda: 0 < min(by_rank(server, images).values(), default=0) < 3200)
        assert by_rank(server, 'up{job="podscale"}') == {"": 1.0}
        rate = "sum by (run) (rate(podscale_train_images_total[5s]))"
        run.wait_for(lambda: by_rank(server, rate).get("", 0) > 0)  # a rate needs two scrapes
        code, _, err = run.end()
        assert code == 0, err
        # It lingered for the last scrape: the final counts of both ranks are known to Prometheus.
        assert by_rank(server, f"max_over_time({images}[1m])") == {"0": 3200.0, "1": 3200.0}
        assert set(by_rank(server, "max_over_time(podscale_train_loss[1m])")) == {"0"}
        phases = by_rank(server, 'max_over_time(podscale_train_phase_seconds_total{phase="forward_backward"}[1m])')
        assert min(phases.values()) >= 100 * 0.05


def by_rank(server: Prometheus, expression: str) -> dict[str, float]:
    samples = server.instant(expression, time.time())
    return {entry["metric"].get("rank", ""): float(entry["value"][1]) for entry in samples}
