"""int8 messages against a float64 oracle: half a step of each block, ties to even, values that are not finite."""

import numpy as np
import pytest
import torch
from torch import Tensor

from podscale.pytorch.all_reduce.wire_formats import BLOCK_ELEMENTS, WIRE_FORMATS

INT8 = WIRE_FORMATS["int8"]
LENGTHS = (1, 3, 4, 255, 256, 257, 1000)
TINIEST = 2.0**-126


def decoded(values: Tensor) -> Tensor:
    return INT8.decode(INT8.encode(values), values.shape[-1])


def half_steps(values: np.ndarray) -> np.ndarray:
    """Return half a step of each value's block, computed in float64."""
    blocks = np.split(np.abs(values), range(BLOCK_ELEMENTS, len(values), BLOCK_ELEMENTS))
    return np.concatenate([np.full(len(block), max(block.max() / 127, TINIEST) / 2) for block in blocks])


@pytest.mark.parametrize("scale", [1e-45, 1e-38, 1e-3, 1.0, 1e30])
@pytest.mark.parametrize("length", LENGTHS)
def test_an_error_is_half_a_step_of_its_block_at_most(length: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(length)
    spread = torch.logspace(0, -6, -(-length // BLOCK_ELEMENTS)).repeat_interleave(BLOCK_ELEMENTS)[:length]
    values = torch.randn(length, generator=generator) * spread * scale
    exact = values.double().numpy()
    error = np.abs(decoded(values).double().numpy() - exact)
    # A scale is cut to 17 bits, so a value at the edge of its block may be 127 * 2^-16 of a step further off.
    assert (error <= half_steps(exact) * 1.004).all()


def test_ties_are_rounded_to_even() -> None:
    values = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5])
    assert decoded(values).tolist() == [127, 0, 2, 2, 0, -2, -2, 126]


def test_zeros_and_values_below_the_smallest_step_arrive_as_positive_zeros() -> None:
    values = torch.cat([torch.zeros(300), torch.full((20,), -TINIEST / 4)])
    assert not decoded(values).view(torch.int32).any()


def test_the_largest_number_stays_finite() -> None:
    largest = torch.finfo(torch.float32).max
    assert decoded(torch.tensor([largest, -largest])).tolist() == pytest.approx([largest, -largest], rel=1e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_arrives_as_nan_and_spares_its_block(value: float) -> None:
    values = torch.randn(600, generator=torch.Generator().manual_seed(0))
    spoiled = values.clone()
    spoiled[[0, 300, 599]] = value
    result = decoded(spoiled)
    assert torch.nonzero(result.isnan()).flatten().tolist() == [0, 300, 599]
    finite = spoiled.isfinite()
    bound = half_steps(torch.where(finite, spoiled, 0.0).double().numpy()) * 1.004
    assert ((result - values).abs()[finite].double().numpy() <= bound[finite.numpy()]).all()
    assert decoded(torch.full((5,), value)).isnan().all()


@pytest.mark.parametrize("scale", [1e-40, 1e-37, 1.0, 1e38])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_message_that_is_encoded_again_has_the_same_bytes(length: int, scale: float) -> None:
    for seed in range(50):
        message = INT8.encode(torch.randn(length, generator=torch.Generator().manual_seed(seed)) * scale)
        assert torch.equal(INT8.encode(INT8.decode(message, length)), message)


@pytest.mark.parametrize("length", LENGTHS)
def test_rows_are_messages_of_their_own(length: int) -> None:
    values = torch.randn(3, length, generator=torch.Generator().manual_seed(length))
    messages = INT8.encode(values)
    assert messages.shape == (3, INT8.message_length(length))
    for row, message, result in zip(values, messages, INT8.decode(messages, length), strict=True):
        assert torch.equal(message, INT8.encode(row))
        assert torch.equal(result, decoded(row))


def test_bytes_of_a_message() -> None:
    assert [INT8.message_length(values) for values in (1, 4, 256, 257)] == [4 + 4, 4 + 4, 4 + 256, 8 + 260]
    assert INT8.message_length(2**20) == 2**20 * INT8.bytes_per_value == 2**20 * (1 + 1 / 64)
    assert {name: wire.bytes_per_value for name, wire in WIRE_FORMATS.items() if name != "int8"} == {
        "fp32": 4,
        "bf16": 2,
        "fp16": 2,
    }


def test_nothing_waits_for_the_values_of_a_gpu() -> None:
    """A tensor on the device `meta` has no values, so an operation that reads one on the host fails."""
    values = torch.empty(3, 1000, device="meta")
    assert INT8.decode(INT8.encode(values), 1000).shape == (3, 1000)
