"""What NVML tells of this machine's GPUs; nothing where there are none, or the bindings are not installed."""

from dataclasses import dataclass
from typing import Any


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
