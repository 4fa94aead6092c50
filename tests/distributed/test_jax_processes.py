"""Real processes of JAX, started as in a run: they meet, agree, and those that are left name who was lost."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from podscale.config import load
from podscale.launch.outcomes import RankOutcome, read_rank_outcomes, registered_ranks
from tests.conftest import MakeShardSet
from tests.support.jax_bodies import DIES_AT
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT, SHORT = 120.0, 40.0
"""The longest that ranks wait for each other, in seconds; the short one where a test waits for it to pass."""
PATIENCE = 300.0
"""Seconds for anything to happen on a loaded machine."""


@dataclass(frozen=True)
class Ended:
    """How the ranks of a world ended, and what they said; `seconds` since one of them was hit."""

    code: int
    out: str
    outcomes: dict[int, RankOutcome]
    answers: dict[int, Any]
    seconds: float


Start = Callable[..., Ended]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(processes, module, pods=1, **variables): a spawner for each pod with its ranks, to their end."""
    spawners: list[subprocess.Popen[str]] = []

    def run(processes: int, module: str, *, pods: int = 1, **variables: str) -> Ended:
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "OMP_NUM_THREADS": "1",
            "PODSCALE_RANK_DIR": str(tmp_path),
            "PODSCALE_STAGE": "train",
            "PODSCALE_FENCE": "1",
            "PODSCALE_TEST_TIMEOUT": str(TIMEOUT),
            **variables,
        }
        environment.pop("PODSCALE_SUPERVISOR", None)
        port = free_port() if pods > 1 else 0
        for pod in range(pods):
            options = {"processes": processes, "nodes": pods, "node-rank": pod, "slices": 1}
            options |= {"address": "127.0.0.1", "port": port}
            command = [sys.executable, "-m", "podscale.launch.spawner", *(f"--{k}={v}" for k, v in options.items())]
            command.append(module)
            spawners.append(
                subprocess.Popen(
                    command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
                )
            )
        hit = _await_end(spawners, tmp_path, pods * processes)
        out = "".join(spawner.communicate(timeout=PATIENCE)[0] for spawner in spawners)
        answers = {
            int(path.stem.partition("-")[2]): json.loads(path.read_text()) for path in tmp_path.glob("answer-*.json")
        }
        code = max(spawner.returncode for spawner in spawners)
        return Ended(code, out, read_rank_outcomes(tmp_path), answers, time.monotonic() - hit)

    yield run
    for pid in registered_ranks(tmp_path).values():
        if (Path("/proc") / str(pid)).exists():
            os.kill(pid, signal.SIGKILL)
    for spawner in spawners:
        spawner.kill()
        spawner.communicate()


def _await_end(spawners: list[subprocess.Popen[str]], place: Path, ranks: int) -> float:
    """Returns when all ranks but a stopped one, which is then killed, have ended; when one of them was hit."""
    deadline, hit = time.monotonic() + PATIENCE, time.monotonic()
    seen = False
    while any(spawner.poll() is None for spawner in spawners):
        assert time.monotonic() < deadline, [spawner.communicate() for spawner in spawners if not spawner.kill()]
        pids = registered_ranks(place)
        if not seen and (place / "hit").exists():
            seen, hit = True, time.monotonic()
        if len(read_rank_outcomes(place)) == ranks - 1 and (place / "hit").exists() and len(pids) == ranks:
            (left,) = set(pids) - set(read_rank_outcomes(place))
            with suppress(ProcessLookupError):
                os.kill(pids[left], signal.SIGKILL)
            break
        time.sleep(0.02)
    return hit


def body(name: str) -> dict[str, str]:
    return {"PODSCALE_TEST_BODY": f"tests.support.jax_bodies:{name}"}


@pytest.mark.parametrize(("pods", "processes", "devices"), [(1, 2, 1), (2, 1, 2), (2, 2, 1)])
def test_processes_meet(start: Start, pods: int, processes: int, devices: int) -> None:
    """In one pod and in two, with one device each and with two."""
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    ended = start(processes, "tests.support.jax_rank", pods=pods, **body("meets"), **flags)
    assert ended.code == 0, ended.out
    size = pods * processes
    of_devices = [rank for rank in range(size) for _ in range(devices)]
    assert sorted(ended.answers) == list(range(size))
    for rank, told in ended.answers.items():
        assert told == {
            "rank": rank,
            "size": size,
            "ranks": list(range(rank * devices, (rank + 1) * devices)),
            "devices": of_devices,
            "mine": [rank] * devices,
            "told": {"seed": 7},
            "gathered": [other**2 for other in range(size)],
            "hosts": size,
            "sum": devices * size * (size + 1) / 2,
        }
    assert {outcome.exit_code for outcome in ended.outcomes.values()} == {0}


@pytest.mark.parametrize(
    ("victim", "number"),
    [(0, signal.SIGKILL), (1, signal.SIGKILL), (0, signal.SIGSTOP), (1, signal.SIGSTOP)],
)
def test_the_others_name_who_was_lost(start: Start, tmp_path: Path, victim: int, number: signal.Signals) -> None:
    """Process 0 is where JAX's own service lives: with it JAX would end the others by SIGABRT."""
    stopped = number is signal.SIGSTOP
    variables = {"PODSCALE_TEST_VICTIM": str(victim), "PODSCALE_TEST_SIGNAL": str(int(number))}
    variables["PODSCALE_TEST_TIMEOUT"] = str(SHORT if stopped else TIMEOUT)
    ended = start(3, "tests.support.jax_rank", **body("loses"), **variables)
    pid = (tmp_path / "hit").read_text()
    assert sorted(ended.outcomes) == [rank for rank in range(3) if rank != victim], ended.out
    for rank, outcome in ended.outcomes.items():
        first = outcome.error.splitlines()[0]
        assert outcome.exit_code == (76 if stopped else 77), outcome.error
        assert first.startswith(f"rank {rank} of 3 {'waited in vain for its peers' if stopped else 'lost a peer'} in ")
        assert f"rank {victim} {'is stopped' if stopped else 'is gone'} (process {pid} on " in first
        assert f"last seen in forward_backward of update {DIES_AT + 1})" in first
    assert ended.seconds < (SHORT if stopped else 0) + 60
    if stopped:
        assert len(list((tmp_path / "hang").iterdir())) == 2


def test_a_process_that_does_not_come_to_a_barrier_is_named(start: Start) -> None:
    ended = start(3, "tests.support.jax_rank", **body("stays_away"), PODSCALE_TEST_TIMEOUT=str(SHORT))
    first = ended.outcomes[0]
    assert first.exit_code == 76
    assert "timed out: rank 1 did not come to the save" in first.error
    assert ended.outcomes[2].exit_code == 76


@pytest.mark.parametrize(
    ("processes", "what", "code", "message"),
    [
        (4, "another document", 2, "train.label_smoothing: 0.25 on rank 1, 0.1 on rank"),
        (2, "no shard set", 2, "not every rank can start, so none does:\n  - rank 1: /nowhere"),
        (4, "never comes", 76, "rank 1 of {} did not come to the start within 40 s (launch.timeout_seconds)"),
    ],
)
def test_ranks_that_do_not_agree_start_nothing(
    start: Start, tmp_path: Path, make_shard_set: MakeShardSet, processes: int, what: str, code: int, message: str
) -> None:
    """By the rank entry itself; JAX is not even imported."""
    seconds = SHORT if what == "never comes" else TIMEOUT
    changes = [f"run.workspace={tmp_path}", "train.engine=jax", f"launch.timeout_seconds={seconds}"]
    variables = {
        "PODSCALE_CONFIG": load(None, [*changes, "train.global_batch=32"]).model_dump_json(),
        "PODSCALE_SHARD_SET": str(make_shard_set()),
        "PODSCALE_TEST_ODD": "1",
        "PODSCALE_TEST_DO": what,
    }
    if what == "never comes":
        (tmp_path / "hit").touch()  # rank 1 is taken away once the others have ended
    ended = start(processes, "tests.support.jax_odd_rank", **variables)
    others = {rank: outcome for rank, outcome in ended.outcomes.items() if what != "never comes" or rank != 1}
    assert len(others) == processes - (what == "never comes"), ended.out
    assert {outcome.exit_code for outcome in others.values()} == {code}, others
    assert len({outcome.error for outcome in others.values()}) == 1
    assert message.format(processes) in others[0].error
