"""Accelerators by the names that drivers report."""

import pytest

from podscale.hardware import GPU_CHIPS, find_gpu_chip


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("Tesla V100-SXM2-32GB", "V100"),
        ("Tesla P40", "P40"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("Tesla T4", "T4"),
        ("AMD EPYC", None),
    ],
)
def test_names(device: str, name: str | None) -> None:
    chip = find_gpu_chip(device)
    assert (chip.name if chip else None) == name


def test_peaks_by_policy() -> None:
    h200, v100 = find_gpu_chip("NVIDIA H200"), find_gpu_chip("Tesla V100")
    assert h200 is not None
    assert v100 is not None
    assert h200.peak_tflops("bf16") == h200.peak_tflops("bf16-pure") == h200.peak_tflops("fp16") == 989.4
    assert h200.peak_tflops("fp32") == 66.9, "TF32 is off in fp32"
    assert v100.peak_tflops("bf16") == 0.0
    assert all(chip.memory_bandwidth > 0 and chip.fp32 > 0 for chip in GPU_CHIPS)
