"""Sharded optimizer steps, and Shampoo and Muon with shared matrices, equal unsharded ones, on real processes."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from podscale.config import ModelSection, RunConfig
from podscale.models import model_spec
from podscale.models.spec import ParamSpec
from podscale.pytorch.flat_buffers import FlatWeights
from podscale.pytorch.models import build_model
from podscale.pytorch.optim import ExtraStateOptimizer, HyperParams, Optimizer, Shampoo, StepAware, build_optimizer
from podscale.pytorch.precision import Precision
from podscale.pytorch.reducer import GradientReducer
from podscale.pytorch.train_step import all_finite, zero_nonfinite
from podscale.pytorch.trainer import build_reducer_and_optimizer
from podscale.pytorch.world import World
from tests.support.flat_share import FlatArrays, hyper
from tests.support.muon_oracle import muon_oracle
from tests.support.optimizer_oracles import Step
from tests.support.shampoo_oracle import shampoo_oracle

SECTION = ModelSection(name="resnet18", stem="small", width=4)
STEPS = 12
"""More than the ten steps of an epoch, after which `neumann` resets."""
SHAMPOO: dict[str, Any] = {
    "name": "shampoo",
    "nesterov": True,
    "shampoo": {"block": 16, "eps": 1e-3, "beta2": 0.9, "start_step": 3, "every_steps": 4},
}
MUON: dict[str, Any] = {"name": "muon", "nesterov": True, "muon": {"other_rate": 0.1}}
SHAMPOO_STEPS, MIDDLE = 24, 13
"""The middle is between two updates of the roots."""
LARS = {"name": "lars", "trust_coefficient": 0.02}
LINEAR = SimpleNamespace(
    name="linear", parameters=[ParamSpec("weight", (1, 2), "weight"), ParamSpec("bias", (1,), "bias")]
)


def rate_of(number: int) -> float:
    return 0.1 * (1 + number % 3)


def train_section(**changes: Any) -> Any:
    optimizer = {"weight_decay": 1e-3, **changes.pop("optimizer", LARS)}
    values = {"global_batch": 8, "optimizer": optimizer, **changes}
    return RunConfig.model_validate({"train": values}).train


class Update:
    """Model with the parts of its optimizer step, without a loss: gradients are given."""

    def __init__(self, world: World, *, linear: bool = False, **changes: Any) -> None:
        """Build the parts for a small ResNet, or for a `linear` layer of three weights."""
        torch.manual_seed(0)
        self.train = train_section(**changes)
        network = torch.nn.Linear(2, 1) if linear else build_model(SECTION, 10)
        spec: Any = LINEAR if linear else model_spec(SECTION, 10)
        self.model = network.to(memory_format=torch.channels_last)
        precision = Precision(self.train.precision, world.device)
        self.reducer: GradientReducer
        self.weights: FlatWeights
        self.optimizer: Optimizer
        self.reducer, self.weights, self.optimizer = build_reducer_and_optimizer(
            self.train, self.model, spec, precision, world, 10.0, extra=1
        )

    def named(self) -> dict[str, dict[str, np.ndarray[Any, Any]]]:
        """Return weights, moments and the optimizer's other state, by parameter."""
        assert isinstance(self.optimizer, ExtraStateOptimizer)
        flat = {"weights": self.weights.model_weights, **self.optimizer.moments}
        arrays = {kind: self.weights.named_views(values) for kind, values in flat.items()} | {
            "arrays": self.optimizer.extra_state_arrays()
        }
        return {kind: {name: t.numpy().copy() for name, t in tensors.items()} for kind, tensors in arrays.items()}

    def step(self, number: int, rank: int, *, bad: int | None = None) -> bool:
        """Run one step from random gradients of this rank; element `bad` of its averages becomes NaN."""
        generator = torch.Generator().manual_seed(100 * number + rank)
        self.reducer.start_step()
        weighted = [(p * torch.randn(p.shape, generator=generator).to(p.dtype)).sum() for p in self.model.parameters()]
        self.reducer.backward(torch.stack([w.float() for w in weighted]).sum(), last=True)
        self.reducer.finish()
        buffer = self.reducer.buffer
        if bad is not None:
            buffer.averages[0][bad] = float("nan")
        finite = all_finite([*buffer.averages, buffer.extra_values])
        zero_nonfinite(finite, buffer.averages)
        if isinstance(self.optimizer, StepAware):
            self.optimizer.start_step(number)
        rate = rate_of(number)
        finite = self.optimizer.step(HyperParams(*torch.tensor([rate, 0.9, 1e-3, 2.0]).unbind()), finite)
        self.weights.all_gather()
        return bool(finite)

    def parameters(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


RULES = [
    LARS,
    {**LARS, "trust": "norm_of_sum", "momentum_form": "scaled", "nesterov": True},
    {"name": "lamb"},
    {"name": "adam", "adam": {"decoupled": True}},
    {"name": "rmsprop"},
    {"name": "sgd", "nesterov": True},
    {"name": "nlcg", "nlcg": {"beta": "polak_ribiere", "lars_coefficient": 0.01}},
    {"name": "neumann", "neumann": {"sgd_epochs": 0.5, "reset_epochs": 1.0}},
]


def torus(row: int) -> dict[str, Any]:
    return {"algorithm": "torus2d", "row": row, "bucket_mb": 0.05}


def whole_and_sharded(world: World) -> dict[Any, Any]:
    results: dict[Any, Any] = {}
    for number, rule in enumerate(RULES if world.size == 4 else RULES[:1]):
        flat = {"algorithm": "flat", "bucket_mb": 0.05}
        unsharded = Update(world, optimizer=rule, all_reduce=flat)
        rows = torus(min(4, world.size // 2))
        over = {world.size: {**rows, "shard_over": "world"}}
        if number == 0:
            over |= {(world.size, "flat"): flat, rows["row"]: rows}
        updates = {
            key: Update(world, optimizer=rule, weight_update="sharded", all_reduce=reduce)
            for key, reduce in over.items()
        }
        assert len(unsharded.reducer.buffer.layout.bounds) > 3
        for step in range(STEPS):
            assert unsharded.step(step, world.rank)
            assert all(update.step(step, world.rank) for update in updates.values())
        results[number] = (unsharded.parameters(), {key: update.parameters() for key, update in updates.items()})
        elements = {key: sum(map(len, update.optimizer.moments.values())) for key, update in updates.items()}
        results["elements", number] = (sum(map(len, unsharded.optimizer.moments.values())), elements)
        for update in (unsharded, *updates.values()):
            update.reducer.close()
    if world.size < 8:
        results["shampoo"] = dealt_out(world)
        results["muon"] = orthogonalised(world)
    return results


def dealt_out(world: World) -> list[Any]:
    """Return Shampoo's state at the beginning, between two updates of its roots, and at the end."""
    update = Update(world, optimizer=SHAMPOO, all_reduce={"algorithm": "flat", "bucket_mb": 0.05})
    states = [update.named()]
    for number in range(SHAMPOO_STEPS):
        assert update.step(number, world.rank)
        if number + 1 in (MIDDLE, SHAMPOO_STEPS):
            states.append(update.named())
    assert isinstance(update.optimizer, ExtraStateOptimizer)
    update.reducer.close()
    return [states, update.optimizer.extra_state_bytes]


def orthogonalised(world: World) -> list[dict[str, np.ndarray[Any, Any]]]:
    """Return the weights before and after steps of Muon."""
    update = Update(world, optimizer=MUON, all_reduce={"algorithm": "flat", "bucket_mb": 0.05})
    states = []
    for number in range(STEPS + 1):
        named = update.weights.named_views(update.weights.model_weights)
        states.append({name: array.numpy().copy() for name, array in named.items()})
        assert update.step(number, world.rank)
    update.reducer.close()
    return [states[0], states[-1]]


def means(number: int, size: int, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the averaged gradients of a step."""
    generators = [torch.Generator().manual_seed(100 * number + rank) for rank in range(size)]
    return {
        name: torch.stack([torch.randn(shape, generator=g) for g in generators]).mean(0).numpy()
        for name, shape in shapes.items()
    }


def check_shampoo(ranks: list[Any]) -> None:
    """Check equality with the oracle, of all ranks to the bit, and with one rank that resumes in the middle."""
    (start, middle, end), _ = ranks[0]
    for states, _ in ranks[1:]:
        for state, others in zip(states, (start, middle, end), strict=True):
            for kind, arrays in state.items():
                for name, array in arrays.items():
                    assert np.array_equal(array, others[kind][name]), (kind, name)
    decays = {p.name: p.role == "weight" for p in model_spec(SECTION, 10).parameters}
    shapes = {name: array.shape for name, array in start["weights"].items()}
    steps = [Step(means(n, len(ranks), shapes), rate_of(n), 0.9, 1e-3) for n in range(SHAMPOO_STEPS)]
    expected = shampoo_oracle(
        start["weights"], steps, decays, block=16, eps=1e-3, beta2=0.9, start_step=3, every_steps=4
    )
    alone = FlatArrays(middle["weights"], decays)
    rule = build_optimizer(train_section(optimizer=SHAMPOO).optimizer, alone.share(), 10.0)
    assert isinstance(rule, Shampoo)
    alone.put(rule.moments["momentum"], middle["momentum"])
    rule.load_extra_state({name: torch.from_numpy(array) for name, array in middle["arrays"].items()})
    for number, step in enumerate(steps[MIDDLE:], MIDDLE):
        alone.step(rule, step.gradients, hyper(step.rate, step.momentum, step.decay), number=number)
    for name, taken_up in alone.take(alone.weights).items():
        for found in (end["weights"][name], taken_up):
            np.testing.assert_allclose(found, expected[name], rtol=1e-4, atol=1e-4, err_msg=name)
    roots = sum(array.nbytes for name, array in end["arrays"].items() if name.startswith("roots/"))
    for _, moments in ranks:
        assert moments == pytest.approx(roots + roots / len(ranks), rel=0.02)


def check_muon(ranks: list[Any]) -> None:
    """Check equality with the oracle, and of all ranks to the bit."""
    begun, ended = ranks[0]
    for _, other in ranks[1:]:
        assert all(np.array_equal(array, other[name]) for name, array in ended.items())
    decays = {p.name: p.role == "weight" for p in model_spec(SECTION, 10).parameters}
    shapes = {name: array.shape for name, array in begun.items()}
    steps = [Step(means(n, len(ranks), shapes), rate_of(n), 0.9, 1e-3) for n in range(STEPS)]
    matrices = [name for name, shape in shapes.items() if len(shape) > 1][1:-1]
    expected = muon_oracle(begun, steps, decays, matrices, nesterov=True, other_rate=0.1)
    for name, found in ended.items():
        np.testing.assert_allclose(found, expected[name], rtol=1e-4, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (4, 8))])
def test_a_sharded_step_equals_the_unsharded_one(run_world: Any, size: int) -> None:
    ranks = run_world(size, whole_and_sharded)
    if size < 8:
        check_shampoo([rank.pop("shampoo") for rank in ranks])
        check_muon([rank.pop("muon") for rank in ranks])
    for number, (unsharded, sharded) in ((key, value) for key, value in ranks[0].items() if isinstance(key, int)):
        for key, parameters in sharded.items():
            for actual, expected in zip(parameters, unsharded, strict=True):
                scale = expected.abs().max().item()
                np.testing.assert_allclose(
                    actual, expected, rtol=0, atol=1e-6 * scale, err_msg=f"{RULES[number]} over {key}"
                )
            for other in ranks[1:]:
                assert all(torch.equal(a, b) for a, b in zip(parameters, other[number][1][key], strict=True))
        before, after = ranks[0]["elements", number]
        for key, elements in after.items():
            shards = key[0] if isinstance(key, tuple) else key
            assert before / shards <= elements <= 1.1 * before / shards


def one_bad_shard(world: World) -> list[Any]:
    """Run three steps, the second with a NaN in one shard only, as after an overflowed sum."""
    update = Update(world, weight_update="sharded", all_reduce={"algorithm": "torus2d", "row": 2, "bucket_mb": 0.05})
    assert update.step(0, world.rank)
    state = [update.weights.model_weights, update.weights.masters, *update.optimizer.moments.values()]
    before = [tensor.clone() for tensor in state]
    # Both ranks of a column hold the same shard, so it is bad on both.
    applied = update.step(1, world.rank, bad=3 if world.rank % 2 == 1 else None)
    same = all(torch.equal(a, b) for a, b in zip(state, before, strict=True))
    return [applied, same, update.step(2, world.rank), update.parameters()]


def test_a_bad_shard_masks_the_step_on_all_ranks(run_world: Any) -> None:
    ranks = run_world(4, one_bad_shard)
    for applied, same, afterwards, parameters in ranks:
        assert (applied, same, afterwards) == (False, True, True)
        assert all(torch.equal(a, b) for a, b in zip(parameters, ranks[0][3], strict=True))


def fewer_weights_than_ranks(world: World) -> list[Any]:
    """Return the weights after three steps of every rule, unsharded and sharded over all ranks, and this rank's own."""
    results = []
    for rule in RULES:
        unsharded = Update(world, linear=True, optimizer=rule)
        sharded = Update(
            world, linear=True, optimizer=rule, weight_update="sharded", all_reduce={**torus(2), "shard_over": "world"}
        )
        for update in (unsharded, sharded):
            assert all(update.step(step, world.rank) for step in range(3))
            update.reducer.close()
        shard = sharded.optimizer._shard  # type: ignore[attr-defined]
        results.append((unsharded.parameters(), sharded.parameters(), sum(chunk.size for chunk in shard.chunks)))
    return results


def test_a_model_of_fewer_weights_than_ranks_is_sharded_over_all_of_them(run_world: Any) -> None:
    ranks = run_world(4, fewer_weights_than_ranks)
    for number, (unsharded, sharded, _) in enumerate(ranks[0]):
        assert [ranks[rank][number][2] for rank in range(4)] == [1, 0, 2, 0]  # columns of two ranks
        for actual, expected in zip(sharded, unsharded, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
        for other in ranks[1:]:
            assert all(torch.equal(a, b) for a, b in zip(sharded, other[number][1], strict=True))
