"""Environment between launcher and workers: what one writes, the other reads."""

from dataclasses import replace
from pathlib import Path

import pytest

from podscale.config import load
from podscale.distributed.rank_group import RankGroup
from podscale.distributed.startup_clock import StartupClock
from podscale.distributed.worker_env import RankEnv, WorkerEnv
from podscale.util import env
from tests.support.refusals import refused

OF_A_SLICE = RankEnv(13, 16, 1, 2, "m", 1, slice_id=1, slice_count=2, node=6)
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "m"}
WORKER = WorkerEnv(
    load(None, ["launch.processes=2", "run.id=r1"]),
    "train",
    "shards",
    Path("/r"),
    log_directory=Path("/l"),
    lease=Path("/x/.lease"),
    fence_number=7,
    startup=StartupClock(1234.5678, {"supervisor": 0.1}),
)


@pytest.mark.parametrize("written", [OF_A_SLICE, RankEnv(0, 2, 0, 2, "127.0.0.1", 4711), RankEnv()])
def test_a_rank_reads_what_the_launcher_writes(written: RankEnv) -> None:
    assert RankEnv.read(written.variables()) == written


def test_a_single_process_needs_no_variables() -> None:
    assert RankEnv.read({}) == RankEnv()


def test_torch_gets_the_number_of_the_pod() -> None:
    assert OF_A_SLICE.variables()["GROUP_RANK"] == "6"


@pytest.mark.parametrize(
    "written",
    [
        WORKER,
        replace(WORKER, fence_number=None, lease_wait_seconds=61.5),
        WorkerEnv(WORKER.config, "evaluate", "s", Path("/r")),
    ],
)
def test_a_worker_reads_what_the_supervisor_writes(written: WorkerEnv) -> None:
    rank_env = RankEnv(1, 2, 1, 2, "127.0.0.1", 4711)
    variables = {**written.variables(), **rank_env.variables()}
    assert WorkerEnv.read(variables) == replace(written, rank_env=rank_env)


def test_a_rank_of_torchrun_has_no_store_of_ours() -> None:
    variables = {**RankEnv(1, 2, 0, 1).variables(), "MASTER_ADDR": "m", "MASTER_PORT": "1"}
    rank_env = RankEnv.read(variables)
    assert (rank_env.rank, rank_env.store_address) == (1, "")
    with refused(field="PODSCALE_STORE"):
        RankGroup.join(rank_env, 1.0)


@pytest.mark.parametrize("left_out", ["RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PODSCALE_STORE", "PODSCALE_SLICE"])
def test_an_incomplete_rank_environment_is_refused(left_out: str) -> None:
    variables = OF_A_SLICE.variables()
    del variables[left_out]
    with refused(left_out):
        RankEnv.read(variables)


def test_the_node_is_the_number_of_torchruns_agent() -> None:
    assert RankEnv.read(TORCHRUN).node == 2
    assert RankEnv.read({**TORCHRUN, "GROUP_RANK": "1"}).node == 1


@pytest.mark.parametrize("name", [env.CONFIG, env.STAGE, env.SHARD_SET, env.RANK_DIR])
def test_a_missing_variable_of_a_worker_is_named(name: str) -> None:
    given = {env.CONFIG: "{}", env.STAGE: "train", env.SHARD_SET: "/shards", env.RANK_DIR: "/ranks"}
    assert WorkerEnv.read(given).stage == "train"
    with refused(field=name):
        WorkerEnv.read({key: value for key, value in given.items() if key != name})
