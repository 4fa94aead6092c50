"""torch's flight recorder: the newest collectives of this process and what became of them."""

import json
from contextlib import suppress
from pathlib import Path

from torch import distributed as dist
from torch._C import _distributed_c10d


def dump_flight_recorder(path: Path) -> str:
    """Writes what the recorder holds to `path`; a line on what became of it."""
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
