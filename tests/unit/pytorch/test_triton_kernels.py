"""One case of each family of Triton kernels in Triton's interpreter; the other cases are slow tests."""

import json

from tests.support.triton_kernels import interpret


def test_kernels_equal_float64_and_pil() -> None:
    """Batch norm with the sum of a block; a 1x1 convolution of an activated input; crops along one axis."""
    errors = json.loads(interpret("-m", "tests.support.kernel_samples"))
    assert errors.pop("crops") == 0
    assert set(errors) == {"batch norm", "convolution"}
    assert all(error < 2e-6 for error in errors.values()), errors
