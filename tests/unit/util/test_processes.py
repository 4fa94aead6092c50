"""Processes that exit with another process, by a locked file. Signals that wait for the end of a body."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from podscale.util.files import file_lock
from podscale.util.processes import Preempted, defer_signals, preempt_on_sigterm

SERVANT = """
import sys, time
from pathlib import Path
from podscale.util.processes import exit_with_lock_holder
exit_with_lock_holder(Path(sys.argv[1]))
print("alive", flush=True)
time.sleep(float(sys.argv[2]))
"""


def servant(lifeline, seconds):
    started = subprocess.Popen(
        [sys.executable, "-c", SERVANT, lifeline, str(seconds)], stdout=subprocess.PIPE, text=True
    )
    assert started.stdout.readline() == "alive\n"
    return started


def test_a_process_ends_as_the_lock_is_given_up(tmp_path):
    with file_lock(tmp_path / "lifeline"):
        served = servant(tmp_path / "lifeline", 600)
        assert served.poll() is None
    served.communicate(timeout=60)
    assert served.returncode == -signal.SIGKILL


def test_an_unlocked_file_stops_no_process(tmp_path):
    (tmp_path / "lifeline").touch()
    served = servant(tmp_path / "lifeline", 0.5)
    served.communicate(timeout=60)
    assert served.returncode == 0


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
