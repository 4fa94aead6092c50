"""Texts of CUDA, PyTorch, NCCL and XLA that report a failed GPU, and texts that do not."""

import pytest

from podscale.distributed.gpu_failure import GpuFailure, find_gpu_failure, gpu_failure_of

ECC = "CUDA error: uncorrectable ECC error encountered"


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        (f"{ECC}\nSearch for `cudaErrorECCUncorrectable' in NVIDIA's documentation", GpuFailure(ECC, True)),
        (
            "NCCL error in: NCCLUtils.cpp:12, unhandled cuda error\nLast error:\n"
            "Cuda failure 220 'uncorrectable NVLink error detected during the execution'",
            GpuFailure("Cuda failure 220 'uncorrectable NVLink error detected during the execution'", True),
        ),
        (
            "INTERNAL: CUDA error: Failed to end stream: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was met",
            GpuFailure(
                "CUDA error: Failed to end stream: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was met", False
            ),
        ),
        ("INTERNAL: CUDA_ERROR_UNKNOWN: unknown error", GpuFailure("CUDA_ERROR_UNKNOWN: unknown error", True)),
        ("CUDA error: unknown error", GpuFailure("CUDA error: unknown error", True)),
        ("CUDA error: unspecified launch failure", GpuFailure("CUDA error: unspecified launch failure", False)),
        ("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB", None),
        ("CUDA error: device-side assert triggered", None),
        ("CUDA error: no kernel image is available for execution on the device", None),
        ("unknown error in the loader", None),
        ("NCCL error: remote process exited or there was a network error", None),
    ],
)
def test_failures_are_found_in_texts(text: str, failure: GpuFailure | None) -> None:
    assert find_gpu_failure(text) == failure
    assert gpu_failure_of(RuntimeError(text)) == failure


def test_a_log_line_counts_from_its_error_on() -> None:
    log = f"step 3\n[E1129 21:00:00 ProcessGroupNCCL.cpp:2057] [rank3] watchdog: {ECC}\nmore"
    assert find_gpu_failure(log) == GpuFailure(ECC, True)


def test_errors_of_other_types_are_not_of_a_gpu() -> None:
    assert gpu_failure_of(ValueError(ECC)) is None
