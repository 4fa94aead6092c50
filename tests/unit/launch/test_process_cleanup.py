"""Processes of a launch: found by their environment, killed, and bound to their supervisor."""

import subprocess
import sys
from pathlib import Path

from podscale.launch.process_cleanup import ancestor_pids, kill_launch_processes, launch_processes
from podscale.util.processes import is_alive


def test_members_are_identified_by_their_environment_and_stopped(tmp_path: Path) -> None:
    environment = {"PODSCALE_RANK_DIR": str(tmp_path)}
    ours = subprocess.Popen(["/bin/sleep", "600"], env=environment, start_new_session=True)
    other = subprocess.Popen(["/bin/sleep", "600"], env={"PODSCALE_RANK_DIR": f"{tmp_path}-other"})
    try:
        while not launch_processes(tmp_path):  # between fork and exec the process still has our environment
            assert ours.poll() is None
        assert kill_launch_processes(tmp_path) == [ours.pid]
        assert ours.wait(10) == -9
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_ancestors_go_up_to_the_first_process() -> None:
    chain = list(ancestor_pids())
    assert chain[-1] in (0, 1)
    assert all(is_alive(pid) for pid in chain if pid)


def test_a_process_without_its_supervisor_exits_at_once() -> None:
    dead = subprocess.Popen(["/bin/true"])
    dead.wait()
    code = "import os; os.environ['PODSCALE_SUPERVISOR'] = '%d'; "
    code += "from podscale.launch.process_cleanup import exit_with_supervisor; "
    code += "exit_with_supervisor(); print('alive')"
    ended = subprocess.run([sys.executable, "-c", code % dead.pid], capture_output=True)
    assert (ended.returncode, ended.stdout) == (-9, b"")
