"""GPUs by NVML: with the real bindings where there is no GPU, and with a stand-in of them that has two."""

from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from podscale.telemetry import pod_telemetry
from podscale.telemetry.pod_telemetry import GpuState, Nvml, PodMetrics
from podscale.util import host_info
from tests.support.polling import until

pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")


class Library:
    """The functions of pynvml that we call, under their real names; GPU 1 is a part that tells its memory alone."""

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


def test_the_stand_in_has_what_the_bindings_have() -> None:
    missing = [name for name in vars(Library) if name.startswith("nvml") and not hasattr(pynvml, name)]
    assert missing == []


def test_no_gpu_is_no_error() -> None:
    if host_info.visible_gpus():
        pytest.skip("there is a GPU here")
    assert Nvml.open() is None


def test_what_a_gpu_does_not_tell_is_left_out() -> None:
    assert Nvml(Library()).states() == [
        GpuState(0, utilization=0.75, memory_used=10, memory_size=100, watts=350.5, celsius=61),
        GpuState(1, utilization=None, memory_used=20, memory_size=100, watts=None, celsius=None),
    ]


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
