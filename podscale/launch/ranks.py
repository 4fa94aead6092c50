"""The rank processes of one pod: copies of a process that has imported what all of them need.

To import PyTorch takes seconds of a core and hundreds of megabytes. Ranks that are forked from the process which has
done it share both, however many they are.
"""

import gc
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from podscale.distributed.worker_exit import write_exit_status
from podscale.launch import rankprocess
from podscale.util.env import RANK_DIR

FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def preload_module(module: str) -> None:
    """Imports all that a module imports. Itself it is forgotten again: each rank runs it anew, as its main program."""
    importlib.import_module(module)
    del sys.modules[module]


class ForkServer:
    """Processes that wait until `begin` tells them who they are, and then each carry out `entry` (see rankprocess)."""

    def __init__(self, entry: str, count: int) -> None:
        """Forks them: from the main thread, to which their lives are bound, and while there is no other."""
        self._workers: dict[int, int] = {}
        self._pipes: list[int] = []
        sys.stdout.flush()
        sys.stderr.flush()
        gc.freeze()  # what is never looked at is never copied
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED_SIGNALS)
        for number in range(count):
            reader, writer = os.pipe()
            self._pipes.append(writer)
            pid = os.fork()
            if pid == 0:
                _run_worker(entry, reader, self._pipes)
            self._workers[pid] = number
            os.close(reader)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED_SIGNALS)

    def start_workers(self, variables: Sequence[Mapping[str, str]]) -> None:
        """Gives each its variables; from here on a request to stop is theirs, and before, the end of all."""
        for number in FORWARDED_SIGNALS:
            signal.signal(number, self._forward_stop)
        for pipe, own in zip(self._pipes, variables, strict=True):
            with os.fdopen(pipe, "w") as writer:
                json.dump(dict(own), writer)

    def wait(self, on_killed: Callable[[int], None]) -> int:
        """Wait for all ranks; record the exit status of each that failed.

        Args:
            on_killed: Called with the number, within this pod, of each rank that a signal ended: it has no report.

        Returns:
            The first exit code that is not 0, else 0; 128 + n for signal n.
        """
        first = 0
        while self._workers:
            pid = _wait_for_exit()
            number = self._workers.pop(pid)  # while it is a zombie: nobody else can have its pid
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if code != 0:
                write_exit_status(Path(os.environ[RANK_DIR]), pid, code)
                print(f"rank process {pid} ended with exit code {code}", file=sys.stderr, flush=True)
            if code < 0:
                on_killed(number)
            first = first or code
        return first if first >= 0 else 128 - first

    def _forward_stop(self, number: int, frame: FrameType | None) -> None:
        for pid in list(self._workers):
            os.kill(pid, signal.SIGTERM)


def _wait_for_exit() -> int:
    """Waits for the end of a child, and leaves it a zombie."""
    ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    return ended.si_pid


def _run_worker(entry: str, reader: int, writers: Sequence[int]) -> NoReturn:
    """A rank's life, in its own process; it ends unborn where its parent does before it has spoken."""
    try:
        for writer in writers:
            os.close(writer)
        with os.fdopen(reader) as pipe:
            told = pipe.read()
        if told:
            os.environ.update(json.loads(told))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED_SIGNALS)
            sys.argv = [rankprocess.__name__, entry]
            rankprocess.main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)
