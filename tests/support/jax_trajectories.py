"""Trajectories of the published presets by the JAX engine: the steps of `preset_trajectories`, also in float64.

Network, loss, batch norm and optimizer are the engine's own. Rates, momenta, decays, label smoothing and batch norm's
momentum are arguments of the compiled functions, which presets share. Convolutions are matrix products, because XLA's
in float64 take ten times as long on a CPU.
"""

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from podscale import models
from podscale.config import ModelSection, RunConfig
from podscale.config.engine_support import find_unsupported_option
from podscale.config.optimizer import OptimizerSection
from podscale.jax.batch_norm import BatchNorm
from podscale.jax.flat_buffers import ParamLayout
from podscale.jax.models import build_model
from podscale.jax.optim import HyperParams, OptState, ReplicaAxes, build_optimizer, build_param_shard
from podscale.jax.train_step import smoothed_cross_entropy
from tests.support.preset_trajectories import (
    CLASSES,
    STEPS,
    Trajectory,
    batch_of,
    data,
    initial_weights,
    published_presets,
    scaled_rows,
    schedule_rows,
    tiny,
)
from tests.support.tiny import SHALLOW

DTYPE = jnp.float64


def refused_presets() -> dict[str, str]:
    """Return the options for which this engine refuses the tiny forms of presets, by the name of the preset."""
    options = {name: find_unsupported_option(tiny(name)) for name in published_presets()}
    return {name: option.key for name, option in options.items() if option is not None}


def train_in_jax(config: RunConfig, is_enough: Callable[[list[float]], bool] = lambda losses: False) -> Trajectory:
    """Train on one device by the engine's own network, loss, batch norm and optimizer.

    Args:
        is_enough: called with the losses so far; True ends the training.
    """
    train, section = config.train, config.train.optimizer
    smoothing, momentum = train.label_smoothing, config.model.batch_norm.momentum
    # Momentum and decay are arguments. The initialisation and batch norm's momentum are not parts of the network.
    shampoo = section.shampoo.model_copy(update={"roots_precision": "fp64"})
    rule = section.model_copy(update={"momentum": 0.9, "weight_decay": 0.0, "shampoo": shampoo}).model_dump_json()
    norm = config.model.batch_norm.model_copy(update={"momentum": 0.1})
    network = config.model.model_copy(update={"zero_init_last_gamma": True, "batch_norm": norm}).model_dump_json()
    inputs, labels = normalised_images(config), data()[1]
    with jax.enable_x64(True), SHALLOW:
        one_pass = _compile_pass(network)
        begin, update = _compile_update(rule, network, STEPS / train.epochs if section.name == "neumann" else 1.0)
        weights: Any = {name: jnp.asarray(value, DTYPE) for name, value in initial_weights(config).items()}
        statistics: Any = {
            buffer.name: jnp.full(buffer.shape, float("var" in buffer.name), DTYPE)
            for buffer in models.model_spec(config.model, CLASSES).buffers
        }
        state, losses = begin(weights), []
        for number, row in enumerate(scaled_rows(config)):
            results = []
            parts = [np.split(values[batch_of(number)], train.accumulation) for values in (inputs, labels)]
            for images_of_pass, labels_of_pass in zip(*parts, strict=True):
                *result, statistics = one_pass(weights, statistics, images_of_pass, labels_of_pass, smoothing, momentum)
                results.append(result)
            loss, gradients = jax.tree.map(lambda *values: sum(values) / len(values), *results)
            state, weights = update(state, gradients, row.astype(np.float64), loss, number)
            losses.append(float(loss))
            if is_enough(losses):
                break
        variances = [float(value.mean()) for name, value in statistics.items() if name.endswith("running_var")]
    return Trajectory(schedule_rows(config).tolist(), losses, float(np.mean(variances)))


def normalised_images(config: RunConfig) -> npt.NDArray[np.float64]:
    """Return the images as the engine normalises them, in float64."""
    images, section = data()[0].astype(np.float64), config.input
    if not section.per_image_standardization:
        return (images / 255.0 - section.mean) / section.std
    dims = (1, 2, 3)
    least = images[0].size ** -0.5
    return (images - images.mean(dims, keepdims=True)) / np.maximum(images.std(dims, keepdims=True), least)


def convolve(x: Any, weight: Any, stride: int, padding: int, groups: int = 1) -> Any:
    """Convolve by a matrix product; arguments as those of the engine's `xla_convolution`."""
    assert groups == 1, "no tiny network has groups"
    kernel, pad = weight.shape[-1], (padding, padding)
    rows, columns = ((side + 2 * padding - kernel) // stride + 1 for side in x.shape[1:3])
    x = jnp.pad(x, ((0, 0), pad, pad, (0, 0)))
    ends = stride * (rows - 1) + 1, stride * (columns - 1) + 1
    windows = [x[:, i : i + ends[0] : stride, j : j + ends[1] : stride] for i, j in product(range(kernel), repeat=2)]
    filters = weight.transpose(0, 2, 3, 1).reshape(len(weight), -1)
    return jnp.einsum("nhwi,oi->nhwo", jnp.concatenate(windows, axis=-1), filters)


@cache
def _compile_pass(network: str) -> Any:
    """Return the compiled function of a pass to loss, gradients and running statistics, for a model section."""
    section = ModelSection.model_validate_json(network)

    @jax.jit
    def one_pass(
        weights: Any, statistics: Any, images: Any, labels: Any, smoothing: Any, momentum: Any
    ) -> tuple[Any, Any, Any]:
        apply = build_model(section, norm=BatchNorm(section.batch_norm.eps, momentum), dtype=DTYPE, convolve=convolve)

        def loss_of(weights: Any) -> Any:
            logits, moved = apply(weights, statistics, images, train=True)
            return smoothed_cross_entropy(logits, labels, smoothing), moved

        (loss, moved), gradients = jax.value_and_grad(loss_of, has_aux=True)(weights)
        return loss, gradients, moved

    return one_pass


@cache
def _compile_update(rule: str, network: str, steps_per_epoch: float) -> tuple[Any, Any]:
    """Return a function of weights to the first state, and the compiled one that updates state and weights."""
    section = OptimizerSection.model_validate_json(rule)
    spec = models.model_spec(ModelSection.model_validate_json(network), CLASSES)
    layout = ParamLayout({parameter.name: parameter.shape for parameter in spec.parameters}, bucket_elements=10**6)
    optimizer = build_optimizer(section, layout.shapes, steps_per_epoch, ReplicaAxes())

    def begin(weights: Any) -> Any:
        buckets, first = layout.pack(weights, DTYPE), optimizer.initial_moments.items()
        moments = {name: tuple(jnp.full_like(bucket, value) for bucket in buckets) for name, value in first}
        scalars = {name: jnp.asarray(value, DTYPE) for name, value in optimizer.initial_scalars.items()}
        own = optimizer.extra_layout
        extra = {name: jnp.asarray(value, DTYPE) for name, value in own.pack(own.initial()).items()} if own else {}
        return buckets, OptState(moments, scalars, extra)

    @jax.jit
    def update(state: Any, gradients: Any, row: Any, loss: Any, number: Any) -> Any:
        buckets, opt_state = state
        shard, hyper = build_param_shard(section, layout, spec), HyperParams(*row, loss, number)
        pushes = layout.pack(gradients, DTYPE)
        result = optimizer.step(shard, buckets, pushes, opt_state, hyper, jnp.array(True))
        return (result.weights, result.opt_state), layout.unpack(result.weights)

    return begin, update
