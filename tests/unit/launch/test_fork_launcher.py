"""Forked ranks that wait for their environment: they exit if the parent exits."""

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from podscale.launch.process_cleanup import launch_processes
from podscale.launch.worker_main import preload_module
from podscale.util import env
from tests.support.polling import until
from tests.support.ports import free_port


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_without_an_environment_exit_with_their_parent(tmp_path: Path, number: signal.Signals) -> None:
    """The first of two pods waits for the second; its two ranks wait with it."""
    options = ("--processes=2", "--nodes=2", "--node-rank=0", "--slices=1", "--address=127.0.0.1")
    variables = {name: value for name, value in os.environ.items() if name != env.SUPERVISOR}
    variables[env.RANK_DIR] = str(tmp_path)
    spawner = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "podscale.launch.fork_launcher",
            *options,
            f"--port={free_port()}",
            "podscale.jax.worker",
        ],
        env=variables,
    )
    try:
        until(lambda: len(launch_processes(tmp_path)) == 3, 120)
        spawner.send_signal(number)
        assert spawner.wait(60) == -number
        until(lambda: launch_processes(tmp_path) == [], 60)
    finally:
        spawner.kill()
    assert list(tmp_path.iterdir()) == [], "no rank has come to life"


def test_a_module_is_imported_without_garbage_collection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "preloaded.py").write_text("import gc, os\nos.environ['COLLECTS'] = str(gc.isenabled())\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COLLECTS", "")
    preload_module("preloaded")
    assert os.environ["COLLECTS"] == "False"
    assert gc.isenabled()
    assert "preloaded" not in sys.modules
