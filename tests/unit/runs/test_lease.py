"""One writer per run directory, even if the previous writer was killed."""

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from podscale.runs import Lease, LeaseLost, LeaseTaken, check_not_taken, lease_fence
from tests.support.refusals import refused

HOLD = """
import sys, time
from pathlib import Path
from podscale.runs import Lease
lease = Lease.acquire(Path(sys.argv[1]))
print(lease.number, flush=True)
time.sleep(600)
"""


def holder(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_a_taken_lease_names_its_holder_and_kill_frees_it(tmp_path: Path) -> None:
    path = tmp_path / ".lease"
    process = holder(path)
    try:
        with refused(f"process {process.pid} on ", "run.id", field=tmp_path, kind=LeaseTaken):
            Lease.acquire(path)
    finally:
        end(process)
    with Lease.acquire(path) as lease:
        assert lease.number == 2
        lease.check()


def test_a_waiting_launch_gets_the_lease_of_one_that_exits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in a pod that starts while the one that it replaces still saves."""
    path = tmp_path / ".lease"
    process = holder(path)
    threading.Timer(1.0, process.kill).start()
    with Lease.acquire(path, wait_seconds=60) as lease:
        assert lease.number == 2
    end(process)
    (message,) = caplog.messages
    assert message.startswith(f"{tmp_path}: ")
    for part in (f"process {process.pid} on ", "60 s"):
        assert part in message


def test_the_wait_for_a_lease_ends(tmp_path: Path) -> None:
    path = tmp_path / ".lease"
    with Lease.acquire(path):
        started = time.monotonic()
        with refused(field=tmp_path, kind=LeaseTaken):
            Lease.acquire(path, wait_seconds=1)
        with pytest.raises(LeaseTaken):
            check_not_taken(path, wait_seconds=1)
        assert time.monotonic() - started >= 2


def test_children_do_not_hold_the_lease(tmp_path: Path) -> None:
    lease = Lease.acquire(tmp_path / ".lease")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], close_fds=False)
    try:
        lease.release()
        Lease.acquire(tmp_path / ".lease").release()
    finally:
        child.kill()
        child.wait()


def test_a_late_writer_of_an_older_lease_is_refused(tmp_path: Path) -> None:
    path = tmp_path / ".lease"
    old = Lease.acquire(path)
    late = lease_fence(path, old.number)  # as in a rank, which may outlive the supervisor
    late()
    old.release()
    late()  # no other launch yet
    new = Lease.acquire(path)
    for check in (late, old.check):
        with refused(field=tmp_path, kind=LeaseLost):
            check()
    new.check()
    new.release()


def test_a_removed_lease_file_is_noticed(tmp_path: Path) -> None:
    with Lease.acquire(tmp_path / ".lease") as lease:
        (tmp_path / ".lease").unlink()
        with refused(field=tmp_path, kind=LeaseLost):
            lease.check()


def test_without_locks_a_living_holder_is_seen_and_a_dead_one_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / ".lease"
    process = holder(path)

    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    try:
        with refused(f"process {process.pid} ", kind=LeaseTaken):
            Lease.acquire(path)
    finally:
        end(process)
    assert Lease.acquire(path).number == 2


def test_an_unwritable_directory_is_an_input_error(tmp_path: Path) -> None:
    with refused("run.workspace", field=tmp_path / "missing" / ".lease"):
        Lease.acquire(tmp_path / "missing" / ".lease")


def test_the_processes_of_a_launch_hold_its_lease_and_others_do_not(tmp_path: Path) -> None:
    path = tmp_path / ".lease"
    with Lease.acquire(path) as lease:
        joined = Lease.hold(path, lease.variables)
        assert joined.number == lease.number
        joined.check()
        joined.release()
        for environment in ({}, {**lease.variables, "PODSCALE_LEASE": str(tmp_path / "other")}):
            with refused(f"process {os.getpid()} ", kind=LeaseTaken):
                Lease.hold(path, environment)
        with pytest.raises(LeaseLost):
            Lease.hold(path, {**lease.variables, "PODSCALE_FENCE": "7"})
    assert Lease.hold(path, {}).number == 2


def test_asking_whether_a_lease_is_taken_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / ".lease"
    check_not_taken(path)
    assert not path.exists()
    with Lease.acquire(path):
        before = path.read_bytes()
        with refused(f"process {os.getpid()} ", field=tmp_path, kind=LeaseTaken):
            check_not_taken(path)
        assert path.read_bytes() == before
    check_not_taken(path)
    assert Lease.acquire(path).number == 2
