"""Programs in processes that are forked from a server, which has imported what they need.

A forked process runs its program as `python -c` does, with an environment, output, exit code and exit handlers of its
own. Only its /proc/PID/environ and cmdline are those of the server.
"""

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
LENGTH_BYTES, PID_BYTES = 8, 10


class ForkedProcess:
    """Process of a server, with the interface of `subprocess.Popen` that tests use."""

    def __init__(self, pid: int, status: int, stdout: int, stderr: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout, self.stderr = (os.fdopen(pipe, encoding="utf-8") for pipe in (stdout, stderr))
        self._status = os.fdopen(status, "rb", buffering=0)

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        os.set_blocking(self._status.fileno(), False)
        return self._read_code()

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return the rest of the output, once no process holds the pipes any more and this one has exited."""
        texts = {"out": "", "err": ""}
        os.set_blocking(self._status.fileno(), True)
        steps: list[Callable[[], object]] = [
            lambda: texts.update(out=self.stdout.read()),
            lambda: texts.update(err=self.stderr.read()),
            self._read_code,
        ]
        threads = [threading.Thread(target=step, daemon=True) for step in steps]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout)
            if thread.is_alive():
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return texts["out"], texts["err"]

    def _read_code(self) -> int | None:
        if self.returncode is None and (code := self._status.read(PID_BYTES)):
            self.returncode = int(code)
        return self.returncode


class ForkServer:
    """Process that has imported `modules`, with `variables` in its environment; it exits with this one."""

    def __init__(self, *modules: str, **variables: str) -> None:
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-m", "tests.support.forked_commands", str(theirs.fileno()), *modules]
        environment = {**os.environ, **variables}
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, pass_fds=[theirs.fileno()])
        theirs.close()

    def start(
        self, program: str, arguments: Sequence[str], environment: Mapping[str, str], folder: Path | None = None
    ) -> ForkedProcess:
        """Run a program in a folder, by default that of this process."""
        content = json.dumps([program, list(arguments), dict(environment), str(folder or Path.cwd())]).encode()
        (stdout, its_stdout), (stderr, its_stderr), (status, its_status) = (os.pipe() for _ in range(3))
        theirs = [its_stdout, its_stderr, its_status]
        socket.send_fds(self._socket, [len(content).to_bytes(LENGTH_BYTES, "big")], theirs)
        self._socket.sendall(content)
        for file in theirs:
            os.close(file)
        return ForkedProcess(int(os.read(status, PID_BYTES)), status, stdout, stderr)


def receive_request(connection: socket.socket) -> tuple[Any, list[int]]:
    """Return a request, and the files that came with it; None if its sender has ended, perhaps before all was sent."""
    head, files, _, _ = socket.recv_fds(connection, LENGTH_BYTES, 3)
    length, content = int.from_bytes(head, "big"), b""
    while len(content) < length:
        content += (part := connection.recv(length - len(content)))
        if not part:
            break
    return json.loads(content) if head and len(content) == length else None, files


def _serve(server: socket.socket) -> Any:
    """Fork a process for each request, and a parent for it that reports its exit code. Returns in the former."""
    while True:
        request, files = receive_request(server)
        if request is None:
            os._exit(0)
        with suppress(ChildProcessError):  # for the CPU times of ended ones
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if os.fork() == 0:
            server.close()
            if (child := os.fork()) == 0:
                os.dup2(files[0], 1)
                os.dup2(files[1], 2)
                for file in files:
                    os.close(file)
                return request
            _report(child, *files)
        for file in files:
            os.close(file)


def _report(child: int, stdout: int, stderr: int, status: int) -> NoReturn:
    os.close(stdout)
    os.close(stderr)
    os.write(status, str(child).rjust(PID_BYTES).encode())
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.write(status, str(code).encode())
    os._exit(0)


def main() -> None:
    for module in sys.argv[2:]:
        importlib.import_module(module)
    program, arguments, environment, folder = _serve(socket.socket(fileno=int(sys.argv[1])))
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = ["-c", *arguments]
    exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
