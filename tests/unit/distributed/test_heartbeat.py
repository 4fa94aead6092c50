"""A rank's pulse hears the others, and not itself. With a real store."""

import json

from podscale.distributed.heartbeat import RankHeartbeat
from podscale.distributed.progress_tracker import ProgressTracker
from podscale.distributed.rank_group import RankGroup
from podscale.distributed.store import StoreClient, StoreServer
from tests.support.polling import until

BEAT = 0.02


def test_a_call_of_hang_is_for_the_others() -> None:
    """Who calls it is about to say why, and knows more than that somebody has called."""
    server = StoreServer("127.0.0.1", 0)
    heard: dict[int, str] = {}

    def pulse(rank: int) -> RankHeartbeat:
        def told(reason: str, *, hang: bool) -> None:
            assert hang
            heard[rank] = reason

        meeting = RankGroup(rank, 2, StoreClient("127.0.0.1", server.port, 10.0), 10.0)
        return RankHeartbeat(meeting, ProgressTracker(), interval_seconds=BEAT, on_failure=told)

    def beat() -> int:
        (note,) = StoreClient("127.0.0.1", server.port, 10.0).get(["pulse/0"])
        return int(json.loads(note)["beat"])

    caller, other = pulse(0), pulse(1)
    caller.report_hang()
    until(lambda: 1 in heard)
    assert heard[1] == "rank 0 reported a hang"
    seen = beat()
    until(lambda: beat() > seen + 20)
    assert 0 not in heard
    for one in (caller, other):
        one.stop("")
