"""What accelerators can do at best: peaks to set measured rates against.

Dense matrix arithmetic in TFLOP/s (a multiply-add counts as 2), without structured sparsity, at the boost clock of the
part named; memory in GB/s. The figures are those of NVIDIA's data sheets as the field quotes them; they were not read
again for this table, so a rate relative to them is only as good as they are.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuChip:
    """One accelerator. fp32 is ordinary arithmetic (TF32 stays off, see pytorch.precision); 0 = not offered."""

    name: str
    fp32: float
    fp16: float
    bf16: float
    memory_bandwidth: float

    def peak_tflops(self, precision: str) -> float:
        """TFLOP/s of a policy of the run document (`train.precision`); 0 where the chip does not offer it."""
        return {"fp32": self.fp32, "fp16": self.fp16}.get(precision, self.bf16)


GPU_CHIPS = (
    GpuChip("B200", 75.0, 2250.0, 2250.0, 8000.0),
    GpuChip("H200", 66.9, 989.4, 989.4, 4800.0),
    GpuChip("H100 PCIe", 51.2, 756.0, 756.0, 2000.0),
    GpuChip("H100", 66.9, 989.4, 989.4, 3350.0),
    GpuChip("A100", 19.5, 312.0, 312.0, 2039.0),
    GpuChip("L40S", 91.6, 362.0, 362.0, 864.0),
    GpuChip("L4", 30.3, 121.0, 121.0, 300.0),
    GpuChip("V100", 15.7, 125.0, 0.0, 900.0),
    GpuChip("T4", 8.1, 65.0, 0.0, 320.0),
    GpuChip("P100", 10.6, 21.2, 0.0, 732.0),
    GpuChip("P40", 11.8, 0.0, 0.0, 346.0),
)
"""More specific names first. The A100's bandwidth is the 80 GB part's; V100, P100: SXM2."""


def find_gpu_chip(device: str) -> GpuChip | None:
    """The chip that a device's name (as the driver tells it) speaks of; None where it is not in the table."""
    words = device.replace("-", " ").split()
    return next((chip for chip in GPU_CHIPS if all(word in words for word in chip.name.split())), None)
