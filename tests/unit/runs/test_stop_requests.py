"""A stop request ends work at once, is recorded, and is swallowed by nobody."""

import os
import signal
from pathlib import Path

import pytest

from podscale.errors import Preempted
from podscale.runs import StageOutcome, read_outcomes, record_stage
from podscale.runs.lease import LeaseLost
from podscale.util.processes import SigtermReceived, preempt_on_sigterm


def stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    signal.sigpending()  # back in Python, where handlers run


def test_a_stop_passes_every_except_exception_and_ends_as_preempted() -> None:
    before = signal.getsignal(signal.SIGTERM)
    cleaned = []

    def work() -> None:
        try:
            try:
                stop()
            except Exception:
                pytest.fail("a broad handler took the request for its own")
        finally:
            stop()  # a second request does not cut short what is left to do
            cleaned.append(True)

    with pytest.raises(Preempted, match="the same command continues"), preempt_on_sigterm():
        work()
    assert cleaned
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_stopped_stage_is_recorded_as_preempted(tmp_path: Path) -> None:
    path = tmp_path / "outcome.json"
    with pytest.raises(Preempted), preempt_on_sigterm(), record_stage(path, "report"):
        stop()
    assert read_outcomes(path)["report"].exit_code == 75


def test_who_lost_the_lease_records_nothing(tmp_path: Path) -> None:
    path = tmp_path / "outcome.json"

    def lost() -> None:
        raise LeaseLost("another launch")

    with pytest.raises(LeaseLost), record_stage(path, "train", lost):
        pass
    with pytest.raises(ValueError, match="its own error"), record_stage(path, "train", lost):
        raise ValueError("its own error")
    with pytest.raises(SigtermReceived), record_stage(path, "train", lost):
        raise SigtermReceived
    assert read_outcomes(path) == {}
    with record_stage(path, "train"):
        pass
    assert isinstance(read_outcomes(path)["train"], StageOutcome)
