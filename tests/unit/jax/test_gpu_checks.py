"""GPU of each process of the JAX engine, and checks of the GPUs at the start."""

import logging
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from podscale.distributed.rank_group import RankGroup
from podscale.distributed.store import StoreClient, StoreServer
from podscale.distributed.worker_env import RankEnv
from podscale.errors import InputError
from podscale.jax import gpu_checks
from podscale.jax.gpu_checks import check_gpus, choose_gpus
from podscale.util import host_info
from tests.support.refusals import refused

TIMEOUT = 20.0
Answer = list[int] | InputError | None


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return `choose(names, nodes)`: the answer of every rank, each of which sees the GPUs of its row of `names`."""
    seen = threading.local()
    monkeypatch.setattr(host_info, "visible_gpu_names", lambda: seen.names)
    monkeypatch.setattr(host_info, "visible_gpus", lambda: len(seen.names))
    monkeypatch.setattr(host_info, "tpu_chips", list)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)

    def answers_of(names: Sequence[list[str]], nodes: int = 1) -> list[Answer]:
        server = StoreServer("127.0.0.1", 0)
        local, answers = len(names) // nodes, list[Answer]([None] * len(names))

        def ask(rank: int) -> None:
            seen.names = names[rank]
            store = StoreClient("127.0.0.1", server.port, TIMEOUT)
            rank_env = RankEnv(rank, len(names), rank % local, local)
            try:
                answers[rank] = choose_gpus(RankGroup(rank, len(names), store, TIMEOUT), rank_env)
            except InputError as error:
                answers[rank] = error

        threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(len(names))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT)
        return answers

    return answers_of


@pytest.mark.parametrize(
    ("names", "nodes", "numbers"),
    [
        ([["0", "1"]] * 2, 1, [[0], [1]]),
        ([["0"], ["1"]], 1, [[0], [0]]),
        ([["GPU-a"], ["GPU-b"]], 1, [[0], [0]]),
        ([["0", "1"], ["0", "1"], ["2", "3"], ["2", "3"]], 1, [[0], [1], [0], [1]]),
        ([["0", "1"]] * 4, 2, [[0], [1], [0], [1]]),
        ([["0", "1", "2", "3"]] * 2, 2, [None, None]),
        ([[]] * 2, 1, [None, None]),
    ],
    ids=["all visible", "by rank", "by UUID", "two by two", "two nodes", "one process a node", "none"],
)
def test_a_process_takes_the_gpu_of_its_local_rank(
    choose: Any, names: list[list[str]], nodes: int, numbers: list[Any]
) -> None:
    assert choose(names, nodes) == numbers


def test_more_processes_than_gpus_are_refused(choose: Any) -> None:
    """Ranks 0 and 2 of the first node use GPU 0; rank 1 has one of its own, and the second node has enough."""
    answers = choose([["0", "1"]] * 3 + [["0", "1", "2"]] * 3, 2)
    assert [answer for answer in answers if not isinstance(answer, InputError)] == [[1], [0], [1], [2]]
    for answer in (answers[0], answers[2]):
        with refused("ranks 0 and 2", field="launch.processes", got=3):
            raise answer


def test_processes_that_all_see_the_same_slices_are_refused(choose: Any) -> None:
    """CUDA shows each of them the first slice only. Processes with a slice of their own are left to NCCL."""
    assert all(isinstance(answer, InputError) for answer in choose([["MIG-a", "MIG-b"]] * 2))
    assert choose([["MIG-a"], ["MIG-b"]]) == [[0], [0]]


def test_gpus_are_not_chosen_for_a_run_on_cpus(choose: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert choose([["0"]] * 2) == [None, None]


def devices(*kinds: str, platform: str = "gpu") -> list[Any]:
    """Return devices of these kinds, two for each process."""
    return [
        SimpleNamespace(platform=platform, device_kind=kind, process_index=index // 2)
        for index, kind in enumerate(kinds)
    ]


def test_rank_0_warns_of_different_gpus(caplog: pytest.LogCaptureFixture) -> None:
    mixed = devices("H100", "H100", "A100", "A100", "H100", "H100")
    check_gpus("cuda", devices("H100", "H100"), 0)
    check_gpus("cuda", mixed, 1)
    assert not caplog.records
    check_gpus("cuda", mixed, 0)
    ((_, level, text),) = caplog.record_tuples
    assert level == logging.WARNING
    assert "H100: ranks 0 and 2; A100: rank 1" in text


def test_gpus_that_jax_does_not_use_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX trains on the CPU, with a warning, if its plugin cannot use the driver."""
    monkeypatch.setattr(gpu_checks.host_info, "visible_gpu_names", lambda: ["0", "1"])
    monkeypatch.setattr(gpu_checks.host_info, "nvidia_driver", lambda: "570.172.08")
    check_gpus("cpu", devices("cpu", platform="cpu"), 0)
    with refused("570.172.08", field="CUDA_VISIBLE_DEVICES", got="0,1"):
        check_gpus("cuda", devices("cpu", platform="cpu"), 0)
