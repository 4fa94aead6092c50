"""What a rank that hangs was doing: the Python stacks of its threads and what torch's flight recorder holds."""

import faulthandler
import json
import logging
import os
import socket
import time
import traceback
from contextlib import suppress
from pathlib import Path

from torch import distributed as dist
from torch._C import _distributed_c10d

logger = logging.getLogger(__name__)


def write_stacks(folder: Path, rank: int, why: str, failure: BaseException | None = None) -> None:
    """Adds to <folder>/rank-<k>.txt, and writes the recorder's state to rank-<k>.flight.json. Never raises.

    failure: what the main thread has been brought out of its wait by.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"rank-{rank}.txt").open("a", encoding="utf-8") as file:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
            file.write(f"{when} UTC, rank {rank}, process {os.getpid()} on {socket.gethostname()}: {why}\n")
            file.writelines(traceback.format_exception(failure) if failure is not None else [])
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            file.write(_flight(folder / f"rank-{rank}.flight.json") + "\n\n")
    except OSError as error:
        logger.warning("%s: the stacks of this rank are not kept: %s", folder, error.strerror)


def _flight(path: Path) -> str:
    """Writes the newest collectives of this process and their states; a line on what became of it."""
    found = {}
    for backend, name in (("gloo", "_dump_fr_trace_json"), ("nccl", "_dump_nccl_trace_json")):
        with suppress(AttributeError, RuntimeError, TypeError, ValueError):  # another torch, or it holds nothing
            trace = json.loads(getattr(_distributed_c10d, name)(includeCollectives=True, onlyActive=False))
            if trace.get("entries"):
                found[backend] = trace
    if not found:
        backend = dist.get_backend() if dist.is_initialized() else "no backend yet"
        return f"torch's flight recorder holds nothing ({backend}; TORCH_FR_BUFFER_SIZE=0 turns it off)"
    path.write_text(json.dumps(found, indent=1))
    return f"torch's flight recorder: {path.name}, the newest {sum(len(t['entries']) for t in found.values())} calls"
