"""Steps in rows, as on a GPU, give the bits of steps in chunks, in few operations for any model size."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from podscale.config.optimizer import NeumannSection, NlcgSection
from podscale.pytorch.optim import Adam, Lamb, Lars, Neumann, Nlcg, Optimizer, ParamShard, ParamSlice, RmsProp, Sgd
from podscale.pytorch.optim.param_shard import slice_of_rows
from podscale.training.param_layout import ALIGNMENT_ELEMENTS
from tests.support.flat_share import FlatArrays, hyper

SHAPES = {"conv": (8, 4, 3, 3), "gamma": (8,), "fc": (5, 8), "zero": (6, 6), "large": (40_000,), "last": (3,)}
DECAYS = {name: name not in ("gamma", "last") for name in SHAPES}
RULES: dict[str, Callable[[ParamShard], Optimizer]] = {
    "sgd": lambda share: Sgd(share, nesterov=False),
    "sgd, nesterov": lambda share: Sgd(share, nesterov=True),
    "lars": lambda share: Lars(share, nesterov=False, trust_coefficient=0.01),
    "lars, norm of sum": lambda share: Lars(share, nesterov=True, trust_coefficient=0.01, trust="norm_of_sum"),
    "lamb": lambda share: Lamb(share, beta2=0.99),
    "nlcg": lambda share: Nlcg(share, NlcgSection(beta="polak_ribiere", norm_gradient_scale=0.5)),
    "neumann": lambda share: Neumann(share, NeumannSection(sgd_epochs=0.1), 10.0),
    "adam": lambda share: Adam(share, decoupled=True),
    "rmsprop": lambda share: RmsProp(share),
}
OVER_ALL = ("nlcg", "neumann")
"""Optimizers with sums over whole ranges, which add in another order than sums over chunks."""


def arrays(seed: int) -> dict[str, np.ndarray[Any, Any]]:
    generator = np.random.default_rng(seed)
    return {name: generator.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def train(rule: str, owned: list[tuple[int, int]], *, rows: bool, own: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and moments after five steps, one of them masked; if `own`, of masters with this shard only."""
    flat = FlatArrays(arrays(0), DECAYS)
    ranges = owned or [(0, len(flat.weights))]
    weights = torch.cat([flat.weights[start:stop] for start, stop in ranges]) if own else flat.weights
    share = ParamShard(flat.segments, ranges, weights, flat.gradients, rows=rows)
    optimizer = RULES[rule](share)
    for step in range(5):
        flat.step(optimizer, arrays(step + 1), hyper(0.1, 0.9 - 0.1 * step), finite=step != 2)
    return weights, torch.cat(list(optimizer.moments.values()))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("owned", [[], [(0, 320), (384, 39_680)], [(39_680, 40_480)]])
@pytest.mark.parametrize("rule", RULES)
def test_rows_give_the_bits_of_chunks(rule: str, owned: list[tuple[int, int]], own: bool) -> None:
    expected = train(rule, owned, rows=False, own=own)
    result = train(rule, owned, rows=True, own=own)
    for left, right in zip(result, expected, strict=True):
        if rule in OVER_ALL:
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(left, right)
    assert expected[1].any()


def test_every_row_has_the_index_of_its_parameter() -> None:
    segments = [
        ParamSlice("a", 64, 33, True, True),
        ParamSlice("b", 0, 40, True, True),
        ParamSlice("c", 160, 1, True, True),
    ]
    (whole,) = slice_of_rows(segments, [(0, 192)])
    assert whole.tolist() == [1, 1, 0, 0, 0, 2]  # 40 elements of b, 33 of a, zeros (the first's), 1 of c
    assert [part.tolist() for part in slice_of_rows(segments, [(32, 96), (160, 192)])] == [[1, 0], [2]]
    assert ALIGNMENT_ELEMENTS == 32


def test_the_number_of_operations_does_not_grow_with_the_weights() -> None:
    """On a GPU each operation on a tensor is a launch, and ResNet-50 has thousands of chunks."""

    class Count(TorchDispatchMode):
        tensors = 0

        def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
            if "addcmul" in str(function):
                self.tensors += len(arguments[0]) if isinstance(arguments[0], list | tuple) else 1
            return function(*arguments, **(options or {}))

    counts = {}
    for rows in (False, True):
        size = 20 * 2**15
        segments = [ParamSlice("w", 0, size, True, True)]
        optimizer = RULES["lars"](ParamShard(segments, [(0, size)], torch.ones(size), torch.ones(size), rows=rows))
        with Count() as counter:
            optimizer.step(hyper(0.1), torch.tensor(True))
        counts[rows] = counter.tensors
    assert counts == {False: 60, True: 3}
