"""Train step: one device trains as torch does, eight as one; a program runs several steps."""

import re
from collections import Counter
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import torch
from torch.nn import functional as F

from podscale import models
from podscale.config import RunConfig
from podscale.data.step_positions import step_positions
from podscale.jax.mesh import RANKS, axis_size, mesh_for_config
from podscale.jax.models import initialise
from podscale.jax.train_step import STATUS_LENGTH, DeviceState, StepInputs, TrainStep, build_train_step
from podscale.pytorch.models import build_model as build_torch_model
from tests.support.refusals import refused
from tests.support.xla import list_groups

pytestmark = pytest.mark.timeout(900)  # compiles whole steps, possibly on a busy machine
CLASSES, BATCH, STEPS, SAMPLES = 10, 32, 3, 320
RESNET = {"name": "resnet18", "width": 4, "stem": "small", "zero_init_last_gamma": False}
ALEXNET = {"name": "alexnet", "width": 4, "alexnet": {"dropout": 0.0, "pool5_norm": False}}
SGD = {"name": "sgd", "nesterov": True, "weight_decay": 1e-3}
LARS = {"name": "lars", "trust_coefficient": 0.02, "weight_decay": 1e-3}
SHARDED = {"weight_update": "sharded", "all_reduce": {"algorithm": "torus2d", "row": 4, "bucket_mb": 0.1}}
SCHEDULE = np.array([[0.1, 0.9, 1e-3], [0.05, 0.8, 1e-3], [0.02, 0.9, 1e-3]], np.float32)


def document(model: dict[str, Any], *, side: int = 16, span: int = BATCH, **train: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {**model, "batch_norm": {"span": span}},
            "input": {"image_size": side},
            "train": {"global_batch": BATCH, **train},
        }
    )


def batches(side: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (STEPS, BATCH, side, side, 3), np.uint8)
    return images, generator.integers(0, CLASSES, (STEPS, BATCH))


def begin(step: TrainStep, config: RunConfig) -> DeviceState:
    return step.init_state(*initialise(config.model, CLASSES, seed=1))


class Trained(NamedTuple):
    """Weights, momentum and statistics by kind and name, losses, step, and the compiled `program`."""

    arrays: dict[str, dict[str, np.ndarray[Any, Any]]]
    losses: np.ndarray[Any, Any]
    step: TrainStep
    program: str


def trained(config: RunConfig, devices: int) -> Trained:
    """Return the result of all steps in one program. Checks that it reduces the ranks' statuses."""
    step = build_train_step(
        config, mesh_for_config(config, jax.devices()[:devices]), CLASSES, step_positions(config.train, SAMPLES)
    )
    statuses = np.random.default_rng(0).integers(0, 1000, (axis_size(step.mesh, RANKS), STATUS_LENGTH), np.int32)
    arguments = (
        begin(step, config),
        step.put_batches(*batches(config.input.image_size)),
        SCHEDULE,
        StepInputs(STEPS, statuses),
    )
    compiled = step.run_steps.lower(*arguments).compile()
    state, step_results = compiled(*arguments)
    assert np.asarray(step_results.finite).all()
    assert int(state.number) == STEPS
    assert step_results.status is not None
    for copy in step_results.status.addressable_shards:
        np.testing.assert_array_equal(copy.data, statuses.max(0))
    result = {
        "weights": step.layout.unpack(state.weights),
        "momentum": step.layout.unpack(state.opt_state.moments["momentum"]),
        "statistics": state.statistics,
    }
    arrays = {kind: {name: np.asarray(a) for name, a in named.items()} for kind, named in result.items()}
    program = compiled.as_text()
    assert not re.search(r"infeed|outfeed|callback", program), "the program communicates with the host"
    return Trained(arrays, np.asarray(step_results.loss), step, program)


def trained_by_torch(config: RunConfig) -> tuple[dict[str, dict[str, Any]], list[float]]:
    """Return the result of the same steps by torch's own loss and optimizer."""
    parameters, statistics = initialise(config.model, CLASSES, seed=1)
    network = build_torch_model(config.model, CLASSES).train()
    network.load_state_dict({name: torch.from_numpy(a.copy()) for name, a in {**parameters, **statistics}.items()})
    roles = {p.name: p.role for p in models.model_spec(config.model, CLASSES).parameters}
    named = dict(network.named_parameters())
    groups = [{"params": [p], "weight_decay": 1e-3 * (roles[name] == "weight")} for name, p in named.items()]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (config.input.mean, config.input.std))
    losses = []
    for images, labels, (rate, momentum, _) in zip(*batches(16), SCHEDULE.tolist(), strict=True):
        for group in optimizer.param_groups:
            group["lr"], group["momentum"] = rate, momentum
        x = (torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255 - mean) / std
        loss = F.cross_entropy(network(x), torch.from_numpy(labels), label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    weights = {name: p.detach().numpy() for name, p in named.items()}
    momenta = {name: optimizer.state[p]["momentum_buffer"].numpy() for name, p in named.items()}
    return {
        "weights": weights,
        "momentum": momenta,
        "statistics": {n: b.numpy() for n, b in network.named_buffers()},
    }, losses


def compare(result: Any, expected: Any, *, tolerance: float) -> None:
    for kind, arrays in expected.items():
        for name, array in arrays.items():
            scale = float(np.abs(array).max())
            np.testing.assert_allclose(
                result[kind][name], array, rtol=tolerance, atol=tolerance * scale, err_msg=f"{kind} {name}"
            )


def test_one_device_trains_as_torch_and_eight_as_one() -> None:
    """SGD. Eight devices have one batch-norm group, a torus and a sharded step; one device has the full batch."""
    alone = document(RESNET, optimizer=SGD)
    one = trained(alone, 1)
    torchs, torch_losses = trained_by_torch(alone)
    np.testing.assert_allclose(one.losses, torch_losses, rtol=1e-5)
    compare(one.arrays, torchs, tolerance=2e-3)
    eight = trained(document(RESNET, optimizer=SGD, **SHARDED), 8)
    np.testing.assert_allclose(eight.losses, one.losses, rtol=1e-5)
    compare(eight.arrays, one.arrays, tolerance=2e-3)


@pytest.mark.slow
def test_every_all_reduce_and_sharding_gives_the_same_training() -> None:
    """LARS: groups of two devices, or parts of a batch on one; unsharded or sharded steps; one call or three."""
    flat = document(ALEXNET, span=8, side=63, optimizer=LARS)
    whole, alone = trained(flat, 8), trained(flat, 1)
    np.testing.assert_allclose(whole.losses, alone.losses, rtol=1e-5)
    compare(whole.arrays, alone.arrays, tolerance=2e-3)
    sharded = trained(document(ALEXNET, span=8, side=63, optimizer=LARS, **SHARDED), 8)
    np.testing.assert_allclose(sharded.losses, whole.losses, rtol=1e-5)
    compare(sharded.arrays, whole.arrays, tolerance=1e-4)
    check_collectives(sharded)

    images, labels = batches(63)
    state, single = begin(whole.step, flat), []
    for number in range(STEPS):
        one = whole.step.put_batches(images[number : number + 1], labels[number : number + 1])
        before = state
        state, step_results = whole.step.run_steps(state, one, SCHEDULE)
        single.append(float(step_results.loss[0]))
        assert all(bucket.is_deleted() for bucket in before.weights)  # donated
    np.testing.assert_allclose(single, whole.losses, rtol=1e-6)
    after = {"weights": whole.step.layout.unpack(state.weights), "statistics": state.statistics}
    compare(after, {kind: whole.arrays[kind] for kind in after}, tolerance=1e-5)
    check_that_a_non_finite_step_is_masked(whole.step, flat)


def check_collectives(sharded: Trained) -> None:
    """Check that each bucket is scattered, added along columns and its weights gathered, without other large messages.

    The loss and the statistics are one more bucket. Batch norm sends two messages for each layer, LARS one for all
    norms, and the statuses are one. (The compiler merges the messages of the columns.)
    """
    layers = len(sharded.arrays["statistics"]) // 2
    buckets = len(sharded.step.layout.lengths)
    result = re.findall(
        r" (reduce-scatter|all-reduce|all-gather)\((.*?)\), .*?replica_groups=(\S+),", list_groups(sharded.program)
    )
    operand_counts = Counter()
    for kind, operands, groups in result:
        operand_counts[kind, groups] += operands.count("%")
    rows, columns, pairs = "{{0,1,2,3},{4,5,6,7}}", "{{0,4},{1,5},{2,6},{3,7}}", "{{0,1},{2,3},{4,5},{6,7}}"
    assert buckets > 2
    assert operand_counts == {
        ("reduce-scatter", rows): buckets + 1,
        ("all-reduce", columns): buckets + 1,
        ("all-gather", rows): buckets + 1,
        ("all-reduce", pairs): 2 * layers,
        ("all-reduce", rows): 1,
        ("all-reduce", "{{0,1,2,3,4,5,6,7}}"): 1,
    }


def check_that_a_non_finite_step_is_masked(step: TrainStep, config: RunConfig) -> None:
    """Check that only the number of the step changes, to the bit."""
    parameters, statistics = initialise(config.model, CLASSES, seed=1)
    parameters["fc8.bias"] = np.full(CLASSES, np.inf, np.float32)
    images, labels = batches(63)
    arguments = step.init_state(parameters, statistics), step.put_batches(images[:1], labels[:1]), SCHEDULE
    state, step_results = step.run_steps(*arguments)
    assert not np.asarray(step_results.finite).any()
    assert int(state.number) == 1
    for name, array in {**step.layout.unpack(state.weights), **state.statistics}.items():
        np.testing.assert_array_equal(array, {**parameters, **statistics}[name], err_msg=name)
    assert not any(np.asarray(bucket).any() for bucket in state.opt_state.moments["momentum"])


@pytest.mark.slow
@pytest.mark.shallow
def test_devices_that_share_images_train_as_one_device() -> None:
    """Four ranks of two devices equal four of one: top and bottom halves, LARS, groups of two ranks, a torus.

    In bf16 the difference is of the size of rounding.
    """
    wide = {**RESNET, "stem": "imagenet"}
    options = {"span": BATCH // 2, "side": 64, "optimizer": LARS, "engine": "jax", **SHARDED}

    def both(precision: str) -> tuple[Trained, Trained]:
        whole = trained(document(wide, precision=precision, **options), 4)
        return whole, trained(document(wide, precision=precision, spatial_partitions=(2, 1), **options), 8)

    (whole, halves), (short, short_halves) = both("fp32"), both("bf16")
    assert dict(halves.step.mesh.shape)["height"] == 2
    np.testing.assert_allclose(halves.losses, whole.losses, rtol=1e-5)
    compare(halves.arrays, whole.arrays, tolerance=2e-3)
    assert permuted(halves.program) == halos(document(wide, **options), BATCH // 4)
    assert permuted(whole.program)["messages"] == 0
    for kind in whole.arrays:
        rounding = apart(short, whole, kind)
        assert 0 < apart(short_halves, short, kind) < 1.5 * rounding
        assert apart(short_halves, whole, kind) < 1.5 * rounding


def apart(one: Trained, other: Trained, kind: str) -> float:
    """Return the L2 distance between two networks' weights, momentum or statistics."""
    return float(np.sqrt(sum(((a - one.arrays[kind][name]) ** 2).sum() for name, a in other.arrays[kind].items())))


def halos(config: RunConfig, images: int) -> Counter[str]:
    """Return the messages and bytes (fp32) that a device sends if two share an image, top and bottom.

    A 3 x 3 convolution sends a row each way, or with stride 2 one row down; so does the max pool. The stem sends three
    down and two up. Backward sends as much again, except for the stem, whose input needs no gradient.
    """
    model, side = config.model, config.input.image_size
    counted = Counter[str]()

    def sent(rows: tuple[int, ...], width: int, channels: int, times: int = 2) -> None:
        counted["messages"] += times * len(rows)
        counted["bytes"] += times * sum(rows) * width * channels * images * 4

    sent((3, 2), side, 3, times=1)
    sent((1,), side // 2, model.width)
    layers = models.layered_spec(model, CLASSES).layers
    for before, layer in pairwise(layers):
        if layer.kernel == (3, 3):
            strided = len(layer.path) > max(len(before.path), 2)  # the first two halvings: stem and max pool
            sent((1,) if strided else (1, 1), side // 2 ** (len(layer.path) - strided), layer.in_channels)
    return counted


def permuted(program: str) -> Counter[str]:
    """Return the messages and bytes of a compiled program."""
    result = re.findall(r"= f32\[([\d,]+)\]\S* collective-permute(?:-start)?\(", program)
    volume = sum(4 * prod(map(int, shape.split(","))) for shape in result)
    return Counter(messages=len(result), bytes=volume)


def test_options_that_this_engine_lacks_are_refused() -> None:
    def build(devices: int = 8, **document_of: Any) -> None:
        config = document(RESNET, **document_of)
        build_train_step(
            config, mesh_for_config(config, jax.devices()[:devices]), CLASSES, step_positions(config.train, SAMPLES)
        )

    with refused("fp32 and bf16", field="train.precision", got="fp16"):
        build(precision="fp16")
    with refused(field="train.weight_gather", got="bf16"):
        build(weight_gather="bf16", **SHARDED)
    with refused("resnet18", field="train.optimizer.skip", got="head"):
        build(optimizer={"skip": ["head"]})
    with refused("= 5 x 1", field="train.global_batch", got=32):
        build(devices=5)
