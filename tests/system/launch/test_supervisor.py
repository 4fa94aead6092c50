"""Supervisor with real processes: exits of ranks, restarts, and the rendezvous of pods."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

from podscale.runs import Lease
from podscale.telemetry.goodput import read_goodput_state
from tests.support.ports import free_port
from tests.support.supervised import Launch


def test_a_run_to_the_end(launch: Launch) -> None:
    run = launch("launch.threads=3", all="train")
    code, out, err = run.end()
    assert code == 0, err
    lines = [json.loads(line) for line in out.splitlines()]  # a pipe: JSON lines
    assert [line["step"] for line in lines if line["kind"] == "step"] == [1, 2, 3, 4, 5]
    assert "rank 0 of 1 threads 3" in err
    assert "rank 0 of 1" in (run.run_directory / "logs" / "rank-0.log").read_text()
    assert run.outcome()["exit_code"] == 0
    environment = json.loads((run.run_directory / "environment.json").read_text())
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
        (
            "aborted_by_watchdog",
            1,
            "was killed by SIGABRT after its GPU failed (CUDA error: uncorrectable ECC error encountered; see "
            "docs/runbooks/PodscaleGPUXid.md); the same command continues from the newest checkpoint",
        ),
        ("peer_lost", 77, "error: rank 1 does not answer"),
    ],
)
def test_the_run_has_the_exit_code_and_error_of_its_rank(
    launch: Launch, behaviour: str, code: int, message: str
) -> None:
    run = launch(all=behaviour)
    returned, _, err = run.end()
    assert returned == code, err
    assert err.splitlines()[-1].endswith(message)
    assert run.outcome()["exit_code"] == code
    assert str(run.outcome()["error"]) in err


def test_a_failed_gpu_of_an_earlier_launch_is_not_the_cause(launch: Launch) -> None:
    launch(all="aborted_by_watchdog").end()
    code, _, err = launch(all="aborted").end()
    assert code == 1
    assert "SIGABRT" in err.splitlines()[-1]


def test_kill_9_of_one_of_two_ranks_names_it(launch: Launch) -> None:
    run = launch("launch.processes=2", module="torch_rank")
    run.wait_for_ranks(2)
    os.kill(int((run.run_directory / "ready-1").read_text()), signal.SIGKILL)
    code, _, err = run.end(60)
    assert code == 77, err
    assert re.match(r"error: rank 1 \(process \d+\)\D*SIGKILL", err.splitlines()[-1])
    assert "rank 1" in str(run.outcome()["error"])
    assert run.members() == []


def test_the_error_is_that_of_the_failed_rank_and_not_of_its_peer(launch: Launch) -> None:
    run = launch("launch.processes=2", _0="peer_lost", _1="bug")
    code, _, err = run.end()
    assert code == 1
    assert err.splitlines()[-1].endswith("rank 1: RuntimeError: index 3 is out of bounds")


def test_a_lost_rank_is_restarted_and_counted(launch: Launch) -> None:
    run = launch("launch.max_restarts=1", all="killed_once")
    code, out, err = run.end()
    assert code == 0, err
    events = [json.loads(line) for line in out.splitlines()]
    assert [event["cause"] for event in events if event.get("event") == "restart"] == ["lost_rank"]
    assert err.count("restarting") == 1
    book = read_goodput_state(run.run_directory / ".heartbeat")
    assert book is not None
    assert (book.launch, book.exit_cause) == (2, "done")
    assert {cause: count for cause, count in book.restarts.items() if count} == {"lost_rank": 1}


def test_restarts_are_limited(launch: Launch) -> None:
    run = launch("launch.max_restarts=2", all="killed")
    code, _, err = run.end()
    assert code == 77
    assert err.count("restarting") == 2
    last = json.loads((run.run_directory / "telemetry.json").read_text())["train"]["series"]
    launches = {name: value for name, value in last.items() if name.startswith("podscale_train_")}
    assert list(launches.values()) == [3], "no rank could report anything, so their parent does"
    assert next(iter(launches)).startswith("podscale_train_launches_total{")


def test_a_second_run_of_the_same_directory_is_refused(launch: Launch) -> None:
    first = launch(all="stubborn")
    first.wait_for_ranks(1)
    before = {
        name: (first.run_directory / name).read_text() for name in ("environment.json", "outcome.json", "config.yaml")
    }
    second = launch("launch.max_restarts=7", all="train")
    code, _, err = second.end()
    assert code == 2
    assert f"process {first.process.pid}" in err.splitlines()[-1]
    assert first.process.poll() is None
    assert before == {name: (first.run_directory / name).read_text() for name in before}


def test_a_pod_waits_for_the_one_that_it_replaces(launch: Launch, tmp_path: Path) -> None:
    """A pod that was deleted by force is replaced while its processes still save."""
    run_directory = tmp_path / "runs" / "t"
    run_directory.mkdir(parents=True)
    with Lease.acquire(run_directory / ".lease"):
        run = launch(all="train", variables={"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
        assert run.process.stderr is not None
        assert any(f"process {os.getpid()}" in line for line in run.process.stderr)
    assert run.end()[0] == 0


def test_a_launcher_that_cannot_start_reports_why(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "hidden" / "torch").mkdir(parents=True)
    (tmp_path / "hidden" / "torch" / "__init__.py").write_text("raise ImportError('no torch on this machine')")
    run = launch("launch.processes=2", module="", python_path=tmp_path / "hidden")
    code, _, err = run.end()
    assert code == 1
    assert err.splitlines()[-1] == "ImportError: no torch on this machine"


@pytest.mark.parametrize("elastic", [False, True])
def test_two_pods_rendezvous_by_the_variables_of_their_launcher(launch: Launch, elastic: bool) -> None:
    """Two supervisors as in two pods of a PyTorchJob: static with node ranks, or c10d without them."""
    rendezvous = _c10d_pods if elastic else _static_pods
    pods = [
        launch("launch.processes=0", "telemetry.trackers=[tensorboard]", variables=variables, all="train")
        for variables in rendezvous()
    ]
    ends = [pod.end() for pod in pods]
    assert [code for code, _, _ in ends] == [0, 0], ends
    run_directory = pods[0].run_directory
    for rank in range(2):
        log = (run_directory / "logs" / f"rank-{rank}.log").read_text()
        assert f"rank {rank} of 2" in log
        assert "start-up supervisor imports rendezvous\n" in log, "the parts that ended before the rank's own program"
    assert pods[0].outcome()["exit_code"] == 0
    assert json.loads((run_directory / ".lease").read_text())["number"] == 1  # one lease for the whole job
    assert len(list((run_directory / "tensorboard").iterdir())) == 1, "only one pod runs the trackers"


def test_torchrun_records_how_a_rank_was_lost(launch: Launch) -> None:
    pods = [
        launch("launch.processes=0", variables=variables, _0="peer_lost", _1="segfault") for variables in _static_pods()
    ]
    (first, *_), (second, _, err) = [pod.end() for pod in pods]
    assert (first, second) == (77, 1)
    assert "SIGSEGV" in err.splitlines()[-1]


@pytest.mark.slow
def test_a_rank_that_torchrun_started_again_is_not_lost(launch: Launch) -> None:
    pods = [
        launch("launch.processes=0", "launch.max_restarts=1", variables=variables, _0="hundred", _1="killed_once")
        for variables in _c10d_pods()
    ]
    ends = [pod.end() for pod in pods]
    assert (pods[0].run_directory / "once").exists()
    assert [code for code, _, _ in ends] == [0, 0], ends


def _static_pods() -> list[dict[str, str]]:
    """Return the variables of two pods that know their node ranks."""
    rendezvous = {"PET_NNODES": "2", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(free_port())}
    return [rendezvous | {"PET_NODE_RANK": str(node), "PET_NPROC_PER_NODE": "1"} for node in range(2)]


def _c10d_pods() -> list[dict[str, str]]:
    """Return the variables of two pods that get their node ranks from torchrun's rendezvous."""
    rendezvous = {"PET_NNODES": "2:2", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": f"127.0.0.1:{free_port()}"}
    return [rendezvous | {"PET_RDZV_ID": "t", "PET_NPROC_PER_NODE": "1"}] * 2


@pytest.mark.slow
def test_a_pod_without_the_first_pod_reports_what_it_waits_for_and_exits_on_sigterm(launch: Launch) -> None:
    rendezvous = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "1"}
    rendezvous |= {"PET_MASTER_ADDR": "t-worker-0.invalid", "PET_MASTER_PORT": "23456"}
    pod = launch("launch.processes=0", variables=rendezvous, all="train")
    assert pod.process.stderr is not None
    message = next(line for line in pod.process.stderr if line.startswith("waiting"))
    assert "t-worker-0.invalid" in message
    pod.process.terminate()
    code, _, err = pod.end()
    assert (code, pod.members()) == (75, []), err
