"""What every rank does first: it opens its shard set and makes sure that all are about to do the same with it."""

import os

from podscale.data.loaders.build_loader import open_shard_set
from podscale.data.sampler import build_sampler
from podscale.data.shard_set import ShardSet
from podscale.distributed.rank_group import RankGroup
from podscale.distributed.worker_env import WorkerEnv
from podscale.engine import agreement


def open_agreed_shard_set(
    worker_env: WorkerEnv, rank_group: RankGroup, *, device: str, libraries: agreement.StartupFacts
) -> ShardSet:
    """The shard set, once every rank has opened its own and all agree.

    device: kind of the devices; libraries: versions of what the engine stands on. Raises InputError with one text on
    every rank where they differ or one cannot start; HangDetected where one does not come.
    """
    opened: list[ShardSet] = []

    def collect_facts() -> agreement.StartupFacts:
        opened.append(open_shard_set(worker_env.shard_set, worker_env.config))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        found = agreement.startup_facts(
            worker_env.config, worker_env.stage, opened[0], device=device, local_size=local_size, libraries=libraries
        )
        if worker_env.stage == "train":
            found["hosts of the sample order"] = str(build_sampler(worker_env.config, opened[0].split("train")).hosts)
        return found

    agreement.check_ranks_agree(rank_group, collect_facts)
    return opened[0]
