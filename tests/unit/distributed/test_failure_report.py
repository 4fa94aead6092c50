"""PeerWatch records each error, and raises one caused by another rank with that rank's name."""

import json
from pathlib import Path

import pytest

from podscale.distributed.failure_report import CollectiveFailures, PeerWatch
from podscale.distributed.rank_group import RankGroup
from podscale.distributed.store import FAILED_KEY, LocalStore
from podscale.errors import HangDetected, PeerLost, PodscaleError, Preempted


def watch(store: LocalStore, directory: Path, kind: type[PodscaleError] | None) -> PeerWatch:
    rank_group, failures = RankGroup(0, 1, store, 5.0), CollectiveFailures(lambda error: kind, silent=False)
    return PeerWatch(rank_group, pytest.fail, failures, interval_seconds=0.05, stack_directory=directory)


def record(store: LocalStore) -> tuple[str, bool]:
    values = json.loads(store.get(["pulse/0"])[0])
    return values["ended"], values["follows"]


@pytest.mark.parametrize("kind", [PeerLost, HangDetected])
def test_the_error_of_a_collective_names_the_culprit(tmp_path: Path, kind: type[PodscaleError]) -> None:
    store, cause = LocalStore(), RuntimeError("first line\nconnection closed by peer")
    with pytest.raises(kind) as raised, watch(store, tmp_path, kind):
        raise cause
    assert raised.value.__cause__ is cause
    assert str(cause).splitlines()[-1] in str(raised.value)
    assert record(store) == (str(cause), True)
    assert not store.has(FAILED_KEY)
    assert (tmp_path / "rank-0.txt").exists() == (kind is HangDetected)


def test_an_error_of_this_rank_is_raised_unchanged(tmp_path: Path) -> None:
    store, error = LocalStore(), ValueError("index 3 is out of bounds")
    with pytest.raises(ValueError) as raised, watch(store, tmp_path, None):
        raise error
    assert raised.value is error
    assert record(store) == (str(error), False)
    assert store.get([FAILED_KEY]) == ["0"]


def test_an_error_that_names_its_culprit_is_recorded_as_caused_by_a_peer(tmp_path: Path) -> None:
    store, error = LocalStore(), PeerLost("rank 1 is gone")
    with pytest.raises(PeerLost) as raised, watch(store, tmp_path, None):
        raise error
    assert raised.value is error
    assert record(store)[1]


@pytest.mark.parametrize("stopped", [False, True])
def test_a_finished_or_preempted_rank_has_not_failed(tmp_path: Path, stopped: bool) -> None:
    store = LocalStore()
    if stopped:
        with pytest.raises(Preempted), watch(store, tmp_path, PeerLost):
            raise Preempted("saved step 3")
    else:
        with watch(store, tmp_path, PeerLost) as progress_tracker:
            progress_tracker.step_done(1)
    assert record(store) == ("it finished", False)
    assert not store.has(FAILED_KEY)
