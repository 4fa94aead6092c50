"""Processes of `run_world` do not depend on the tests that ran before in the same worker."""

import os
from typing import Any

import pytest

LEFT_BY_EARLIER_TESTS: list[str] = []


def inherited(world: Any) -> tuple[int, list[str], str | None]:
    return os.getppid(), LEFT_BY_EARLIER_TESTS, os.environ.get("SET_BY_THE_TEST")


def test_ranks_have_the_environment_of_the_test_and_nothing_else(
    run_world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_world(1, inherited)  # starts the server, whose environment is older than the test's
    monkeypatch.setenv("SET_BY_THE_TEST", "yes")
    monkeypatch.setattr(f"{__name__}.LEFT_BY_EARLIER_TESTS", ["a thread"])
    for parent, left, variable in run_world(2, inherited):
        assert parent != os.getpid()
        assert (left, variable) == ([], "yes")


def test_a_failed_rank_is_named_with_its_error(run_world: Any) -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 1: Traceback.*ValueError: of rank 1"):
        run_world(2, raise_on_second)


def raise_on_second(world: Any) -> None:
    if world.rank == 1:
        raise ValueError(f"of rank {world.rank}")
