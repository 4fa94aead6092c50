"""Signals that arrive while a finished trial is recorded."""

import os
import signal
import threading

import pytest

from podscale.study.runner import defer_signals
from podscale.util.processes import Preempted, preempt_on_sigterm


def test_a_signal_waits_for_the_body_even_if_another_thread_receives_it() -> None:
    done, release = [], threading.Event()
    other = threading.Thread(target=release.wait)
    other.start()
    try:
        with pytest.raises(Preempted), preempt_on_sigterm():  # noqa: PT012, SIM117 - the order is the test
            with defer_signals():
                os.kill(os.getpid(), signal.SIGTERM)
                done.append("recorded")
    finally:
        release.set()
        other.join()
    assert done == ["recorded"]


def test_no_signal_leaves_the_handlers_as_they_were() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with defer_signals():
        pass
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_outside_the_main_thread_signals_are_not_touched() -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []

    def body() -> None:
        with defer_signals():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [before]
