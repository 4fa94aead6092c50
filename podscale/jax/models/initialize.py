"""Initial weights of a network: the same distributions as the PyTorch engine's, from another random stream.

NumPy draws them on the host: every host has the same values, and nothing is compiled.
"""

from math import prod, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from podscale import models
from podscale.config import ModelSection
from podscale.models.resnet import BASIC, BOTTLENECK, resnet_spec

Values = npt.NDArray[Any]
LAST_LAYER = {BASIC: "2.weight", BOTTLENECK: "3.weight"}
"""Suffix of the names of a block's last convolution and batch norm, after `conv` or `bn`, by kind of block."""


def initialise(model: ModelSection, classes: int, seed: int) -> tuple[dict[str, Values], dict[str, Values]]:
    """Return initial parameters and running statistics, fp32, by the model spec's names.

    Residual networks: He's initialisation by fan-out, the last gamma of a block 0, the classifier N(0, 0.01) (Goyal
    2017, 5.1). Pre-activated blocks end in a convolution, whose weights are 0 instead. AlexNet: He's by fan-in, the
    classifier N(0, 0.01). Biases are 0.
    """
    spec = models.model_spec(model, classes)
    parameters = {
        parameter.name: _initial_values(parameter, model, np.random.default_rng([seed, number]))
        for number, parameter in enumerate(spec.parameters)
    }
    statistics = {buffer.name: _filled(buffer.shape, buffer.name.endswith("running_var")) for buffer in spec.buffers}
    return parameters, statistics


def _initial_values(parameter: models.ParamSpec, model: ModelSection, generator: np.random.Generator) -> Values:
    if _starts_at_zero(parameter, model):
        return np.zeros(parameter.shape, np.float32)
    if parameter.role == "weight":
        values = generator.standard_normal(parameter.shape, np.float32)
        return values * np.float32(_standard_deviation(parameter, model))
    return _filled(parameter.shape, parameter.role == "norm_scale")


def _filled(shape: models.Shape, ones: bool) -> Values:
    return np.full(shape, float(ones), np.float32)


def _standard_deviation(parameter: models.ParamSpec, model: ModelSection) -> float:
    if parameter.name in ("fc.weight", "fc8.weight"):
        return 0.01
    outputs, inputs, *window = parameter.shape
    fan = inputs if model.name == models.ALEXNET else outputs
    return sqrt(2.0 / (fan * prod(window)))


def _starts_at_zero(parameter: models.ParamSpec, model: ModelSection) -> bool:
    """Return True for the scale, or the convolution of a pre-activated block, that ends a residual branch."""
    if model.name == models.ALEXNET or not model.zero_init_last_gamma:
        return False
    network = resnet_spec(model)
    last = f".{'conv' if network.is_preactivated else 'bn'}{LAST_LAYER[network.block]}"
    return parameter.name.startswith("layer") and parameter.name.endswith(last)
