"""What the parent of a stage exports itself, beside its ranks' series: build, volumes, GPUs, the endpoint's own.

Volumes and GPUs are looked at by a thread of their own: a look at a dead network volume or a fallen GPU may never end,
and then it is these numbers that stand still and not the endpoint.
"""

import platform
import shutil
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from prometheus_client import CollectorRegistry

from podscale.telemetry.gpus import GpuState, Nvml
from podscale.telemetry.readings import MetricRegistry
from podscale.telemetry.server import MetricsServer
from podscale.version import VERSION

POLL_SECONDS = 5.0
"""Between two looks at volumes and GPUs."""


class PodMetrics:
    """Puts its series in `registry`; use as a context manager.

    volumes: paths by their names in the catalogue; one that is not there yet is looked for again.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        run: str,
        engine: str,
        volumes: Mapping[str, Path],
        seconds: float = POLL_SECONDS,
    ) -> None:
        self.values = MetricRegistry(run=run)
        self.values.declare("telemetry_scrapes", "telemetry_connections_shed")
        facts = {"version": VERSION, "engine": engine, "python": platform.python_version()}
        self.values.set_info("build_info", facts)
        self._volumes, self._seconds = volumes, seconds
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="pod-metrics", daemon=True)
        self._thread.start()
        registry.register(self.values)

    def add_server(self, server: MetricsServer) -> None:
        """Tells how the endpoint is used."""

        def count() -> None:
            self.values.set("telemetry_scrapes", server.scrapes)
            self.values.set("telemetry_connections_shed", server.shed_connections)

        self.values.on_collect(count)

    def close(self) -> None:
        """Stops looking; what hangs is left to the end of the process."""
        self._closed.set()

    def __enter__(self) -> "PodMetrics":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _poll(self) -> None:
        nvml = Nvml.open()
        while True:
            self._update_volumes()
            for gpu in nvml.states() if nvml is not None else ():
                self._update_gpu(gpu)
            if self._closed.wait(self._seconds):
                return

    def _update_volumes(self) -> None:
        for name, path in self._volumes.items():
            with suppress(OSError):
                usage = shutil.disk_usage(path)
                self.values.set("disk_free_bytes", usage.free, name)
                self.values.set("disk_size_bytes", usage.total, name)

    def _update_gpu(self, gpu: GpuState) -> None:
        values = {
            "gpu_utilization_ratio": gpu.utilization,
            "gpu_memory_used_bytes": gpu.memory_used,
            "gpu_memory_size_bytes": gpu.memory_size,
            "gpu_power_watts": gpu.watts,
            "gpu_temperature_celsius": gpu.celsius,
        }
        for name, value in values.items():
            if value is not None:
                self.values.set(name, value, str(gpu.index))
