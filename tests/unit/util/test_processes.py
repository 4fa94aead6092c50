"""Processes that exit with another process, by a locked file."""

import signal
import subprocess
import sys

from podscale.util.files import file_lock

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
