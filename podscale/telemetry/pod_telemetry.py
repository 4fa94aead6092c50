"""Metrics of a pod (build, volumes, GPUs by NVML), and the metrics endpoint of a stage.

A thread polls volumes and GPUs. If a call hangs (on a dead network volume or a failed GPU), only these values are
stale.
"""

import json
import logging
import platform
import shutil
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import quote

from prometheus_client import CollectorRegistry

from podscale.config.telemetry import TelemetrySection
from podscale.errors import InputError
from podscale.telemetry.endpoint import Endpoint
from podscale.telemetry.registry import MergedMetrics, MetricRegistry, series_values
from podscale.telemetry.server import CONTENT_TYPE, EndpointAuth, ListenError, MetricsServer
from podscale.util.files import write_json
from podscale.version import VERSION

logger = logging.getLogger(__name__)

POLL_SECONDS = 5.0
"""Polling interval of volumes and GPUs, seconds."""
PUSHED_STAGES = ("shard", "evaluate")
"""Stages that may exit before Prometheus has discovered them."""
GATEWAY_SECONDS = 10.0
"""Longest wait for a Pushgateway's answer, seconds."""
MIN_GATEWAY_SECONDS = 1.0
"""The same when telemetry.linger_seconds leaves less time, seconds."""


class StageTelemetry:
    """Metrics endpoint of a stage, as the run document configures it; a context manager.

    It does nothing if `telemetry.enabled` is false. If the server cannot listen, it logs a warning and does nothing.

    Args:
        volumes: Paths by their names in the catalogue.
        snapshots: Directory of the ranks' snapshots in this pod.

    Raises:
        InputError: A certificate or token is unusable, or the server cannot listen and `telemetry.required` is set.
    """

    def __init__(
        self,
        section: TelemetrySection,
        *,
        run: str,
        stage: str,
        volumes: Mapping[str, Path],
        engine: str = "none",
        snapshots: Path | None = None,
    ) -> None:
        self.registry = CollectorRegistry()
        self._section, self._run, self._stage = section, run, stage
        self._merged = MergedMetrics(snapshots, self.registry)
        self._stack = ExitStack()
        self._server = self._listen() if section.enabled else None
        self._pod: PodMetrics | None = None
        if self._server is not None:
            self._stack.callback(self._server.close)
            self._pod = PodMetrics(self.registry, run=run, engine=engine, volumes=volumes)
            self._pod.add_server(self._server)
            self._stack.callback(self._pod.close)

    @property
    def url(self) -> str | None:
        """URL of the metrics; None without a server."""
        return self._server.url if self._server is not None else None

    def start(self, endpoint: Path | None = None, messages: TextIO | None = None) -> None:
        """Start the server and print its URL; until `close`, the URL is also in the file `endpoint`.

        `messages` is the stream of that line; None: standard error.
        """
        if self._server is None:
            return
        self._server.start()
        print(f"metrics at {self.url}", file=messages or sys.stderr, flush=True)
        if endpoint is not None:
            with suppress(OSError):
                Endpoint.from_section(self._server.url, self._section).write(endpoint)
                self._stack.callback(endpoint.unlink, missing_ok=True)

    def set_launches(self, launches: int | None) -> None:
        if self._pod is not None and launches is not None:
            self._pod.values.set("train_launches", launches)

    def finish(self, summary: Path | None, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Export the final values to the file `summary`, to the Pushgateway, and in one more scrape.

        It waits at most `telemetry.linger_seconds`, or until `interrupted`. A Pushgateway that hangs can add
        MIN_GATEWAY_SECONDS for each of two requests. Errors are logged.
        """
        if self._server is None:
            return
        self._merged.refresh()
        text = self._merged()
        if summary is not None:
            self._write_summary(summary, text)
        deadline = time.monotonic() + self._section.linger_seconds
        pushes = self._stage in PUSHED_STAGES and self._section.pushgateway is not None
        pushed = pushes and self._request_gateway("PUT", deadline, text)
        self._server.wait_for_scrape(max(0.0, deadline - time.monotonic()), interrupted)
        if pushed:
            while time.monotonic() < deadline and not interrupted():
                time.sleep(0.1)
            self._request_gateway("DELETE", deadline)

    def close(self) -> None:
        """Stop the endpoint; safe to call twice."""
        self._stack.close()

    def __enter__(self) -> "StageTelemetry":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _listen(self) -> MetricsServer | None:
        auth = EndpointAuth.from_section(self._section)
        try:
            return MetricsServer(self._section.address, self._section.port, self._merged, auth=auth)
        except ListenError as error:
            if self._section.required:
                hint = f"{error.hint} Or set telemetry.required=false to run without metrics.".strip()
                raise InputError(error.problem, field=error.field, got=error.got, hint=hint) from error
            logger.warning("no metrics are served: %s", error)
            return None

    def _write_summary(self, path: Path, text: bytes) -> None:
        """Add this stage's final values to the file, and keep those of other stages."""
        try:
            stages = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            values = {"time": round(time.time(), 3), "series": series_values(text.decode())}
            write_json(path, {**stages, self._stage: values})
        except (OSError, ValueError, TypeError) as error:
            logger.warning("%s: cannot write the final metrics of the stage: %s", path, error)

    def _request_gateway(self, method: str, deadline: float, body: bytes | None = None) -> bool:
        """Send a request to the Pushgateway; log a warning and return False if it failed or took too long."""
        assert self._section.pushgateway is not None
        key = {"job": "podscale", "instance": socket.gethostname(), "run": self._run, "stage": self._stage}
        group = "/".join(f"{name}/{quote(value, safe='')}" for name, value in key.items())
        url = f"{self._section.pushgateway.rstrip('/')}/metrics/{group}"
        try:
            request = urllib.request.Request(url, body, {"Content-Type": CONTENT_TYPE}, method=method)
            seconds = max(MIN_GATEWAY_SECONDS, min(GATEWAY_SECONDS, deadline - time.monotonic()))
            with urllib.request.urlopen(request, timeout=seconds):
                return True
        except (OSError, ValueError, HTTPException) as error:  # URLError and HTTPError are OSErrors
            reason = getattr(error, "reason", None) or error
            logger.warning("telemetry.pushgateway %s: %s failed: %s", self._section.pushgateway, method, reason)
            return False


class PodMetrics:
    """Metrics of this pod in `registry`, polled until `close`.

    Args:
        volumes: Paths by their names in the catalogue; they need not exist yet.
    """

    def __init__(self, registry: CollectorRegistry, *, run: str, engine: str, volumes: Mapping[str, Path]) -> None:
        self.values = MetricRegistry(run=run)
        self.values.declare("telemetry_scrapes", "telemetry_connections_shed")
        build = {"version": VERSION, "engine": engine, "python": platform.python_version()}
        self.values.set_info("build_info", build)
        self._volumes = volumes
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="pod-metrics", daemon=True)
        self._thread.start()
        registry.register(self.values)

    def add_server(self, server: MetricsServer) -> None:
        def count() -> None:
            self.values.set("telemetry_scrapes", server.scrapes)
            self.values.set("telemetry_connections_shed", server.shed_connections)

        self.values.on_collect(count)

    def close(self) -> None:
        """Stop polling; does not wait for a call that hangs."""
        self._closed.set()

    def _poll(self) -> None:
        nvml = Nvml.open()
        while True:
            self._update_volumes()
            for gpu in nvml.states() if nvml is not None else ():
                self._update_gpu(gpu)
            if self._closed.wait(POLL_SECONDS):
                return

    def _update_volumes(self) -> None:
        for name, path in self._volumes.items():
            with suppress(OSError):
                usage = shutil.disk_usage(path)
                self.values.set("disk_free_bytes", usage.free, name)
                self.values.set("disk_size_bytes", usage.total, name)

    def _update_gpu(self, gpu: "GpuState") -> None:
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


@dataclass(frozen=True)
class GpuState:
    """State of one GPU; None for values that it does not report.

    Args:
        index: NVML's index, in the order of the bus.
        utilization: Fraction of time with a kernel running.
        memory_used: Bytes.
        memory_size: Bytes.
    """

    index: int
    utilization: float | None
    memory_used: float | None
    memory_size: float | None
    watts: float | None
    celsius: float | None


class Nvml:
    """NVIDIA Management Library (NVML)."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._handles = [
            self._query(library.nvmlDeviceGetHandleByIndex, i) for i in range(library.nvmlDeviceGetCount())
        ]

    @classmethod
    def open(cls) -> "Nvml | None":
        """Load the library; None without a driver, a GPU, or the module pynvml (package nvidia-ml-py)."""
        try:
            import pynvml

            pynvml.nvmlInit()
            return cls(pynvml)
        except ImportError:
            return None
        except pynvml.NVMLError:
            return None

    def states(self) -> list[GpuState]:
        """Return the states of the GPUs that NVML shows to this container, without those that have failed."""
        return [self._state(index, handle) for index, handle in enumerate(self._handles) if handle is not None]

    def _state(self, index: int, handle: Any) -> GpuState:
        nvml = self._library
        rates = self._query(nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = self._query(nvml.nvmlDeviceGetMemoryInfo, handle)
        milliwatts = self._query(nvml.nvmlDeviceGetPowerUsage, handle)
        return GpuState(
            index,
            utilization=rates.gpu / 100 if rates is not None else None,
            memory_used=memory.used if memory is not None else None,
            memory_size=memory.total if memory is not None else None,
            watts=milliwatts / 1000 if milliwatts is not None else None,
            celsius=self._query(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        )

    def _query(self, function: Any, *arguments: Any) -> Any:
        """Return the value; None if the GPU has failed or does not support the query (MIG instances, virtual GPUs)."""
        try:
            return function(*arguments)
        except self._library.NVMLError:
            return None
