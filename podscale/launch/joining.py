"""What a pod waits for until its ranks have met those of the others, said in its log.

torchrun looks for the first pod again and again, for 15 minutes and without a word. Pods of one job may come minutes
apart, so to wait is right; to be silent about it is not.
"""

import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from podscale.launch.rendezvous import Rendezvous

FIRST_LOG_SECONDS = 20.0
"""Until the first word: what starts with its peers has met them by then."""
LOG_EVERY_SECONDS = 60.0
CONNECT_TIMEOUT_SECONDS = 5.0


def _print_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def log_rendezvous_progress(
    rendezvous: Rendezvous,
    has_joined: Callable[[], bool],
    log_line: Callable[[str], None] = _print_stderr,
    *,
    first_seconds: float = FIRST_LOG_SECONDS,
    every_seconds: float = LOG_EVERY_SECONDS,
) -> Iterator[None]:
    """Tells what the pod waits for, after `first` seconds and every `again` seconds, until it has met the others."""
    over = threading.Event()

    def narrate() -> None:
        seconds = first_seconds
        while not over.wait(seconds) and not has_joined():
            text = describe_missing_pods(rendezvous)  # may take a while: name servers that do not answer
            if not over.is_set() and not has_joined():
                log_line(text)
            seconds = every_seconds

    if rendezvous.nodes > 1:
        threading.Thread(target=narrate, name="joining", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def describe_missing_pods(rendezvous: Rendezvous) -> str:
    """Why the pods have not met, as far as it can be seen from here."""
    others = f"the other {rendezvous.nodes - 1} pods" if rendezvous.nodes > 2 else "the other pod"
    if rendezvous.is_leader or not rendezvous.address:
        return f"waiting for {others} of this job"
    place = f"{rendezvous.address}:{rendezvous.port}"
    try:
        found = socket.getaddrinfo(rendezvous.address, rendezvous.port, type=socket.SOCK_STREAM)
    except OSError as error:
        return (
            f"waiting: the name of the first pod, {rendezvous.address}, does not resolve ({error.strerror or error}). It "
            "does once that pod runs; if it runs, look at the job's headless service and at the cluster's DNS"
        )
    address = found[0][4]
    try:
        socket.create_connection((str(address[0]), rendezvous.port), timeout=CONNECT_TIMEOUT_SECONDS).close()
    except OSError as error:
        return (
            f"waiting: nobody answers for the first pod at {place} ({error.strerror or error}). It has not started yet "
            "or has ended, or a network policy keeps this pod from it"
        )
    return f"waiting for {others} of this job; the first pod answers at {place}"
