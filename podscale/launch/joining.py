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
    meeting: Rendezvous,
    met: Callable[[], bool],
    tell: Callable[[str], None] = _print_stderr,
    *,
    first: float = FIRST_LOG_SECONDS,
    again: float = LOG_EVERY_SECONDS,
) -> Iterator[None]:
    """Tells what the pod waits for, after `first` seconds and every `again` seconds, until it has met the others."""
    over = threading.Event()

    def narrate() -> None:
        seconds = first
        while not over.wait(seconds) and not met():
            text = describe_missing_pods(meeting)  # may take a while: name servers that do not answer
            if not over.is_set() and not met():
                tell(text)
            seconds = again

    if meeting.nodes > 1:
        threading.Thread(target=narrate, name="joining", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def describe_missing_pods(meeting: Rendezvous) -> str:
    """Why the pods have not met, as far as it can be seen from here."""
    others = f"the other {meeting.nodes - 1} pods" if meeting.nodes > 2 else "the other pod"
    if meeting.leads or not meeting.address:
        return f"waiting for {others} of this job"
    place = f"{meeting.address}:{meeting.port}"
    try:
        found = socket.getaddrinfo(meeting.address, meeting.port, type=socket.SOCK_STREAM)
    except OSError as error:
        return (
            f"waiting: the name of the first pod, {meeting.address}, does not resolve ({error.strerror or error}). It "
            "does once that pod runs; if it runs, look at the job's headless service and at the cluster's DNS"
        )
    address = found[0][4]
    try:
        socket.create_connection((str(address[0]), meeting.port), timeout=CONNECT_TIMEOUT_SECONDS).close()
    except OSError as error:
        return (
            f"waiting: nobody answers for the first pod at {place} ({error.strerror or error}). It has not started yet "
            "or has ended, or a network policy keeps this pod from it"
        )
    return f"waiting for {others} of this job; the first pod answers at {place}"
