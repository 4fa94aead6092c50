"""The update rules against independent NumPy oracles in float64, over many steps."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from podscale.config import ModelSection
from podscale.config.model import OptimizerSection
from podscale.errors import InputError
from podscale.models import spec
from podscale.pytorch.gradients import GradientBuffer
from podscale.pytorch.models import build_model
from podscale.pytorch.optim import Lamb, Lars, Optimizer, Segment, Sgd
from podscale.pytorch.optim.build import build_segments
from podscale.pytorch.optim.share import PIECE, cut
from tests.support.flat_share import FlatArrays, hyper

Values = dict[str, np.ndarray[Any, Any]]

SHAPES = {"conv": (8, 4, 3, 3), "gamma": (8,), "fc": (5, 8), "zero": (6, 6), "large": (40_000,)}
DECAYS = {"conv": True, "gamma": False, "fc": True, "zero": True, "large": True}
EVERYTHING = dict.fromkeys(SHAPES, True)
STEPS = 50
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


def start() -> Values:
    generator = np.random.default_rng(0)
    weights = {name: generator.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    weights["zero"][:] = 0
    return weights


@cache
def gradients(step: int) -> Values:
    generator = np.random.default_rng(1000 + step)
    return {name: generator.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def rate(step: int) -> float:
    """Starts at 0 as a warm-up does, and never stands still."""
    return 0.1 * min(step, 10) / 10 + 0.05 * abs(np.sin(step))


def momentum(step: int) -> float:
    return 0.9 - 0.2 * (step % 3 == 0)


def carry_out(arrays: FlatArrays, optimizer: Optimizer, decay: float) -> Values:
    for step in range(STEPS):
        assert arrays.step(optimizer, gradients(step), hyper(rate(step), momentum(step), decay))
    return arrays.take(arrays.weights)


def compare(found: Values, want: Values) -> None:
    for name, value in want.items():
        np.testing.assert_allclose(found[name], value, err_msg=name, **CLOSE)


def norm(x: np.ndarray[Any, Any]) -> float:
    return float(np.sqrt((x.astype(np.float64) ** 2).sum()))


def trust_ratio(
    w: np.ndarray[Any, Any], g: np.ndarray[Any, Any], decay: float, eta: float, eps: float, trust: str
) -> float:
    if trust == "sum_of_norms":
        below, zero = norm(g) + decay * norm(w), norm(g) == 0
    else:
        below, zero = norm(g + decay * w), norm(g + decay * w) == 0
    return 1.0 if zero or norm(w) == 0 else eta * norm(w) / (below + eps)


def momentum_oracle(
    ratio_of: Any, form: str, nesterov: bool, decay: float, decays: dict[str, bool], adapts: dict[str, bool]
) -> Values:
    """`ratio_of(w, g, decay, rate)` is the trust ratio of a parameter that adapts."""
    weights = {name: w.astype(np.float64) for name, w in start().items()}
    buffers = {name: np.zeros_like(w) for name, w in weights.items()}
    for step in range(STEPS):
        for name, g in gradients(step).items():
            w, g, own_decay = weights[name], g.astype(np.float64), decay * decays[name]
            ratio = ratio_of(w, g, own_decay, rate(step)) if adapts[name] else 1.0
            inside, outside = {
                "unscaled": (rate(step) * ratio, 1.0),
                "scaled": (1.0, rate(step) * ratio),
                "ratio_inside": (ratio, rate(step)),
            }[form]
            u = inside * (g + own_decay * w)
            buffers[name] = momentum(step) * buffers[name] + u
            weights[name] = w - outside * (u + momentum(step) * buffers[name] if nesterov else buffers[name])
    return weights


@pytest.mark.parametrize("form", ["scaled", "unscaled", "ratio_inside"])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("decay", [0.0, 1e-2])
def test_sgd_follows_its_oracle(form: Any, nesterov: bool, decay: float) -> None:
    arrays = FlatArrays(start(), DECAYS)
    found = carry_out(arrays, Sgd(arrays.share(), nesterov=nesterov, form=form), decay)
    compare(found, momentum_oracle(None, form, nesterov, decay, DECAYS, dict.fromkeys(SHAPES, False)))


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
    compare(carry_out(arrays, optimizer, decay), want)


def optax_lars(decay: float, eta: float) -> Values:
    """optax.lars with its default masks as its chain of transformations: decay, trust ratio, rate, trace."""
    weights = {name: w.astype(np.float64) for name, w in start().items()}
    trace = {name: np.zeros_like(w) for name, w in weights.items()}
    for step in range(STEPS):
        for name, g in gradients(step).items():
            update = g + decay * weights[name]
            w_norm, u_norm = np.linalg.norm(weights[name]), np.linalg.norm(update)
            update = update * (eta * w_norm / u_norm if w_norm and u_norm else 1.0)
            trace[name] = -rate(step) * update + momentum(step) * trace[name]
            weights[name] = weights[name] + trace[name]
    return weights


def test_lars_is_optaxs_where_its_options_say_so() -> None:
    arrays = FlatArrays(start(), EVERYTHING)
    optimizer = Lars(arrays.share(), nesterov=False, trust_coefficient=0.02, trust="norm_of_sum", form="unscaled")
    compare(carry_out(arrays, optimizer, 1e-2), optax_lars(1e-2, 0.02))


def timm_lars(decay: float, eta: float, eps: float, clip: bool, nesterov: bool) -> Values:
    """timm's Lars: groups without decay are plain momentum, the first step fills the buffer, the rate is outside."""
    weights = {name: w.astype(np.float64) for name, w in start().items()}
    buffers: Values = {}
    for step in range(1, STEPS):
        for name, g in gradients(step).items():
            g, w = g.astype(np.float64), weights[name]
            if DECAYS[name]:
                w_norm, g_norm = np.linalg.norm(w), np.linalg.norm(g)
                ratio = eta * w_norm / (g_norm + w_norm * decay + eps) if w_norm > 0 and g_norm > 0 else 1.0
                g = (g + decay * w) * (min(ratio / rate(step), 1.0) if clip else ratio)
            buffers[name] = g.copy() if name not in buffers else momentum(step) * buffers[name] + g
            weights[name] = w - rate(step) * (g + momentum(step) * buffers[name] if nesterov else buffers[name])
    return weights


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
def test_lars_is_timms_where_its_options_say_so(clip: bool, nesterov: bool) -> None:
    arrays = FlatArrays(start(), DECAYS)
    optimizer = Lars(
        arrays.share(), nesterov=nesterov, trust_coefficient=0.02, eps=1e-8, form="ratio_inside", clip=clip
    )
    for step in range(1, STEPS):
        arrays.step(optimizer, gradients(step), hyper(rate(step), momentum(step), 1e-2))
    compare(arrays.take(arrays.weights), timm_lars(1e-2, 0.02, 1e-8, clip, nesterov))


def lamb_oracle(decay: float, beta2: float, eps: float, clip_norm: float, clip: bool, adapts: Any) -> Values:
    weights = {name: w.astype(np.float64) for name, w in start().items()}
    m, v = ({name: np.zeros_like(w) for name, w in weights.items()} for _ in range(2))
    for step in range(STEPS):
        grads = {name: g.astype(np.float64) for name, g in gradients(step).items()}
        whole = np.sqrt(sum(norm(g) ** 2 for g in grads.values()))
        beta1 = momentum(step)
        for name, g in grads.items():
            g = g / max(1.0, whole / clip_norm) if clip_norm else g
            m[name] = beta1 * m[name] + (1 - beta1) * g
            v[name] = beta2 * v[name] + (1 - beta2) * g * g
            u = m[name] / (1 - beta1 ** (step + 1)) / (np.sqrt(v[name] / (1 - beta2 ** (step + 1))) + eps)
            u = u + decay * DECAYS[name] * weights[name]
            ratio = norm(weights[name]) / norm(u) if norm(weights[name]) and norm(u) else 1.0
            ratio = (min(ratio, 1.0) if clip else ratio) if adapts[name] else 1.0
            weights[name] = weights[name] - rate(step) * ratio * u
    return weights


@pytest.mark.parametrize(
    ("decay", "clip_norm", "clip", "adapts"),
    [(0.0, 0.0, False, DECAYS), (1e-2, 1.0, False, DECAYS), (1e-2, 1.0, True, EVERYTHING)],
)
def test_lamb_follows_its_oracle(decay: float, clip_norm: float, clip: bool, adapts: dict[str, bool]) -> None:
    arrays = FlatArrays(start(), DECAYS, adapts)
    optimizer = Lamb(arrays.share(), beta2=0.99, eps=1e-6, clip_norm=clip_norm, clip=clip)
    compare(carry_out(arrays, optimizer, decay), lamb_oracle(decay, 0.99, 1e-6, clip_norm, clip, adapts))
    assert optimizer.scalars["updates"] == STEPS


def test_sgd_is_torchs_own() -> None:
    arrays = FlatArrays(start(), DECAYS)
    theirs = {name: torch.from_numpy(w).requires_grad_() for name, w in start().items()}
    groups = [{"params": [w], "weight_decay": 1e-2 * DECAYS[name]} for name, w in theirs.items()]
    reference = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)
    optimizer = Sgd(arrays.share(), nesterov=True)
    for step in range(10):
        for w, g in zip(theirs.values(), gradients(step).values(), strict=True):
            w.grad = torch.from_numpy(g)
        reference.step()
        arrays.step(optimizer, gradients(step), hyper(0.1))
    for name, found in arrays.take(arrays.weights).items():
        np.testing.assert_allclose(found, theirs[name].detach().numpy(), rtol=1e-6, atol=1e-6)


def rules(arrays: FlatArrays, **share: Any) -> dict[str, Optimizer]:
    return {
        "sgd": Sgd(arrays.share(**share), nesterov=True),
        "sgd unscaled": Sgd(arrays.share(**share), nesterov=False, form="unscaled"),
        "lars": Lars(arrays.share(**share), nesterov=True, trust_coefficient=0.02),
        "lars scaled": Lars(
            arrays.share(**share), nesterov=False, trust_coefficient=0.02, form="scaled", trust="norm_of_sum"
        ),
        "lamb": Lamb(arrays.share(**share), beta2=0.99),
    }


@pytest.mark.parametrize("name", rules(FlatArrays(start(), DECAYS)))
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_masked_update_changes_nothing_to_the_bit(name: str, elsewhere: bool) -> None:
    """Whether the bad gradient was seen here, and zeroed, or by another rank that shares the weights."""
    bad_there = torch.tensor(0.0)

    def exchange(values: torch.Tensor) -> torch.Tensor:
        return values + torch.cat([bad_there.view(1), torch.full((len(values) - 1,), float("nan"))]) * bad_there

    arrays = FlatArrays(start(), DECAYS)
    optimizer = rules(arrays, exchange=exchange if elsewhere else None)[name]
    if not elsewhere:
        assert arrays.step(optimizer, gradients(0), hyper(0.1))
    else:
        exchanges = optimizer._share._exchange  # type: ignore[attr-defined]
        optimizer._share._exchange = None  # type: ignore[attr-defined]
        assert arrays.step(optimizer, gradients(0), hyper(0.1))
        optimizer._share._exchange = exchanges  # type: ignore[attr-defined]
        bad_there.fill_(1.0)
    kept = [arrays.weights, *optimizer.moments.values(), *optimizer.scalars.values()]
    before = [tensor.clone() for tensor in kept]
    zeros = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    assert not arrays.step(optimizer, gradients(1) if elsewhere else zeros, hyper(0.1), finite=elsewhere)
    assert all(torch.equal(a, b) for a, b in zip(kept, before, strict=True))
    assert all(tensor.any() for tensor in kept)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 3 * PIECE), min_size=1, max_size=8), st.integers(1, 5), st.randoms())
def test_the_pieces_of_all_ranks_are_every_element_once(sizes: list[int], ranks: int, random: Any) -> None:
    starts = np.concatenate([[0], np.cumsum([size + random.randrange(40) for size in sizes])]).tolist()
    segments = [Segment(str(i), starts[i], size, True, True) for i, size in enumerate(sizes)]
    length = -(-starts[-1] // ranks) * ranks
    shards = [(rank * length // ranks, (rank + 1) * length // ranks) for rank in range(ranks)]
    seen = np.zeros(length, int)
    for start, stop in shards:
        for piece in cut(segments, [(start, stop)]):
            segment = segments[piece.segment]
            assert start <= piece.at and piece.at + piece.size <= stop  # noqa: PT018
            assert segment.start <= piece.at and piece.at + piece.size <= segment.start + segment.size  # noqa: PT018
            assert piece.own == piece.at - start
            assert 0 < piece.size <= PIECE
            seen[piece.at : piece.at + piece.size] += 1
    want = np.zeros(length, int)
    for segment in segments:
        want[segment.start : segment.start + segment.size] = 1
    np.testing.assert_array_equal(seen, want)


SECTION = ModelSection(name="resnet18", width=8, stem="small")


def segments_of(**options: Any) -> dict[str, Segment]:
    model = build_model(SECTION, 10)
    buffer = GradientBuffer(model, torch.device("cpu"), bucket_elements=1000)
    return {s.name: s for s in build_segments(OptimizerSection(name="lars", **options), buffer, spec(SECTION, 10))}


def test_batch_norm_and_biases_neither_decay_nor_scale() -> None:
    weights = {p.name for p in spec(SECTION, 10).parameters if p.role == "weight"}
    plain = segments_of()
    assert list(plain) == [p.name for p in spec(SECTION, 10).parameters]
    assert {name for name, s in plain.items() if s.decays} == weights
    assert {name for name, s in plain.items() if s.adapts} == weights
    assert all(s.decays and s.adapts for s in segments_of(decay_all=True).values())
    adapting = segments_of(adapt_all=True)
    assert all(s.adapts for s in adapting.values())
    assert {name for name, s in adapting.items() if s.decays} == weights


def test_the_skip_list_takes_names_and_patterns() -> None:
    plain, skipping = segments_of(), segments_of(skip=("fc.*", "conv1.weight"), adapt_all=True)
    for name in ("fc.weight", "fc.bias", "conv1.weight"):
        assert (skipping[name].decays, skipping[name].adapts) == (False, False)
    assert {n for n, s in plain.items() if s.decays} - {"fc.weight", "conv1.weight"} == {
        n for n, s in skipping.items() if s.decays
    }
    with pytest.raises(InputError, match=r"no parameter of resnet18 is called 'head\.\*'"):
        segments_of(skip=("head.*",))
