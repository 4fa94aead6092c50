"""Page of the benchmark of control on a large cluster: medians, ratios and slopes of its measurements."""

import json
import threading
from argparse import Namespace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml

from benchmarks.control_scale.cluster import Cluster
from benchmarks.control_scale.page import Level, Results, Waiting, slope, text
from benchmarks.control_scale.runs import Start, Usage
from benchmarks.harness import UNAVAILABLE
from tests.support.fake_cluster import FakeCluster


def usage(requests: float, kilobytes: float) -> Usage:
    return Usage(seconds=30.0, requests=requests, objects=7, bytes=1000 * kilobytes, cpu=1.0, mib=100.0)


def level(others: int, bound: float) -> Level:
    starts = [Start(1.0, bound + extra) for extra in (0.0, 0.25, 40.0)]
    usages = [usage(1, 3), usage(2, 4), usage(60, 400)]
    return Level(others, 10 * others, 0.5, starts, [Start(0.5, bound / 2)], usages, usages, usages, 64, 12.0)


def rows(lines: list[str], first_cell: str) -> list[list[str]]:
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [row for row in cells if row[0] == first_cell]


def test_the_line_through_exact_points_is_found() -> None:
    assert slope([(0, 2), (10, 7), (20, 12)]) == pytest.approx((0.5, 2))
    assert slope([(5, 2), (5, 4)]) == (0.0, 3.0)


def test_the_page_has_medians_ratios_and_extrapolated_slopes() -> None:
    results = Results(levels=[level(0, 4.0), level(100, 6.0)], sizes={16: usage(5, 160)})
    results.waiting = [Waiting("no quota", usage(3, 1), usage(1, 1))]
    lines = text(Namespace(nodes=8, pods=64, launchers=3, seconds=30.0), results)
    starts, launcher, *_ = rows(lines, "100")
    assert starts[1:] == ["6.2", "3.0", "2.08", "5.2", "2.5", "2.10"]
    assert launcher[1:] == ["7, 4", "4.0", "7", "8.0", "64", "4.0", "7", "8.0", "100"]
    assert rows(lines, "seconds from `podscale submit` to all nodes")[0][1:] == ["4.2", "+2.00", "14.2"]
    assert rows(lines, "no quota")[0][1:3] == ["6.0", "2.0"]
    assert rows(lines, "16")[0][1:] == ["7", "160", "10", "100"]


@pytest.mark.parametrize(
    "levels",
    [
        [],
        [Level(0, 10)],
        [Level(0, 10, ours=[Start(1.0, 2.0)])],
        [Level(0, 10, ours=[Start(1.0, 2.0)], plain=[Start(1.0, 2.0)], start=[usage(1, 3)], quiet=[usage(1, 3)])],
        [level(0, 4.0), Level(100, 10)],
    ],
    ids=["sizes", "before the first start", "between two starts", "before the next runs", "in a later level"],
)
def test_what_was_measured_before_an_early_end_has_a_page(levels: list[Level]) -> None:
    results = Results(levels=levels, sizes={16: usage(5, 160)}, remarks=["Ended early."])
    results.queued_ours = [Start(1.0, 2.0)]
    lines = text(Namespace(nodes=8, pods=64, launchers=3, seconds=30.0), results)
    assert "Ended early." in lines
    assert rows(lines, "16")[0][1] == "7"
    assert bool(rows(lines, "memory, MiB")) is any(entry.busy for entry in levels)


def test_a_cluster_that_ended_is_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeCluster().running() as ended:
        kubeconfig = ended.kubeconfig(tmp_path / "kubeconfig")
    with pytest.raises(SystemExit) as error:
        Cluster(kubeconfig)
    assert error.value.code == UNAVAILABLE
    assert str(kubeconfig) in capsys.readouterr().err


class Groups(BaseHTTPRequestHandler):
    """API server with JobSet alone."""

    def do_GET(self) -> None:
        version = {"groupVersion": "jobset.x-k8s.io/v1alpha2", "version": "v1alpha2"}
        answer = json.dumps({"groups": [{"name": "jobset.x-k8s.io", "versions": [version]}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)


def test_a_cluster_without_kueue_is_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kubeconfig = FakeCluster().kubeconfig(tmp_path / "kubeconfig")
    content = yaml.safe_load(kubeconfig.read_text())
    with HTTPServer(("127.0.0.1", 0), Groups) as server:
        content["clusters"][0]["cluster"]["server"] = f"http://127.0.0.1:{server.server_port}"
        kubeconfig.write_text(yaml.safe_dump(content))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(SystemExit) as error:
            Cluster(kubeconfig)
        server.shutdown()
    assert error.value.code == UNAVAILABLE
    err = capsys.readouterr().err
    assert "kueue.x-k8s.io" in err
    assert "make cluster-up" in err
