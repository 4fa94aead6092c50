"""Float64 oracle of pre-activated residual networks in training, from He 2016 ("Identity Mappings", eq. 1 and fig. 4e).

x(l+1) = h(x(l)) + F(x(l)); F is batch norm, ReLU, convolution, two or three times. In the first block of a stage h is
a 1x1 convolution of the activated input, as in TensorFlow's official models, or every other pixel and channels of zeros
if the network has no such weights.
"""

from collections.abc import Mapping

import numpy as np

Arrays = Mapping[str, np.ndarray]


def conv(x: np.ndarray, weight: np.ndarray, stride: int = 1) -> np.ndarray:
    """Convolve images `x` [n, channels, height, width] with same padding, one kernel pixel after the other."""
    reach = weight.shape[2] // 2
    height, width = ((side - 1) // stride + 1 for side in x.shape[2:])
    padded = np.pad(x, ((0, 0), (0, 0), (reach, reach), (reach, reach)))
    total = np.zeros((len(x), len(weight), height, width))
    for i, j in np.ndindex(weight.shape[2:]):
        part = padded[:, :, i : i + stride * height : stride, j : j + stride * width : stride][:, :, :height, :width]
        total += np.einsum("nchw,oc->nohw", part, weight[:, :, i, j])
    return total


def activated(x: np.ndarray, weights: Arrays, name: str) -> np.ndarray:
    """Apply batch norm by the batch's statistics, and ReLU."""
    mean, var = x.mean((0, 2, 3), keepdims=True), x.var((0, 2, 3), keepdims=True)
    scale, shift = (weights[f"{name}.{part}"].reshape(1, -1, 1, 1) for part in ("weight", "bias"))
    return np.maximum((x - mean) / np.sqrt(var + 1e-5) * scale + shift, 0)


def max_pool(x: np.ndarray) -> np.ndarray:
    """Return the largest value of windows of 3 x 3 at stride 2."""
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=-np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    return windows[:, :, ::2, ::2].max((4, 5))


def logits(weights: Arrays, images: np.ndarray) -> np.ndarray:
    """Return the logits of `images` [n, 3, height, width]; the names of the weights say which network it is."""
    imagenet = weights["conv1.weight"].shape[2] == 7
    x = conv(images, weights["conv1.weight"], 2 if imagenet else 1)
    x = max_pool(x) if imagenet else x
    firsts = [name for name in weights if name.startswith("layer") and name.endswith(".conv1.weight")]
    blocks = [name.removesuffix(".conv1.weight") for name in firsts]
    for block in blocks:
        stage, number = (int(part) for part in block.removeprefix("layer").split("."))
        stride = 2 if stage > 1 and number == 0 else 1
        count = 3 if f"{block}.conv3.weight" in weights else 2
        y = activated(x, weights, f"{block}.bn1")
        shortcut = x
        if f"{block}.downsample.0.weight" in weights:
            shortcut = conv(y, weights[f"{block}.downsample.0.weight"], stride)
        elif number == 0:
            more = len(weights[f"{block}.conv1.weight"]) - x.shape[1]
            shortcut = np.pad(y[:, :, ::stride, ::stride], ((0, 0), (0, more), (0, 0), (0, 0)))
        for layer in range(1, count + 1):
            strides_here = layer == count - 1
            y = y if layer == 1 else activated(y, weights, f"{block}.bn{layer}")
            y = conv(y, weights[f"{block}.conv{layer}.weight"], stride if strides_here else 1)
        x = y + shortcut
    pooled = activated(x, weights, "bn_last").mean((2, 3))
    return pooled @ weights["fc.weight"].T + weights["fc.bias"]


def sum_along(weights: Arrays, images: np.ndarray, direction: np.ndarray) -> float:
    """Return the logits' inner product with `direction` [n, classes]."""
    return float((logits(weights, images) * direction).sum())
