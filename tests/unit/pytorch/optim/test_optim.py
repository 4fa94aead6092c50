"""Optimizers follow independent float64 NumPy oracles over many steps, in every form.

test_torch_parity compares the forms that other libraries define with those libraries.
"""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from podscale.config import ModelSection
from podscale.config.optimizer import NeumannSection, NlcgSection, OptimizerSection
from podscale.models import model_spec
from podscale.pytorch.flat_buffers import GradientBuffer
from podscale.pytorch.models import build_model
from podscale.pytorch.optim import Adam, Lamb, Lars, Neumann, Nlcg, Optimizer, ParamSlice, RmsProp, Sgd
from podscale.pytorch.optim.build_optimizer import build_param_slices
from podscale.pytorch.optim.param_shard import CHUNK_ELEMENTS, cut_chunks
from tests.support.flat_share import FlatArrays, hyper
from tests.support.optimizer_oracles import (
    DECAYS,
    EVERYTHING,
    SHAPES,
    STEPS,
    compare,
    google_lars_2018,
    gradients,
    lamb_oracle,
    momentum_oracle,
    start,
    trust_ratio,
)
from tests.support.refusals import refused


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_with_the_rate_in_its_buffer_follows_its_oracle(nesterov: bool) -> None:
    """The form of the published large-batch runs; test_torch_parity has torch's form."""
    arrays = FlatArrays(start(), DECAYS)
    found = arrays.train(Sgd(arrays.share(), nesterov=nesterov, form="unscaled"), 1e-2)
    compare(found, momentum_oracle(None, "unscaled", nesterov, 1e-2, DECAYS, dict.fromkeys(SHAPES, False)))


@pytest.mark.parametrize("form", ["scaled", "unscaled", "ratio_inside"])
@pytest.mark.parametrize("trust", ["sum_of_norms", "norm_of_sum"])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(
    ("decay", "eps", "clip", "decays", "adapts"),
    [
        (0.0, 0.0, False, DECAYS, DECAYS),
        (1e-2, 1e-1, False, DECAYS, EVERYTHING),
        (1e-2, 0.0, True, EVERYTHING, EVERYTHING),
        (1e-2, 0.0, False, EVERYTHING, DECAYS),
    ],
)
def test_lars_follows_its_oracle(
    form: Any, trust: Any, nesterov: bool, decay: float, eps: float, clip: bool, decays: Any, adapts: Any
) -> None:
    def ratio_of(w: Any, g: Any, own_decay: float, rate: float) -> float:
        ratio = trust_ratio(w, g, own_decay, 0.05, eps, trust)
        return min(ratio / rate if rate else np.inf, 1.0) if clip else ratio

    arrays = FlatArrays(start(), decays, adapts)
    optimizer = Lars(
        arrays.share(), nesterov=nesterov, trust_coefficient=0.05, eps=eps, trust=trust, form=form, clip=clip
    )
    want = momentum_oracle(ratio_of, form, nesterov, decay, decays, adapts)
    compare(arrays.train(optimizer, decay), want)


@pytest.mark.parametrize("eps", [0.0, 1e-1])
def test_lars_follows_googles_code_of_2018(eps: float) -> None:
    decays = {name: name != "gamma" for name in SHAPES}
    adapts = {name: name not in ("gamma", "zero") for name in SHAPES}  # "zero" is the bias, which starts at 0
    arrays = FlatArrays(start(), decays, adapts)
    optimizer = Lars(arrays.share(), nesterov=False, trust_coefficient=0.05, eps=eps, trust="l2_in_loss", form="scaled")
    want = google_lars_2018(0.05, 0.05, eps, {"gamma"}, {"zero"})
    compare(arrays.train(optimizer, 0.05), want)


@pytest.mark.parametrize(
    ("decay", "clip_norm", "clip", "adapts"),
    [
        (0.0, 0.0, False, DECAYS),
        (1e-2, 1.0, True, EVERYTHING),
        (1e-2, 300.0, False, DECAYS),  # clips some of the steps
    ],
)
def test_lamb_follows_its_oracle(decay: float, clip_norm: float, clip: bool, adapts: dict[str, bool]) -> None:
    """Without clipping, and with trust ratios for every parameter; test_torch_parity compares the rest with timm's."""
    arrays = FlatArrays(start(), DECAYS, adapts)
    optimizer = Lamb(arrays.share(), beta2=0.99, eps=1e-6, clip_norm=clip_norm, clip=clip)
    compare(arrays.train(optimizer, decay), lamb_oracle(decay, 0.99, 1e-6, clip_norm, clip, adapts))
    assert optimizer.scalars["updates"] == STEPS


def rules(arrays: FlatArrays, **share: Any) -> dict[str, Optimizer]:
    return {
        "sgd": Sgd(arrays.share(**share), nesterov=True),
        "sgd unscaled": Sgd(arrays.share(**share), nesterov=False, form="unscaled"),
        "lars": Lars(arrays.share(**share), nesterov=True, trust_coefficient=0.02),
        "lars scaled": Lars(
            arrays.share(**share), nesterov=False, trust_coefficient=0.02, form="scaled", trust="norm_of_sum"
        ),
        "lamb": Lamb(arrays.share(**share), beta2=0.99),
        "nlcg": Nlcg(arrays.share(**share), NlcgSection(beta="polak_ribiere", lars_coefficient=0.01)),
        "neumann": Neumann(arrays.share(**share), NeumannSection(sgd_epochs=0, beta=0), 10.0),
        "adam": Adam(arrays.share(**share)),
        "adam decoupled": Adam(arrays.share(**share), decoupled=True),
        "rmsprop": RmsProp(arrays.share(**share)),
    }


@pytest.mark.parametrize("name", rules(FlatArrays(start(), DECAYS)))
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_masked_step_changes_nothing_to_the_bit(name: str, elsewhere: bool) -> None:
    """The bad gradient was seen and zeroed on this rank, or was seen by another rank that shares the weights."""
    bad_there = torch.tensor(0.0)

    def exchange(values: torch.Tensor) -> torch.Tensor:
        return values + torch.cat([bad_there.view(1), torch.full((len(values) - 1,), float("nan"))]) * bad_there

    arrays = FlatArrays(start(), DECAYS)
    optimizer = rules(arrays, exchange=exchange if elsewhere else None)[name]
    if not elsewhere:
        assert arrays.step(optimizer, gradients(0), hyper(0.1))
    else:
        exchanges = optimizer._shard._sum_ranks  # type: ignore[attr-defined]
        optimizer._shard._sum_ranks = None  # type: ignore[attr-defined]
        assert arrays.step(optimizer, gradients(0), hyper(0.1))
        optimizer._shard._sum_ranks = exchanges  # type: ignore[attr-defined]
        bad_there.fill_(1.0)
    kept = [arrays.weights, *optimizer.moments.values(), *optimizer.scalars.values()]
    before = [tensor.clone() for tensor in kept]
    zeros = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    assert not arrays.step(optimizer, gradients(1) if elsewhere else zeros, hyper(0.1), finite=elsewhere)
    assert all(torch.equal(a, b) for a, b in zip(kept, before, strict=True))
    assert all(tensor.any() for tensor in kept)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 3 * CHUNK_ELEMENTS), min_size=1, max_size=8), st.integers(1, 5), st.randoms())
def test_the_chunks_of_all_ranks_cover_each_element_once(sizes: list[int], ranks: int, random: Any) -> None:
    starts = np.concatenate([[0], np.cumsum([size + random.randrange(40) for size in sizes])]).tolist()
    segments = [ParamSlice(str(i), starts[i], size, True, True) for i, size in enumerate(sizes)]
    length = -(-starts[-1] // ranks) * ranks
    shards = [(rank * length // ranks, (rank + 1) * length // ranks) for rank in range(ranks)]
    seen = np.zeros(length, int)
    for first, last in shards:
        for piece in cut_chunks(segments, [(first, last)]):
            segment = segments[piece.slice_index]
            assert first <= piece.flat_offset and piece.flat_offset + piece.size <= last  # noqa: PT018
            assert segment.start <= piece.flat_offset and piece.flat_offset + piece.size <= segment.start + segment.size  # noqa: PT018
            assert piece.local_offset == piece.flat_offset - first
            assert 0 < piece.size <= CHUNK_ELEMENTS
            seen[piece.flat_offset : piece.flat_offset + piece.size] += 1
    want = np.zeros(length, int)
    for segment in segments:
        want[segment.start : segment.start + segment.size] = 1
    np.testing.assert_array_equal(seen, want)


SECTION = ModelSection(name="resnet18", width=8, stem="small")


def segments_of(**options: Any) -> dict[str, ParamSlice]:
    model = build_model(SECTION, 10)
    buffer = GradientBuffer(model, torch.device("cpu"), bucket_elements=1000)
    return {
        s.name: s for s in build_param_slices(OptimizerSection(name="lars", **options), buffer, model_spec(SECTION, 10))
    }


def test_batch_norm_and_biases_neither_decay_nor_scale() -> None:
    weights = {p.name for p in model_spec(SECTION, 10).parameters if p.role == "weight"}
    plain = segments_of()
    assert list(plain) == [p.name for p in model_spec(SECTION, 10).parameters]
    assert {name for name, s in plain.items() if s.uses_weight_decay} == weights
    assert {name for name, s in plain.items() if s.uses_trust_ratio} == weights
    assert {n for n, s in plain.items() if s.is_batch_norm} == {n for n in plain if "bn" in n or "downsample.1" in n}
    assert all(s.uses_weight_decay and s.uses_trust_ratio for s in segments_of(decay_all=True).values())
    adapting = segments_of(adapt_all=True)
    assert all(s.uses_trust_ratio for s in adapting.values())
    assert {name for name, s in adapting.items() if s.uses_weight_decay} == weights
    decaying = segments_of(decay_biases=True)
    assert {name for name, s in decaying.items() if s.uses_weight_decay} == weights | {"fc.bias"}
    assert {name for name, s in decaying.items() if s.uses_trust_ratio} == weights


def test_the_skip_list_takes_names_and_patterns() -> None:
    plain, skipping = segments_of(), segments_of(skip=("fc.*", "conv1.weight"), adapt_all=True, decay_biases=True)
    for name in ("fc.weight", "fc.bias", "conv1.weight"):
        assert (skipping[name].uses_weight_decay, skipping[name].uses_trust_ratio) == (False, False)
    assert {n for n, s in plain.items() if s.uses_weight_decay} - {"fc.weight", "conv1.weight"} == {
        n for n, s in skipping.items() if s.uses_weight_decay
    }
    with refused("resnet18", field="train.optimizer.skip", got="head.*"):
        segments_of(skip=("head.*",))
