"""Watch of the benchmark of failures: jobs that were deleted or created between two watches."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client, watch

from benchmarks.failures.fleet_watch import RUN_LABEL, FleetWatch
from tests.support.polling import until

Change = tuple[str, dict[str, Any]]


def job(uid: str, succeeded: bool = False) -> dict[str, Any]:
    conditions = [{"type": "Succeeded", "status": "True"}] if succeeded else []
    return {"metadata": {"uid": uid, "labels": {RUN_LABEL: "r1"}}, "status": {"conditions": conditions}}


class Watches:
    """Stand-in for the client's watch: each entry is one watch of jobs of a kind; the last one stays open."""

    def __init__(self, **kinds: list[list[Change]]) -> None:
        self._kinds = kinds
        self.end = threading.Event()

    def stream(self, function: Any, *collection: str, timeout_seconds: int) -> Iterator[dict[str, Any]]:
        left = self._kinds.get(collection[-1], [])
        for kind, thing in left.pop(0) if left else []:
            yield {"type": kind, "object": thing}
        if not left:
            self.end.wait()


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    opened: list[tuple[FleetWatch, Watches]] = []

    def begin(**kinds: list[list[Change]]) -> FleetWatch:
        watches = Watches(**kinds)
        monkeypatch.setattr(watch, "Watch", lambda: watches)
        opened.append((FleetWatch(client.ApiClient(client.Configuration()), "train"), watches))
        return opened[-1][0]

    yield begin
    for fleet, watches in opened:
        fleet.close()
        watches.end.set()


def test_a_job_that_was_replaced_between_two_watches_is_no_second_one(watching: Any) -> None:
    fleet = watching(pytorchjobs=[[("ADDED", job("first", succeeded=True))], [("ADDED", job("second"))]])
    until(lambda: fleet.jobs["r1"] == ["first", "second"])
    assert fleet.violations == []
    assert not fleet.job_succeeded("r1"), "the first one is gone"


def test_two_jobs_of_a_run_are_reported(watching: Any) -> None:
    fleet = watching(pytorchjobs=[[("ADDED", job("first")), ("ADDED", job("second"))]])
    until(lambda: fleet.violations == ["r1: 2 jobs at a time"])


def test_a_new_watch_of_one_kind_keeps_the_jobs_of_another(watching: Any) -> None:
    fleet = watching(pytorchjobs=[[("ADDED", job("first"))]], jobsets=[[], [("ADDED", job("second"))]])
    until(lambda: fleet.violations == ["r1: 2 jobs at a time"])
