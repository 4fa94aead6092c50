"""What a rank that hangs was doing: the Python stacks of its threads and what its engine's recorder holds."""

import faulthandler
import logging
import os
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)


FlightRecorder = Callable[[Path], str]
"""Writes what an engine's collectives were at to a file; a line on what became of it."""


def dump_stacks(
    directory: Path,
    rank: int,
    reason: str,
    failure: BaseException | None = None,
    flight_recorder: FlightRecorder | None = None,
) -> None:
    """Adds to <folder>/rank-<k>.txt, and writes the recorder's state to rank-<k>.flight.json. Never raises.

    failure: what the main thread has been brought out of its wait by.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / f"rank-{rank}.txt").open("a", encoding="utf-8") as file:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
            file.write(f"{when} UTC, rank {rank}, process {os.getpid()} on {socket.gethostname()}: {reason}\n")
            file.writelines(traceback.format_exception(failure) if failure is not None else [])
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            file.write(
                (flight_recorder(directory / f"rank-{rank}.flight.json") if flight_recorder is not None else "")
                + "\n\n"
            )
    except OSError as error:
        logger.warning("%s: the stacks of this rank are not kept: %s", directory, error.strerror)
