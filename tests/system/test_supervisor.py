"""The supervisor with real processes: how ranks end, how it is stopped, and that it leaves nobody behind."""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from podscale.rundir import Lease
from podscale.telemetry.heartbeat import read_book
from tests.support.supervised import Launch


def test_a_run_to_the_end(launch: Launch) -> None:
    run = launch("launch.threads=3", all="train")
    code, out, err = run.end()
    assert code == 0, err
    lines = [json.loads(line) for line in out.splitlines()]  # a pipe: JSON lines
    assert [line["step"] for line in lines if line["kind"] == "step"] == [1, 2, 3, 4, 5]
    assert "rank 0 of 1 threads 3" in err
    assert "rank 0 of 1" in (run.place / "logs" / "rank-0.log").read_text()
    assert run.outcome()["exit_code"] == 0
    environment = json.loads((run.place / "environment.json").read_text())
    assert environment["packages"]["numpy"]
    assert environment["processes"] == 1
    assert run.members() == []


@pytest.mark.parametrize(
    ("behaviour", "code", "message"),
    [
        ("bad_input", 2, "error: the class map is wrong: run podscale shard again"),
        ("bug", 1, "error: rank 0: RuntimeError: index 3 is out of bounds"),
        ("exits", 1, "error: rank 0: exit code 3"),
        ("killed", 77, "was killed by SIGKILL; the same command continues from the newest checkpoint"),
        ("segfault", 1, "was killed by SIGSEGV; the same command continues from the newest checkpoint"),
        ("peer_lost", 77, "error: rank 1 does not answer"),
    ],
)
def test_how_a_rank_ends_is_how_the_run_ends(launch: Launch, behaviour: str, code: int, message: str) -> None:
    run = launch(all=behaviour)
    returned, _, err = run.end()
    assert returned == code, err
    assert err.splitlines()[-1].endswith(message)
    assert run.outcome()["exit_code"] == code
    assert str(run.outcome()["error"]) in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_request_lets_the_rank_save(launch: Launch, number: signal.Signals) -> None:
    run = launch(all="long")
    run.wait_for(lambda: (run.place / "metrics.jsonl").exists())
    run.process.send_signal(number)
    code, _, err = run.end(20)
    assert code == 75
    assert "stopped on request" in err.splitlines()[-1]
    assert run.members() == []


def test_a_stop_before_training_begins_loses_nothing(launch: Launch) -> None:
    run = launch("launch.processes=2", all="long")
    run.wait_for(lambda: (run.place / "environment.json").exists())
    run.process.terminate()
    code, _, err = run.end(30)
    assert code == 75, err
    assert run.members() == []


def test_a_rank_that_ignores_the_stop_is_killed_after_the_grace_time(launch: Launch) -> None:
    run = launch("launch.grace_seconds=1", all="stubborn")
    run.wait_for_ranks(1)
    started = time.monotonic()
    run.process.terminate()
    code, _, err = run.end(20)
    assert time.monotonic() - started >= 1
    assert code == 1
    assert "within launch.grace_seconds=1" in err.splitlines()[-1]
    assert run.members() == []


def test_a_second_interrupt_does_not_wait(launch: Launch) -> None:
    run = launch("launch.grace_seconds=600", all="stubborn")
    run.wait_for_ranks(1)
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    run.process.send_signal(signal.SIGINT)
    code, _, _ = run.end(20)
    assert code == 1


def test_kill_9_of_the_supervisor_leaves_no_rank(launch: Launch) -> None:
    run = launch("launch.processes=2", all="stubborn")
    run.wait_for_ranks(2)
    assert len(run.members()) >= 4  # supervisor, torchrun, two ranks
    run.process.kill()
    run.process.communicate()  # returns only when nobody holds our pipes any more
    deadline = time.monotonic() + 10
    while run.members() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert run.members() == []
    Lease.acquire(run.place / ".lease").release()


def test_processes_that_ranks_started_end_too(launch: Launch) -> None:
    run = launch(all="with_grandchild")
    run.wait_for_ranks(1)
    (rank,) = [
        pid
        for pid in run.members()
        if b"plain_rank" in Path(f"/proc/{pid}/cmdline").read_bytes()
        and b"rankprocess" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(rank, signal.SIGKILL)
    assert run.end(20)[0] == 77
    assert run.members() == []


def test_kill_9_of_one_of_two_ranks_names_it(launch: Launch) -> None:
    run = launch("launch.processes=2", module="torch_rank")
    run.wait_for_ranks(2)
    os.kill(int((run.place / "ready-1").read_text()), signal.SIGKILL)
    code, _, err = run.end(60)
    assert code == 77, err
    assert err.splitlines()[-1].startswith("error: rank 1 (process ")
    assert "was killed by SIGKILL" in err.splitlines()[-1]
    assert "rank 1" in str(run.outcome()["error"])
    assert run.members() == []


def test_two_ranks_under_torchrun_stop_on_request(launch: Launch) -> None:
    run = launch("launch.processes=2", all="long")
    run.wait_for(lambda: (run.place / "metrics.jsonl").exists())
    run.process.terminate()
    code, _, err = run.end(60)
    assert code == 75, err
    assert "stopped" in err.splitlines()[-1]


def test_the_culprit_speaks_not_its_peer(launch: Launch) -> None:
    run = launch("launch.processes=2", _0="peer_lost", _1="bug")
    code, _, err = run.end()
    assert code == 1
    assert err.splitlines()[-1] == "error: rank 1: RuntimeError: index 3 is out of bounds"


def test_a_lost_rank_is_restarted_and_counted(launch: Launch) -> None:
    run = launch("launch.max_restarts=1", all="killed_once")
    code, out, err = run.end()
    assert code == 0, err
    events = [json.loads(line) for line in out.splitlines()]
    assert [event["cause"] for event in events if event.get("event") == "restart"] == ["lost_rank"]
    assert "restarting (0 more)" in err
    book = read_book(run.place / ".heartbeat")
    assert book is not None
    assert (book.life, book.ended) == (2, "done")
    assert {cause: count for cause, count in book.restarts.items() if count} == {"lost_rank": 1}


def test_restarts_end(launch: Launch) -> None:
    run = launch("launch.max_restarts=2", all="killed")
    code, _, err = run.end()
    assert code == 77
    assert err.count("restarting") == 2


def test_a_taken_port_is_known_before_anything_starts(launch: Launch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = launch(f"telemetry.port={port}", "telemetry.required=true", all="train")
        code, _, err = run.end()
    assert code == 2
    assert f"telemetry.port {port}: another program listens there" in err.splitlines()[-1]
    assert not (run.place / "logs").exists()
    assert run.outcome()["exit_code"] == 2


def test_training_goes_on_without_metrics_unless_they_are_required(launch: Launch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = launch(f"telemetry.port={port}", all="train")
        code, _, err = run.end()
    assert code == 0, err
    assert f"no metrics are served: telemetry.port {port} on 127.0.0.1 is in use" in err
    assert not (run.place / "metrics.url").exists()
    assert run.outcome()["exit_code"] == 0


def test_certificates_that_cannot_be_used_are_bad_input(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "pem").write_text("no certificate")
    options = [f"telemetry.tls_certificate={tmp_path}/pem", f"telemetry.tls_key={tmp_path}/missing"]
    run = launch(*options, all="train")
    code, _, err = run.end()
    assert code == 2, err
    assert f"telemetry.tls_key {tmp_path}/missing: No such file or directory" in err.splitlines()[-1]
    assert not (run.place / "ready-0").exists()


def test_the_last_figures_outlive_the_endpoint(launch: Launch) -> None:
    run = launch("launch.processes=2", all="train")
    assert run.end(120)[0] == 0
    told = json.loads((run.place / "telemetry.json").read_text())["train"]["series"]
    assert told['podscale_train_images_total{rank="1",run="t"}'] == 5 * 32
    assert told['podscale_train_loss{rank="0",run="t"}'] == 1 / 5


def test_a_second_run_of_the_same_directory_is_refused(launch: Launch) -> None:
    first = launch(all="stubborn")
    first.wait_for_ranks(1)
    before = {name: (first.place / name).read_text() for name in ("environment.json", "outcome.json", "config.yaml")}
    second = launch("launch.max_restarts=7", all="train")
    code, _, err = second.end()
    assert code == 2
    assert f"is being written by process {first.process.pid}" in err.splitlines()[-1]
    assert first.process.poll() is None
    assert before == {name: (first.place / name).read_text() for name in before}


def test_a_launcher_that_cannot_start_says_why(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "hidden" / "torch").mkdir(parents=True)
    (tmp_path / "hidden" / "torch" / "__init__.py").write_text("raise ImportError('no torch on this machine')")
    run = launch("launch.processes=2", python_path=tmp_path / "hidden", all="train")
    code, _, err = run.end()
    assert code == 1
    assert "the ranks could not be started" in err
    assert err.splitlines()[-1] == "ImportError: no torch on this machine"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize("elastic", [False, True])
def test_two_pods_meet_by_the_launchers_variables(launch: Launch, elastic: bool) -> None:
    """Two supervisors as in two pods of a PyTorchJob: static with node ranks, or c10d where nobody knows its rank."""
    port = str(free_port())
    pods = []
    for node in range(2):
        if elastic:
            meeting = {"PET_NNODES": "2:2", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": f"127.0.0.1:{port}"}
            meeting |= {"PET_RDZV_ID": "t", "PET_NPROC_PER_NODE": "1"}
        else:
            meeting = {"PET_NNODES": "2", "PET_NODE_RANK": str(node), "PET_MASTER_ADDR": "127.0.0.1"}
            meeting |= {"PET_MASTER_PORT": port, "PET_NPROC_PER_NODE": "1"}
        pods.append(launch("launch.processes=0", "telemetry.trackers=[tensorboard]", variables=meeting, all="train"))
    ends = [pod.end() for pod in pods]
    assert [code for code, _, _ in ends] == [0, 0], ends
    place = pods[0].place
    for rank in range(2):
        assert f"rank {rank} of 2" in (place / "logs" / f"rank-{rank}.log").read_text()
    assert pods[0].outcome()["exit_code"] == 0
    assert json.loads((place / ".lease").read_text())["number"] == 1  # one lease for the whole job
    assert len(list((place / "tensorboard").iterdir())) == 1, "the pod that leads has the trackers"


PROMETHEUS = """
global: {scrape_interval: 250ms, scrape_timeout: 250ms}
scrape_configs: [{job_name: podscale, static_configs: [{targets: ["127.0.0.1:PORT"]}]}]
"""


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Callable[[int], str]]:
    """Starts a real Prometheus that scrapes a port; gives its address."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed (Debian package prometheus)")
    servers = []

    def start(target: int) -> str:
        own = free_port()
        (tmp_path / "prometheus.yml").write_text(PROMETHEUS.replace("PORT", str(target)))
        options = ["config.file=prometheus.yml", "storage.tsdb.path=tsdb", f"web.listen-address=127.0.0.1:{own}"]
        servers.append(
            subprocess.Popen(
                ["prometheus", *(f"--{option}" for option in options)], cwd=tmp_path, stderr=subprocess.DEVNULL
            )
        )
        return f"http://127.0.0.1:{own}"

    yield start
    for server in servers:
        server.terminate()
        server.wait()


def query(server: str, expression: str) -> dict[str, float]:
    """Values by rank; empty while the server is starting."""
    url = f"{server}/api/v1/query?query={urllib.parse.quote(expression)}"
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            result = json.load(answer)["data"]["result"]
    except (urllib.error.URLError, ConnectionError):
        return {}
    return {entry["metric"].get("rank", ""): float(entry["value"][1]) for entry in result}


def test_a_real_prometheus_scrapes_both_ranks(launch: Launch, prometheus: Callable[[int], str]) -> None:
    port = free_port()
    run = launch("launch.processes=2", f"telemetry.port={port}", "telemetry.linger_seconds=20", all="hundred")
    server = prometheus(port)
    images = 'podscale_train_images_total{run="t"}'
    run.wait_for(lambda: 0 < min(query(server, images).values(), default=0) < 3200)
    assert query(server, 'up{job="podscale"}') == {"": 1.0}
    rate = "sum by (run) (rate(podscale_train_images_total[5s]))"
    run.wait_for(lambda: query(server, rate).get("", 0) > 0)  # a rate needs two scrapes
    code, _, err = run.end()
    assert code == 0, err
    # It lingered for the last scrape: the final counts of both ranks are known to Prometheus.
    assert query(server, f"max_over_time({images}[1m])") == {"0": 3200.0, "1": 3200.0}
    assert set(query(server, "max_over_time(podscale_train_loss[1m])")) == {"0"}
    phases = query(server, 'max_over_time(podscale_train_phase_seconds_total{phase="forward_backward"}[1m])')
    assert min(phases.values()) >= 100 * 0.05


def test_what_is_served_is_clean_to_promtool(launch: Launch) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian package prometheus)")
    port = free_port()
    run = launch(f"telemetry.port={port}", all="long")
    run.wait_for(lambda: (run.place / "metrics.jsonl").exists())
    time.sleep(1.1)  # one rendering later
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        text = answer.read()
    assert b"podscale_train_images_total" in text
    check = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True)
    assert (check.returncode, check.stdout + check.stderr) == (0, b"")
