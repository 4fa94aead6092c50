"""What every rank does first: it opens its shard set and makes sure that all are about to do the same with it."""

import os

from podscale.engine import agreement
from podscale.engine.meeting import RankGroup
from podscale.engine.place import WorkerEnv
from podscale.input.build import open_shard_set
from podscale.order import build_sampler
from podscale.shards.shardset import ShardSet


def open_agreed_shard_set(
    place: WorkerEnv, meeting: RankGroup, *, device: str, libraries: agreement.StartupFacts
) -> ShardSet:
    """The shard set, once every rank has opened its own and all agree.

    device: kind of the devices; libraries: versions of what the engine stands on. Raises InputError with one text on
    every rank where they differ or one cannot start; HangDetected where one does not come.
    """
    opened: list[ShardSet] = []

    def facts() -> agreement.StartupFacts:
        opened.append(open_shard_set(place.shard_set, place.config))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        found = agreement.startup_facts(
            place.config, place.stage, opened[0], device=device, local_size=local_size, libraries=libraries
        )
        if place.stage == "train":
            found["hosts of the sample order"] = str(build_sampler(place.config, opened[0].split("train")).hosts)
        return found

    agreement.check_ranks_agree(meeting, facts)
    return opened[0]
