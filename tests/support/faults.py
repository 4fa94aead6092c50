"""Process faults: stopped, slowed down."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def stopped(process: int) -> Iterator[None]:
    """Stop a process (SIGSTOP) inside the context."""
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)


@contextmanager
def slowed(process: int, still: float = 0.04, going: float = 0.04) -> Iterator[None]:
    """Stop a process repeatedly inside the context: `still` seconds of each `still + going`."""
    over = threading.Event()

    def stop_and_go() -> None:
        with suppress(ProcessLookupError):
            while not over.is_set():
                with stopped(process):
                    over.wait(still)
                over.wait(going)

    thread = threading.Thread(target=stop_and_go)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
