"""GPUs by NVML: with the real bindings if there is no GPU, and with a fake of them that has two GPUs."""

import errno
import json
import logging
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from podscale.config.telemetry import TelemetrySection
from podscale.telemetry import metrics as telemetry_metrics
from podscale.telemetry import pod_telemetry
from podscale.telemetry.metrics import TrainMetrics
from podscale.telemetry.pod_telemetry import GpuState, Nvml, PodMetrics, StageTelemetry
from podscale.telemetry.registry import MAX_LABEL_LENGTH, SnapshotWriter, series_values, snapshot_path
from podscale.util import host_info
from tests.support.exposition import families, foreign, names, scrape
from tests.support.logs import logged
from tests.support.polling import until
from tests.support.refusals import refused

pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")


class Library:
    """Fake of the functions of pynvml that we call; GPU 1 is a MIG instance that reports only its memory."""

    NVMLError = pynvml.NVMLError
    NVML_TEMPERATURE_GPU = pynvml.NVML_TEMPERATURE_GPU

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:  # noqa: N802
        return number

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> Any:  # noqa: N802
        return SimpleNamespace(used=10 * (gpu + 1), total=100)

    def nvmlDeviceGetUtilizationRates(self, gpu: int) -> Any:  # noqa: N802
        return SimpleNamespace(gpu=self._whole(gpu, 75), memory=1)

    def nvmlDeviceGetPowerUsage(self, gpu: int) -> int:  # noqa: N802
        return self._whole(gpu, 350_500)

    def nvmlDeviceGetTemperature(self, gpu: int, sensor: int) -> int:  # noqa: N802
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return self._whole(gpu, 61)

    def _whole(self, gpu: int, value: int) -> int:
        if gpu == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return value


def test_the_fake_has_only_functions_of_the_bindings() -> None:
    missing = [name for name in vars(Library) if name.startswith("nvml") and not hasattr(pynvml, name)]
    assert missing == []


def test_no_gpu_is_no_error() -> None:
    if host_info.visible_gpus():
        pytest.skip("there is a GPU here")
    assert Nvml.open() is None


def test_values_that_a_gpu_does_not_report_are_left_out() -> None:
    assert Nvml(Library()).states() == [
        GpuState(0, utilization=0.75, memory_used=10, memory_size=100, watts=350.5, celsius=61),
        GpuState(1, utilization=None, memory_used=20, memory_size=100, watts=None, celsius=None),
    ]


def test_a_gpu_that_has_failed_does_not_hide_the_others() -> None:
    class Lost(Library):
        def nvmlDeviceGetHandleByIndex(self, number: int) -> int:  # noqa: N802
            if number == 1:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
            return number

    assert [gpu.index for gpu in Nvml(Lost()).states()] == [0]


def test_gpus_are_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_telemetry.Nvml, "open", lambda: Nvml(Library()))
    registry = CollectorRegistry()

    def value(name: str, gpu: str) -> float | None:
        return registry.get_sample_value(f"podscale_{name}", {"run": "r", "gpu": gpu})

    with closing(PodMetrics(registry, run="r", engine="pytorch", volumes={})):
        until(lambda: value("gpu_memory_used_bytes", "1") is not None, 60)
    assert value("gpu_utilization_ratio", "0") == 0.75
    assert value("gpu_memory_used_bytes", "1") == 20
    assert value("gpu_memory_size_bytes", "0") == 100
    assert value("gpu_power_watts", "0") == 350.5
    assert value("gpu_temperature_celsius", "0") == 61
    assert value("gpu_power_watts", "1") is None


def telemetry(tmp_path: Path, stage: str = "evaluate", **options: object) -> StageTelemetry:
    """Make the telemetry of a stage whose one rank has trained on 3 images."""
    registry = CollectorRegistry()
    TrainMetrics(registry, rank=0, run="r").count_step(3, 0.1)
    SnapshotWriter(registry, snapshot_path(tmp_path, 0), interval=3600).close()
    section = TelemetrySection.model_validate(options)
    return StageTelemetry(section, run="r", stage=stage, volumes={"scratch": tmp_path}, snapshots=tmp_path)


def run_stage(tmp_path: Path, stage: str = "evaluate", **options: object) -> None:
    with telemetry(tmp_path, stage, **options) as served:
        served.start()
        served.finish(None)


def test_ranks_and_the_pod_are_served_together(tmp_path: Path) -> None:
    with telemetry(tmp_path) as served:
        served.start(tmp_path / "url")
        assert served.url is not None
        assert (tmp_path / "url").read_text() == f"{served.url}\n"
        until(lambda: "disk_free_bytes" in names(scrape(served.url or "")), 30)
        text = scrape(served.url)
        assert foreign(text) == []
        assert {"train_images", "build_info", "telemetry_scrapes", "disk_size_bytes"} <= names(text)
    assert not (tmp_path / "url").exists()
    assert scrape(served.url) == ""


def test_without_a_free_port_the_stage_runs_without_metrics_unless_required(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with caplog.at_level(logging.WARNING), telemetry(tmp_path, port=port) as served:
            served.start(tmp_path / "url")
            served.finish(tmp_path / "summary.json")
        assert served.url is None
        ((error,),) = logged(caplog)
        assert (error.field, error.got) == ("telemetry.port", port)
        assert not (tmp_path / "url").exists()
        with refused("telemetry.required=false", field="telemetry.port", got=port):
            telemetry(tmp_path, port=port, required=True)


def test_the_last_metrics_are_written_next_to_those_of_other_stages(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text('{"train": {"series": {}}}')
    with telemetry(tmp_path) as served:
        served.start()
        served.finish(path)
    labels = json.loads(path.read_text())
    assert list(labels) == ["train", "evaluate"]
    assert labels["evaluate"]["series"]['podscale_train_images_total{rank="0",run="r"}'] == 3
    assert abs(labels["evaluate"]["time"] - time.time()) < 600


@pytest.mark.parametrize("content", ["no JSON", "[1]"])
def test_a_summary_that_cannot_be_written_is_one_warning(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "summary.json").write_text(content)
    with caplog.at_level(logging.WARNING), telemetry(tmp_path) as served:
        served.finish(tmp_path / "summary.json")
        served.finish(tmp_path / "no" / "such" / "folder.json")
    assert caplog.text.count("cannot write the final metrics of the stage") == 2


def test_series_values_are_finite_or_null() -> None:
    text = (
        '# TYPE a gauge\na{b="x\\"\\\\\\n"} NaN\na{b="y"} 2.5\n# TYPE h histogram\nh_bucket{le="+Inf"} 1\nh_count 1\n'
    )
    assert series_values(text) == {'a{b="x\\"\\\\\\n"}': None, 'a{b="y"}': 2.5, "h_count": 1.0}


class Gateway:
    """Fake Pushgateway: the requests it received, and its answer."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, bytes]] = []
        self.status, self.hangs_at, self.free = 200, "", threading.Event()
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
                gateway.asked.append((self.command, self.path, body))
                if self.command == gateway.hangs_at:
                    gateway.free.wait(30.0)
                self.send_response(gateway.status)
                self.end_headers()

            do_PUT = do_DELETE = answer  # noqa: N815 - names that http.server looks for

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    gateway = Gateway()
    yield gateway
    gateway.server.shutdown()
    gateway.server.server_close()


def test_short_stages_push_their_last_metrics_and_delete_them(tmp_path: Path, gateway: Gateway) -> None:
    run_stage(tmp_path, pushgateway=f"{gateway.url}/", linger_seconds=0.3)
    (put, path, body), (delete, same, nothing) = gateway.asked
    assert (put, delete, nothing) == ("PUT", "DELETE", b"")
    assert path == same == f"/metrics/job/podscale/instance/{socket.gethostname()}/run/r/stage/evaluate"
    assert b'podscale_train_images_total{rank="0",run="r"} 3.0' in body


def test_a_training_does_not_push(tmp_path: Path, gateway: Gateway) -> None:
    run_stage(tmp_path, "train", pushgateway=gateway.url, linger_seconds=0.1)
    assert gateway.asked == []


def test_a_missing_gateway_is_one_warning(tmp_path: Path, gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    gateway.status = 500
    refused_by = os.strerror(errno.ECONNREFUSED)
    for url, answer in ((gateway.url, "Internal Server Error"), (dead_url(), refused_by), ("http://[", "")):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            run_stage(tmp_path, pushgateway=url, linger_seconds=0.1)
        ((address, method, reason),) = logged(caplog)
        assert (address, method) == (url, "PUT")
        assert answer in str(reason)


@pytest.mark.parametrize("hangs_at", ["PUT", "DELETE"])
def test_the_time_of_a_hanging_gateway_is_part_of_the_linger(
    tmp_path: Path, gateway: Gateway, monkeypatch: pytest.MonkeyPatch, hangs_at: str
) -> None:
    monkeypatch.setattr(pod_telemetry, "MIN_GATEWAY_SECONDS", 0.2)
    gateway.hangs_at, linger = hangs_at, 0.5
    began = time.monotonic()
    run_stage(tmp_path, pushgateway=gateway.url, linger_seconds=linger)
    gateway.free.set()
    assert linger <= time.monotonic() - began < 2 * linger + 0.5  # of GATEWAY_SECONDS, each request took 10 s


def dead_url() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def pushgateway(tmp_path: Path) -> Iterator[Callable[[], str]]:
    """Start the real Pushgateway."""
    program = shutil.which("prometheus-pushgateway") or shutil.which("pushgateway")
    if program is None:
        pytest.skip("a Pushgateway is not installed (Debian package prometheus-pushgateway)")
    started = []

    def start() -> str:
        url = dead_url()
        started.append(subprocess.Popen([program, f"--web.listen-address={url[7:]}"], stderr=subprocess.DEVNULL))
        until(lambda: scrape(f"{url}/metrics") != "", 60)
        return url

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_real_pushgateway_shows_the_metrics_until_they_are_deleted(
    tmp_path: Path, pushgateway: Callable[[], str]
) -> None:
    url = pushgateway()
    text = 'podscale_train_images_total{instance="%s",job="podscale",rank="0",run="r",stage="evaluate"} 3'
    shown = text % socket.gethostname()
    stop = threading.Event()
    with telemetry(tmp_path, pushgateway=url, linger_seconds=600) as served:
        served.start()
        finishing = threading.Thread(target=served.finish, args=(None, stop.is_set))
        finishing.start()
        until(lambda: shown in scrape(f"{url}/metrics"), 60)
        stop.set()
        finishing.join(60)
    assert not finishing.is_alive()
    assert "podscale_train_images_total" not in scrape(f"{url}/metrics")


@pytest.mark.parametrize("value", ["\udcff\x00 odd", 'quote " \\ line\nbreak', "long" * 75, "\u2603"])
def test_any_text_may_become_a_label(value: str) -> None:
    registry = CollectorRegistry()
    metrics = TrainMetrics(registry, rank=0, run=value, info={"model": value})
    metrics.values.add("train_nonfinite_steps", 1, "loss")
    metrics.values.set("train_sampled_phase_seconds", 1, value)
    text = generate_latest(registry).decode()
    labels = {sample.labels["run"] for family in families(text) for sample in family.samples}
    assert len(labels) == 1
    assert all(0 < len(label) <= MAX_LABEL_LENGTH for label in labels)
    if shutil.which("promtool") is not None:
        check = subprocess.run(["promtool", "check", "metrics"], input=text.encode(), capture_output=True)
        assert (check.returncode, check.stdout + check.stderr) == (0, b"")


def test_a_clock_that_jumps_back_changes_time_stamps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = CollectorRegistry()
    metrics = TrainMetrics(registry, rank=0, run="r")
    with metrics.phase("optimizer"):
        metrics.count_step(3, 0.1)
    before = values(registry)
    monkeypatch.setattr(telemetry_metrics, "time", lambda: time.time() - 86_400 * 400)
    with metrics.phase("optimizer"):
        metrics.count_step(3, 0.1)
    after = values(registry)
    assert {name for name in before if after[name] < before[name]} == {
        "podscale_train_last_step_timestamp_seconds{rank='0', run='r'}"
    }


def values(registry: CollectorRegistry) -> dict[str, float]:
    text = generate_latest(registry).decode()
    return {
        f"{sample.name}{{{', '.join(f'{k}={v!r}' for k, v in sample.labels.items())}}}": sample.value
        for family in families(text)
        for sample in family.samples
    }
