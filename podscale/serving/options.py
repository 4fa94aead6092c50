"""Options of a prediction server."""

from dataclasses import dataclass

from podscale.errors import InputError
from podscale.util.host_info import cpu_count, visible_gpus

CPU_BATCH = 16
"""Largest batch on the CPU, images."""
GPU_BATCH = 64
"""Largest batch on a GPU, images."""
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Address, batching and limits of a server; limits are those of one process.

    Args:
        host: address to listen on.
        port: TCP port; 0 for any free one.
        metrics_port: second port with the same routes, for scrapers and probes; None: only `port`.
        processes: processes that share the port, each with its own copy of the model.
        max_batch: images of a batch; None: 16 on the CPU, 64 on a GPU.
        max_wait_ms: time for which a batch waits for more images, milliseconds.
        queue: images that are decoded or wait for the model; further requests get 503.
        top: classes of each prediction if a request does not say.
        convert: convert images of other formats and depths, as `data.policy=convert`.
        max_request_mib: largest body of a request, MiB.
        request_seconds: time for the headers of a request to arrive, and for its body, seconds.
        max_connections: open connections; for another one, the oldest without a complete request is closed.
        drain_seconds: time between the stop request and the end of listening, so that no client is sent here any more.
        grace_seconds: time after that for accepted requests, seconds.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    metrics_port: int | None = None
    processes: int = 1
    max_batch: int | None = None
    max_wait_ms: float = 2.0
    queue: int = 256
    top: int = 5
    convert: bool = False
    max_request_mib: int = 64
    request_seconds: float = 20.0
    max_connections: int = 512
    drain_seconds: float = 0.0
    grace_seconds: float = 30.0

    def __post_init__(self) -> None:
        """Raise InputError if an option is out of range."""
        for name in ("processes", "max_batch", "queue", "top", "max_request_mib", "max_connections"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError("must be at least 1", field=_option(name), got=value)
        for name in ("max_wait_ms", "drain_seconds", "grace_seconds"):
            if getattr(self, name) < 0:
                raise InputError("must not be negative", field=_option(name), got=getattr(self, name))
        if self.request_seconds <= 0:
            raise InputError("must be more than 0", field="--request-seconds", got=self.request_seconds)
        for name in ("port", "metrics_port"):
            port = getattr(self, name)
            if port is not None and not 0 <= port < 65536:
                raise InputError("must be from 0 to 65535", field=_option(name), got=port)

    @property
    def batch(self) -> int:
        """Images of a batch."""
        return self.max_batch or (GPU_BATCH if visible_gpus() else CPU_BATCH)

    @property
    def cores(self) -> int:
        """CPU cores of one process."""
        return max(1, cpu_count() // self.processes)

    @property
    def max_request_bytes(self) -> int:
        return self.max_request_mib * MIB

    @property
    def max_buffered_bytes(self) -> int:
        """Bytes of the bodies of all requests without an answer, so that clients cannot fill the memory."""
        return 4 * self.max_request_bytes


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
