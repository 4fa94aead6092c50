"""Server that forks the tasks of a compiled package from one process, which has imported what they need.

A task is `python3 -m kfp.dsl.executor_main ...`, whose imports cost ten times as much as a small stage of these tests.
`TaskServer.programs` is a folder with a `python3` to put first on the PATH. It passes its arguments, environment,
working directory, umask and standard files to the server, and exits with the code of the forked process. A kill of that
`python3` kills the forked process and its group.
"""

import gc
import importlib
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from tests.support.forked_commands import LENGTH_BYTES, receive_request

TASK = ["-m", "kfp.dsl.executor_main"]
"""First arguments of the commands that the server executes."""
PRELOADED = (
    TASK[1],
    "kubernetes.dynamic",
    "multiprocessing.sharedctypes",
    "podscale.components.steps",
    "podscale.data.loaders.build_loader",
    "podscale.data.node_cache",
    "podscale.data.sharding.build_shard_set",
    "podscale.data.sharding.pack_progress",
    "podscale.data.sharding.shard_plan",
    "podscale.data.sources.digits",
    "podscale.evaluation.evaluation_json",
    "podscale.kubernetes.client",
    "podscale.kubernetes.run_stage",
    "podscale.launch.supervisor",
    "podscale.report.demo_page_link",
    "podscale.report.model_card",
    "podscale.report.page",
    "podscale.stages.launcher_process",
    "podscale.training.preflight",
)
ROOT = Path(__file__).resolve().parents[2]
STANDINS = ROOT / "tests" / "system" / "standins"
"""Folder on the path of the tasks, with stand-ins for the stages."""
CLIENT = """#!{python} -IS
import json, os, socket, sys

if sys.argv[1:3] != {task!r}:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
umask = os.umask(0)
os.umask(umask)
request = {{"arguments": sys.argv[2:], "variables": dict(os.environ), "folder": os.getcwd(), "umask": umask}}
content = json.dumps(request).encode()
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    socket.send_fds(server, [len(content).to_bytes({length_bytes}, "big")], [0, 1, 2])
    server.sendall(content)
    code = server.recv(1)
sys.exit(code[0] if code else 1)
"""


class TaskServer:
    """Running server; `programs` is the folder with its `python3`."""

    def __init__(self, folder: Path) -> None:
        address = str(folder / "socket")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.task_server", address],
            cwd=ROOT,
            env={**os.environ, "_KFP_RUNTIME": "true", "PYTHONPATH": str(STANDINS)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"
        self.programs = folder / "programs"
        self.programs.mkdir()
        client = CLIENT.format(python=sys.executable, task=TASK, address=address, length_bytes=LENGTH_BYTES)
        (self.programs / "python3").write_text(client)
        (self.programs / "python3").chmod(0o755)

    def close(self) -> None:
        """Close the server's input, at whose end it exits."""
        self._process.communicate()


@contextmanager
def serving_tasks() -> Iterator[TaskServer]:
    """Run a server."""
    with tempfile.TemporaryDirectory(prefix="tasks-") as folder:  # its path fits into the address of a socket
        server = TaskServer(Path(folder))
        try:
            yield server
        finally:
            server.close()


class _Server:
    """The loop of the server: one connection for each running task."""

    def __init__(self, address: str) -> None:
        self._tasks: dict[int, socket.socket] = {}
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen()
        self._selector = selectors.DefaultSelector()
        woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only a handled signal wakes
        self._selector.register(self._listener, selectors.EVENT_READ, self._start)
        self._selector.register(woken, selectors.EVENT_READ, lambda: os.read(woken, 4096))
        self._selector.register(0, selectors.EVENT_READ, self._exit)

    def serve(self) -> NoReturn:
        while True:
            for key, _ in self._selector.select():
                key.data()
            self._reap()

    def _start(self) -> None:
        connection, _ = self._listener.accept()
        request, files = receive_request(connection)
        if request is None:
            connection.close()
            for file in files:
                os.close(file)
            return
        pid = os.fork()
        if pid == 0:
            _run(request, files)
        for file in files:
            os.close(file)
        self._tasks[pid] = connection
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._kill(pid))

    def _kill(self, pid: int) -> None:
        """Kill a task whose client is gone."""
        self._selector.unregister(self._tasks[pid])
        _kill_group(pid)

    def _reap(self) -> None:
        """Send the exit codes of the tasks that have ended."""
        while self._tasks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            code, connection = os.waitstatus_to_exitcode(status), self._tasks.pop(pid)
            with suppress(KeyError):
                self._selector.unregister(connection)
            with suppress(OSError):
                connection.sendall(bytes([code if code >= 0 else 128 - code]))
            connection.close()

    def _exit(self) -> NoReturn:
        for pid in self._tasks:
            _kill_group(pid)
        os._exit(0)


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:  # it has no group of its own yet
        os.kill(pid, signal.SIGKILL)


def _run(request: dict[str, Any], files: list[int]) -> NoReturn:
    """Run the task in the forked process, as `python3 -m` does."""
    code = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for standard, file in enumerate(files):
            os.dup2(file, standard)
        os.closerange(3, 256)  # the sockets of the server
        os.chdir(request["folder"])
        os.umask(request["umask"])
        os.environ.clear()
        os.environ.update(request["variables"])
        sys.argv = request["arguments"]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(address: str) -> None:
    gc.disable()
    for module in PRELOADED:
        importlib.import_module(module)
    gc.enable()
    server = _Server(address)
    gc.freeze()
    print("ready", flush=True)
    server.serve()


if __name__ == "__main__":
    main(sys.argv[1])
