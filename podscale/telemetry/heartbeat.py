"""The book of a run in a small file beside its checkpoints, so that it outlives every process of the run."""

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from podscale.errors import PodscaleError
from podscale.telemetry.goodput import GoodputState, GoodputTracker

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 2.0
"""An object store takes about one write a second of one object; what is lost at a kill is booked as recovery."""


class GoodputWriter:
    """Writes the ledger's book now, every `interval` seconds on a thread of its own, and when it is closed.

    `fence` raises where a newer launch has taken the run over: then this one's book is of no interest any more. A full
    disk costs heartbeats, and one warning, not the training.
    """

    def __init__(
        self,
        tracker: GoodputTracker,
        path: Path,
        fence: Callable[[], None] | None,
        interval_seconds: float = INTERVAL_SECONDS,
    ) -> None:
        self._tracker, self._path, self._fence, self._interval = tracker, path, fence, interval_seconds
        self._warned = False
        self._closed = threading.Event()
        self._write()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self, ended: str = "") -> None:
        """ended: how this life did, where that is known here."""
        self._closed.set()
        self._thread.join()
        self._write(ended)

    def _run(self) -> None:
        while not self._closed.wait(self._interval):
            self._write()

    def _write(self, ended: str = "") -> None:
        try:
            write_goodput_state(self._path, self._tracker.state(ended), self._fence)
        except PodscaleError:
            return  # the loop hears of it at the next line of its log
        except OSError as error:
            if not self._warned:
                logger.warning("%s: heartbeats are being lost: %s", self._path, error.strerror)
            self._warned = True


def read_goodput_state(path: Path) -> GoodputState | None:
    """The book in `path`; None where there is none that can be read."""
    try:
        return GoodputState.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_goodput_state(path: Path, state: GoodputState, fence: Callable[[], None] | None = None) -> None:
    """Replaces the file as a whole; raises OSError where the file system refuses, and what `fence` raises.

    The temporary neighbour has a fixed name, so that a writer that is killed leaves nothing that the next one does not
    take away; the lease sees to it that there is one writer.
    """
    if fence is not None:
        fence()
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(state.to_json())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
