"""Streams of a step on paper: each access to memory waits for the other stream's, and memory is kept while in use."""

from typing import Any

import pytest

STREAM_FAULTS = [  # (mutant, part of every message)
    ("queue_does_not_wait", "reducer.py"),
    ("nobody_waits_for_queue", "c10d::allreduce_"),
    ("prefetcher_does_not_wait", "device_prefetcher.py"),
    ("prefetcher_records_nothing", "freed while in use"),
    ("status_does_not_wait", "step_sync.py"),
    ("status_records_nothing", "freed while in use"),
    ("status_read_early", "the host reads"),
]


@pytest.mark.parametrize(("mutant", "text"), STREAM_FAULTS)
def test_a_missing_wait_is_found(session: Any, mutant: str, text: str) -> None:
    report = session.run(mutant=mutant, ranks=8)
    assert report["error"] == ""
    assert report["races"]
    assert any(text in race for race in report["races"])


def test_the_queue_of_the_columns_is_waited_for(session: Any) -> None:
    """Buckets are cut into slices, whose two phases run on two streams."""
    case = {"ranks": 8, "steps": 1, "train": {"all_reduce": {"algorithm": "torus2d"}}}
    clean = session.run(**case)
    assert clean["error"] == ""
    assert not clean["races"]
    assert session.run(**case, mutant="nobody_waits_for_queue")["races"]
