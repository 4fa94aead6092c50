"""Metrics of one pod's supervisor, beside those of its ranks: build, volumes, GPUs (NVML), and the endpoint's own.

A thread polls volumes and GPUs: a call on a dead network volume or a failed GPU may hang, and then only these values
stop while the endpoint goes on.
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
from typing import Any
from urllib.parse import quote

from prometheus_client import CollectorRegistry

from podscale.config.telemetry import TelemetrySection
from podscale.errors import InputError
from podscale.telemetry.endpoint import Endpoint
from podscale.telemetry.registry import MergedMetrics, MetricRegistry, series_values
from podscale.telemetry.server import CONTENT_TYPE, EndpointAuth, ListenError, MetricsServer
from podscale.util.files import write_json
from podscale.version import VERSION


@dataclass(frozen=True)
class GpuState:
    """One GPU now. index: NVML's, in the order of the bus; utilization: share of time a kernel ran; None: not told."""

    index: int
    utilization: float | None
    memory_used: float | None
    memory_size: float | None
    watts: float | None
    celsius: float | None


class Nvml:
    """NVIDIA's management library, in this process until `close`."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._handles = [library.nvmlDeviceGetHandleByIndex(i) for i in range(library.nvmlDeviceGetCount())]

    @classmethod
    def open(cls) -> "Nvml | None":
        """None where there is no driver, no GPU, or no module pynvml (package nvidia-ml-py)."""
        try:
            import pynvml

            pynvml.nvmlInit()
        except ImportError:
            return None
        except pynvml.NVMLError:
            return None
        return cls(pynvml)

    def states(self) -> list[GpuState]:
        """Every GPU that NVML shows to this container."""
        return [self._state(number, handle) for number, handle in enumerate(self._handles)]

    def close(self) -> None:
        self._library.nvmlShutdown()

    def _state(self, number: int, handle: Any) -> GpuState:
        nvml = self._library
        rates = self._query(nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = self._query(nvml.nvmlDeviceGetMemoryInfo, handle)
        milliwatts = self._query(nvml.nvmlDeviceGetPowerUsage, handle)
        return GpuState(
            number,
            utilization=rates.gpu / 100 if rates is not None else None,
            memory_used=memory.used if memory is not None else None,
            memory_size=memory.total if memory is not None else None,
            watts=milliwatts / 1000 if milliwatts is not None else None,
            celsius=self._query(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        )

    def _query(self, question: Any, *arguments: Any) -> Any:
        """The answer, or None: parts of GPUs (MIG) and virtual ones do not answer everything."""
        try:
            return question(*arguments)
        except self._library.NVMLError:
            return None


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


PUSHED_STAGES = ("shard", "evaluate")
"""Stages that may be over before Prometheus has found them."""
GATEWAY_SECONDS = 10.0

logger = logging.getLogger(__name__)

Interrupted = Callable[[], bool]


class StageTelemetry:
    """Serves a stage's metrics where the document wants them; use as a context manager.

    snapshots: where this pod's ranks leave theirs. volumes, engine: see PodMetrics. registry: for the stage's own.
    Raises InputError for unusable certificates and the like; where the address cannot be listened on, only if metrics
    are required, else it warns and everything here does nothing.
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
        """Where the metrics are; None where they are not served."""
        return self._server.url if self._server is not None else None

    def start(self, endpoint: Path | None = None) -> None:
        """Begins to answer, and says where: to people, and in the file `endpoint` for as long as that is true."""
        if self._server is None:
            return
        self._server.start()
        print(f"metrics at {self.url}", file=sys.stderr, flush=True)
        if endpoint is not None:
            with suppress(OSError):
                Endpoint.from_section(self._server.url, self._section).write(endpoint)
                self._stack.callback(endpoint.unlink, missing_ok=True)

    def set_launches(self, launches: int | None) -> None:
        """Ranks are about to begin; launches: of the training so far, where that is known here."""
        if self._pod is not None and launches is not None:
            self._pod.values.set("train_launches", launches)

    def finish(self, summary: Path | None, interrupted: Interrupted = lambda: False) -> None:
        """Makes the last values known: in the file `summary`, to the Pushgateway, and to whoever scrapes soon.

        Nothing of it can fail the stage. It lasts as long as the document lets it, and not once `interrupted`.
        """
        if self._server is None:
            return
        self._merged.refresh()
        text = self._merged()
        if summary is not None:
            self._summarize(summary, text)
        deadline = time.monotonic() + self._section.linger_seconds
        pushed = self._stage in PUSHED_STAGES and self._section.pushgateway is not None and self._push(text)
        self._server.wait_for_scrape(self._section.linger_seconds, interrupted)
        if pushed:
            while time.monotonic() < deadline and not interrupted():
                time.sleep(0.1)
            self._send_to_gateway("DELETE")

    def close(self) -> None:
        """Ends the endpoint; safe to call twice."""
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
                raise InputError(
                    error.problem,
                    field=error.field,
                    got=error.got,
                    hint=f"{error.hint} Or set telemetry.required=false to go on without metrics.".strip(),
                ) from error
            logger.warning("no metrics are served: %s", error)
            return None

    def _summarize(self, path: Path, text: bytes) -> None:
        """Puts the last figures of this stage beside those of others."""
        try:
            before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            write_json(
                path, {**before, self._stage: {"time": round(time.time(), 3), "series": series_values(text.decode())}}
            )
        except (OSError, ValueError, TypeError) as error:
            logger.warning("%s: the last figures of the stage could not be written: %s", path, error)

    def _push(self, text: bytes) -> bool:
        return self._send_to_gateway("PUT", text)

    def _send_to_gateway(self, method: str, body: bytes | None = None) -> bool:
        """Whether the gateway did it; else it warns."""
        assert self._section.pushgateway is not None
        key = {"job": "podscale", "instance": socket.gethostname(), "run": self._run, "stage": self._stage}
        group = "/".join(f"{name}/{quote(value, safe='')}" for name, value in key.items())
        url = f"{self._section.pushgateway.rstrip('/')}/metrics/{group}"
        try:
            request = urllib.request.Request(url, body, {"Content-Type": CONTENT_TYPE}, method=method)
            with urllib.request.urlopen(request, timeout=GATEWAY_SECONDS):
                return True
        except (OSError, ValueError, HTTPException) as error:  # URLError and HTTPError are OSErrors
            reason = getattr(error, "reason", None) or error
            logger.warning("telemetry.pushgateway %s: %s failed: %s", self._section.pushgateway, method, reason)
            return False
