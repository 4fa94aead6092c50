"""Heartbeat of a rank: it detects a hang that a peer reports, not one that its own rank reports. With a real store."""

import json

from podscale.distributed.heartbeat import RankHeartbeat
from podscale.distributed.progress_tracker import ProgressTracker
from podscale.distributed.rank_group import RankGroup
from podscale.distributed.store import StoreClient, StoreServer
from tests.support.polling import until

INTERVAL = 0.02


def test_a_reported_hang_is_a_failure_on_the_peers_only() -> None:
    """The reporting rank raises its own error, which is more precise."""
    server = StoreServer("127.0.0.1", 0)
    failures: dict[int, str] = {}

    def start(rank: int) -> RankHeartbeat:
        def on_failure(reason: str, *, hang: bool) -> None:
            assert hang
            failures[rank] = reason

        rank_group = RankGroup(rank, 2, StoreClient("127.0.0.1", server.port, 10.0), 10.0)
        return RankHeartbeat(rank_group, ProgressTracker(), interval_seconds=INTERVAL, on_failure=on_failure)

    def beat() -> int:
        (record,) = StoreClient("127.0.0.1", server.port, 10.0).get(["pulse/0"])
        return int(json.loads(record)["beat"])

    reporter, peer = start(0), start(1)
    reporter.report_hang()
    until(lambda: 1 in failures)
    assert failures[1].startswith("rank 0 ")
    first = beat()
    until(lambda: beat() > first + 20)
    assert 0 not in failures
    for heartbeat in (reporter, peer):
        heartbeat.stop("")
