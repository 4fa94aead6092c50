"""What every rank does first: it opens its shard set and makes sure that all are about to do the same with it."""

import os

from podscale.engine import agreement
from podscale.engine.meeting import Meeting
from podscale.engine.place import Place
from podscale.input import open_shard_set
from podscale.order import build_order
from podscale.shards.shardset import ShardSet


def agreed_shard_set(place: Place, meeting: Meeting, *, device: str, libraries: agreement.Facts) -> ShardSet:
    """The shard set, once every rank has opened its own and all agree.

    device: kind of the devices; libraries: versions of what the engine stands on. Raises InputError with one text on
    every rank where they differ or one cannot start; HangDetected where one does not come.
    """
    opened: list[ShardSet] = []

    def facts() -> agreement.Facts:
        opened.append(open_shard_set(place.shard_set, place.config))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        found = agreement.facts(
            place.config, place.stage, opened[0], device=device, local_size=local_size, libraries=libraries
        )
        if place.stage == "train":
            found["hosts of the sample order"] = str(build_order(place.config, opened[0].split("train")).hosts)
        return found

    agreement.agree(meeting, facts)
    return opened[0]
