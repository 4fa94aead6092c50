"""JAX processes, started as in a run: they join, agree, and name a lost process."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podscale.config import load
from podscale.data.loaders.build_loader import build_loader
from podscale.data.sampler import build_sampler
from podscale.data.shard_set import ShardSet
from podscale.distributed.worker_exit import WorkerReport, read_worker_reports, registered_workers
from podscale.training.schedules import image_phases
from tests.conftest import MakeShardSet
from tests.support.jax_bodies import DIES_AT, READ
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT, SHORT = 120.0, 15.0
"""Timeouts of waits between ranks, seconds; the short one for tests that wait until it expires."""
TIMEOUT_SECONDS = 300.0
"""Timeout of the test itself, seconds, for a loaded machine."""
NO_JAX = {"JAX_PLATFORMS": "nowhere"}
"""Environment in which JAX fails when it looks for devices."""


@dataclass(frozen=True)
class Ended:
    """Exit code, output, reports and results of a world's ranks; `seconds` since one of them was hit by a signal."""

    code: int
    out: str
    outcomes: dict[int, WorkerReport]
    answers: dict[int, Any]
    seconds: float


Start = Callable[..., Ended]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return `start(processes, module, pods=1, **variables)`, which runs a launcher with its ranks for each pod."""
    launchers: list[subprocess.Popen[str]] = []

    def run(processes: int, module: str, *, pods: int = 1, **variables: str) -> Ended:
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "PODSCALE_RANK_DIR": str(tmp_path),
            "PODSCALE_STAGE": "train",
            "PODSCALE_CONFIG": "{}",
            "PODSCALE_SHARD_SET": "none",
            "PODSCALE_FENCE": "1",
            "PODSCALE_TEST_TIMEOUT": str(TIMEOUT),
            **variables,
        }
        environment.pop("PODSCALE_SUPERVISOR", None)
        port = free_port() if pods > 1 else 0
        for pod in range(pods):
            options = {"processes": processes, "nodes": pods, "node-rank": pod, "slices": 1}
            options |= {"address": "127.0.0.1", "port": port}
            command = [
                sys.executable,
                "-m",
                "podscale.launch.fork_launcher",
                *(f"--{k}={v}" for k, v in options.items()),
            ]
            command.append(module)
            launchers.append(
                subprocess.Popen(
                    command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
                )
            )
        hit = _await_end(launchers, tmp_path, pods * processes)
        out = "".join(launcher.communicate(timeout=TIMEOUT_SECONDS)[0] for launcher in launchers)
        answers = {
            int(path.stem.partition("-")[2]): json.loads(path.read_text()) for path in tmp_path.glob("answer-*.json")
        }
        code = max(launcher.returncode for launcher in launchers)
        return Ended(code, out, read_worker_reports(tmp_path), answers, time.monotonic() - hit)

    yield run
    for pid in registered_workers(tmp_path).values():
        if (Path("/proc") / str(pid)).exists():
            os.kill(pid, signal.SIGKILL)
    for launcher in launchers:
        launcher.kill()
        launcher.communicate()


def _await_end(launchers: list[subprocess.Popen[str]], rank_directory: Path, ranks: int) -> float:
    """Wait until all ranks but a stopped one have exited, and kill that one. Returns the time of the signal."""
    deadline, hit = time.monotonic() + TIMEOUT_SECONDS, time.monotonic()
    seen = False
    while any(launcher.poll() is None for launcher in launchers):
        assert time.monotonic() < deadline, [launcher.communicate() for launcher in launchers if not launcher.kill()]
        pids = registered_workers(rank_directory)
        if not seen and (rank_directory / "hit").exists():
            seen, hit = True, time.monotonic()
        reports = read_worker_reports(rank_directory)
        if len(reports) == ranks - 1 and (rank_directory / "hit").exists() and len(pids) == ranks:
            (stopped,) = set(pids) - set(reports)
            with suppress(ProcessLookupError):
                os.kill(pids[stopped], signal.SIGKILL)
            break
        time.sleep(0.02)
    return hit


def body(name: str) -> dict[str, str]:
    return {"PODSCALE_TEST_BODY": f"tests.support.jax_bodies:{name}"}


def test_processes_of_one_pod_join(start: Start) -> None:
    ended = start(2, "tests.support.jax_rank", **body("describe_world"))
    assert ended.code == 0, ended.out
    check_that_they_met(ended.answers, nodes=1, processes=2, devices=1)
    assert {outcome.exit_code for outcome in ended.outcomes.values()} == {0}


def test_one_process_compiles_and_the_others_read_its_program(start: Start) -> None:
    """At the first launch and at the next one. The last process compiles for itself: its CPU is of another kind."""
    for hits in ([0, 1, 0], [1, 1, 0]):
        ended = start(3, "tests.support.jax_rank", **body("keeps"))
        assert ended.code == 0, ended.out
        assert [ended.answers[rank] for rank in range(3)] == [{"hits": count, "sum": 6.0} for count in hits]


@pytest.mark.parametrize(("processes", "devices"), [(1, 2), (2, 1)])
def test_each_host_reads_its_own_shards_and_both_engines_the_same_samples(
    start: Start, make_shard_set: MakeShardSet, processes: int, devices: int
) -> None:
    """Two hosts, with one process of two devices or two of one, read what PyTorch's four ranks read in three epochs."""
    directory = make_shard_set(shards=4)
    changes = ["input.order=blocked", "input.groups=4", "input.image_size=32", "train.global_batch=16"]
    config = load(None, [*changes, "train.engine=jax", "launch.nodes=2", f"launch.processes={processes}"])
    variables = {"PODSCALE_CONFIG": config.model_dump_json(), "PODSCALE_SHARD_SET": str(directory)}
    variables["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    ended = start(processes, "tests.support.jax_rank", pods=2, **body("reads"), **variables)
    assert ended.code == 0, ended.out
    worlds = {process: answer.pop("world") for process, answer in ended.answers.items()}
    check_that_they_met(worlds, nodes=2, processes=processes, devices=devices)

    split = ShardSet.open(directory).split("train")
    order = build_sampler(config, split)
    shard_of = dict(zip(split.keys.tolist(), split.column("shard").tolist(), strict=True))
    for host in range(2):
        host_shards = {shard_of[key] for key in split.keys[order.rows_of_host(host)].tolist()}
        assert len(host_shards) == 2
        tellers = [ended.answers[host * processes + number] for number in range(processes)]
        for answer in tellers:
            assert answer["opened"] == [split.shard_names[shard] for shard in sorted(host_shards)]
        for epoch in range(3):  # an epoch of every group is three steps
            steps = range(3 * epoch, 3 * epoch + 3)
            seen = [key for answer in tellers for step in steps for key in answer["keys"][step]]
            assert sorted(seen) == sorted(key for key, shard in shard_of.items() if shard in host_shards)
    for rank in range(4):
        loader = build_loader(
            config,
            split,
            order,
            phases=image_phases(config, len(split)),
            ranks=range(rank, rank + 1),
            world_size=4,
            device="cpu",
        )
        process, device = divmod(rank, devices)
        answer = ended.answers[process]
        for step, batch in enumerate(loader.batches(0, READ)):
            assert answer["keys"][step][4 * device : 4 * device + 4] == batch.keys.tolist()
            assert answer["pixels"][step][device] == hashlib.sha256(np.asarray(batch.images).tobytes()).hexdigest()
        loader.close()


def check_that_they_met(answers: dict[int, Any], *, nodes: int, processes: int, devices: int) -> None:
    """Assert that each of the processes on each node, with `devices` devices each, returned the same world."""
    size = nodes * processes
    of_devices = [rank for rank in range(size) for _ in range(devices)]
    assert sorted(answers) == list(range(size))
    for rank, answer in answers.items():
        assert answer == {
            "rank": rank,
            "size": size,
            "processes_per_node": processes,
            "ranks": list(range(rank * devices, (rank + 1) * devices)),
            "devices": of_devices,
            "local_devices": [rank] * devices,
            "broadcast": {"seed": 7},
            "gathered": [other**2 for other in range(size)],
            "hosts": size,
            "sum": devices * size * (size + 1) / 2,
            "begun together": True,
        }


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        (0, signal.SIGKILL),
        pytest.param(1, signal.SIGKILL, marks=pytest.mark.slow),  # the rarer victim and signal are in the others
        (0, signal.SIGSTOP),
        (1, signal.SIGSTOP),
    ],
)
def test_the_others_name_the_lost_process(start: Start, tmp_path: Path, victim: int, number: signal.Signals) -> None:
    """Process 0 runs JAX's own service. If it is lost, JAX would abort the other processes by SIGABRT."""
    stopped = number is signal.SIGSTOP
    variables = {"PODSCALE_TEST_VICTIM": str(victim), "PODSCALE_TEST_SIGNAL": str(int(number))}
    variables["PODSCALE_TEST_TIMEOUT"] = str(SHORT if stopped else TIMEOUT)
    ended = start(3, "tests.support.jax_rank", **body("loses"), **variables)
    pid = (tmp_path / "hit").read_text()
    assert sorted(ended.outcomes) == [rank for rank in range(3) if rank != victim], ended.out
    for rank, outcome in ended.outcomes.items():
        first = outcome.error.splitlines()[0]
        assert outcome.exit_code == (76 if stopped else 77), outcome.error
        assert first.startswith(f"rank {rank} of 3 ")
        assert re.search(rf"rank {victim} is \w+ \(process {pid} on ", first), first
        for name in ("forward_backward", f" step {DIES_AT + 1}"):
            assert name in first
    assert ended.seconds < (SHORT if stopped else 0) + 60
    if stopped:
        assert len(list((tmp_path / "hang").iterdir())) == 2


def test_a_process_that_does_not_reach_a_barrier_is_named(start: Start) -> None:
    ended = start(3, "tests.support.jax_rank", **body("stays_away"), PODSCALE_TEST_TIMEOUT=str(SHORT))
    first = ended.outcomes[0]
    assert first.exit_code == 76
    assert " rank 1 " in first.error
    assert ended.outcomes[2].exit_code == 76


@pytest.mark.parametrize(
    ("pods", "processes", "what", "code", "message"),
    [
        (1, 3, "another document", 2, "train.label_smoothing: 0.25 on rank 1, 0.1 on ranks 0 and 2"),
        (2, 2, "another library", 2, "\n  - jaxlib: 0.4.2 on rank 1, {jaxlib} on ranks 0, 2 and 3\nGive every rank"),
        (1, 2, "no shard set", 2, "not every rank can start, so none does:\n  - rank 1: /nowhere"),
        (1, 3, "never comes", 76, "launch.timeout_seconds: rank 1 of 3 did not reach the startup check (got {short})"),
    ],
)
def test_no_rank_starts_if_ranks_disagree(
    start: Start,
    tmp_path: Path,
    make_shard_set: MakeShardSet,
    pods: int,
    processes: int,
    what: str,
    code: int,
    message: str,
) -> None:
    """Checked by the worker's entry point, before JAX starts."""
    seconds = SHORT if what == "never comes" else TIMEOUT
    changes = [f"run.workspace={tmp_path}", "train.engine=jax", f"launch.timeout_seconds={seconds}"]
    variables = {
        "PODSCALE_CONFIG": load(None, [*changes, "train.global_batch=32"]).model_dump_json(),
        "PODSCALE_SHARD_SET": str(make_shard_set()),
        "PODSCALE_TEST_ODD": "1",
        "PODSCALE_TEST_DO": what,
        **NO_JAX,
    }
    if what == "never comes":
        (tmp_path / "hit").touch()  # rank 1 is killed after the others have exited
    ended = start(processes, "tests.support.jax_odd_rank", pods=pods, **variables)
    others = {rank: outcome for rank, outcome in ended.outcomes.items() if what != "never comes" or rank != 1}
    assert len(others) == pods * processes - (what == "never comes"), ended.out
    assert {outcome.exit_code for outcome in others.values()} == {code}, others
    assert len({outcome.error for outcome in others.values()}) == 1
    assert message.format(jaxlib=metadata.version("jaxlib"), short=SHORT) in others[0].error


def test_no_host_starts_if_the_shards_cannot_be_divided(
    start: Start, tmp_path: Path, make_shard_set: MakeShardSet
) -> None:
    """Three hosts and four groups of shards: each host reports the same error, with numbers that would fit."""
    changes = [f"run.workspace={tmp_path}", "train.engine=jax", "train.global_batch=48", "launch.nodes=3"]
    variables = {
        "PODSCALE_CONFIG": load(None, [*changes, "input.order=blocked", "input.groups=4"]).model_dump_json(),
        "PODSCALE_SHARD_SET": str(make_shard_set(shards=8)),
        **NO_JAX,
    }
    ended = start(1, "podscale.jax.worker", pods=3, **variables)
    message = "input.groups: not a multiple of the 3 hosts (launch.nodes) (got 4). Choose 3 or 6."
    assert [(ended.outcomes[rank].exit_code, ended.outcomes[rank].error) for rank in range(3)] == [(2, message)] * 3
