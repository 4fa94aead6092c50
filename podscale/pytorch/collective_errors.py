"""Classification of collective errors, so that `distributed.failure_report` can name the lost rank; flight recorder."""

import json
from contextlib import suppress
from pathlib import Path

import torch
from torch import distributed as dist
from torch._C import _distributed_c10d

from podscale.distributed.failure_report import CollectiveFailures
from podscale.errors import HangDetected, PeerLost, PodscaleError


def collective_failures(*, silent: bool | None = None) -> CollectiveFailures:
    """Return the classification of the errors of torch's collectives, for `failure_report.PeerWatch`.

    Args:
        silent: collectives raise nothing if a peer is lost; default: True on a GPU, because NCCL is silent.
    """
    silent = torch.cuda.is_available() if silent is None else silent
    return CollectiveFailures(classify_error, silent, dump_flight_recorder)


_TIMED_OUT = ("timed out", "timeout")
_PEER_LOST = (
    "connection closed",
    "connection reset",
    "connection refused",
    "broken pipe",
    "peer",
    "socket",
    "nccl error",
)


def classify_error(error: BaseException) -> type[PodscaleError] | None:
    """Return HangDetected or PeerLost if a collective raised `error` because of another rank, else None."""
    text = str(error).lower()
    if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError | PodscaleError):
        return None
    if not (isinstance(error, dist.DistError) or "gloo" in text or "nccl" in text):
        return None
    if any(words in text for words in _TIMED_OUT):
        return HangDetected
    return PeerLost if any(words in text for words in _PEER_LOST) else None


def dump_flight_recorder(path: Path) -> str:
    """Write torch's flight recorder to `path`, and return one line about it."""
    traces = {}
    for backend, name in (("gloo", "_dump_fr_trace_json"), ("nccl", "_dump_nccl_trace_json")):
        with suppress(AttributeError, RuntimeError, TypeError, ValueError):  # another torch, or an empty recorder
            trace = json.loads(getattr(_distributed_c10d, name)(includeCollectives=True, onlyActive=False))
            if trace.get("entries"):
                traces[backend] = trace
    if not traces:
        backend = dist.get_backend() if dist.is_initialized() else "no backend yet"
        return f"torch's flight recorder is empty ({backend}; TORCH_FR_BUFFER_SIZE=0 turns it off)"
    path.write_text(json.dumps(traces, indent=1))
    return f"torch's flight recorder: {path.name}, the newest {sum(len(t['entries']) for t in traces.values())} calls"
