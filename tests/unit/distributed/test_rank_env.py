"""Rank numbers from the environment, and the variables that a worker needs."""

import pytest

from podscale.distributed.worker_env import RankEnv, WorkerEnv
from podscale.util import env
from tests.support.refusals import refused

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "m"}


def test_the_node_is_the_number_of_torchruns_agent() -> None:
    assert RankEnv.read(TORCHRUN).node == 2
    assert RankEnv.read({**TORCHRUN, "GROUP_RANK": "1"}).node == 1


@pytest.mark.parametrize("name", [env.CONFIG, env.STAGE, env.SHARD_SET, env.RANK_DIR])
def test_a_missing_variable_of_a_worker_is_named(name: str) -> None:
    given = {env.CONFIG: "{}", env.STAGE: "train", env.SHARD_SET: "/shards", env.RANK_DIR: "/ranks"}
    assert WorkerEnv.read(given).stage == "train"
    with refused(field=name):
        WorkerEnv.read({key: value for key, value in given.items() if key != name})
