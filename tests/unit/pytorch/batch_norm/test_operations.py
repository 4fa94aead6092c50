"""Moments of images on a CPU, in one block, in many and for a compiler, with means near zero and far from it."""

import numpy as np
import pytest
import torch

from podscale.pytorch.batch_norm import operations


@pytest.mark.parametrize("is_compiling", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("block", [1, 1000, 2**20])
@pytest.mark.parametrize(("mean", "deviation"), [(0.0, 1.0), (3.0, 0.5), (1000.0, 0.05), (-1e5, 1.0)])
def test_moments_are_those_of_float64(
    monkeypatch: pytest.MonkeyPatch, is_compiling: bool, channels_last: bool, block: int, mean: float, deviation: float
) -> None:
    monkeypatch.setattr(operations, "MOMENT_BLOCK_VALUES", block)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: is_compiling)
    x = torch.randn(11, 3, 19, 17, generator=torch.Generator().manual_seed(1)) * deviation + mean
    x[:, 1] *= 0.5  # channels differ
    x = x.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    want_var, want_mean = torch.var_mean(x.double(), dim=(0, 2, 3), correction=0)
    found_mean, found_var = operations.moments(x)
    np.testing.assert_allclose(found_var.numpy(), want_var.numpy(), rtol=1e-5)
    np.testing.assert_allclose(found_mean.numpy(), want_mean.numpy(), rtol=2e-7, atol=1e-5 * deviation)


def test_a_constant_channel_has_no_variance() -> None:
    mean, var = operations.moments(torch.full((2, 3, 4, 4), 7.25))
    assert mean.tolist() == [7.25] * 3
    assert var.tolist() == [0.0] * 3


@pytest.mark.parametrize("total", [1, 63, 64, 65, 49 * 400, 2**31 - 1, 2**31, 428 * 400 * 112 * 112, 2**36 + 12345])
def test_counts_of_the_cuda_kernel_add_up_beyond_int32(total: int) -> None:
    counts = operations.int32_counts(torch.tensor([float(total)], dtype=torch.float64))
    assert counts.dtype == torch.int32
    assert int(counts.min()) >= 0
    assert sum(counts.tolist()) == total  # the kernel adds them in int64
