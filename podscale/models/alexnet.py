"""AlexNet's layers."""

from collections.abc import Iterator

from podscale.config import ModelSection
from podscale.models.spec import LayerSpec, Window, WindowPath

CONV_CHANNELS, HIDDEN_UNITS = (96, 256, 384, 384, 256), 4096
"""Output channels of conv1 to conv5, units of fc6 and fc7 (Krizhevsky 2012, section 3.5)."""
KERNELS = (11, 5, 3, 3, 3)
GROUPED, POOLED = (2, 4, 5), (1, 2, 5)
"""Convolutions in two groups (towers), and convolutions that an overlapping max-pool follows."""
FC6_INPUT_SIDE = 6
"""Input side of fc6, pixels: pool5's output for an image of 224."""
FIRST_WINDOW, POOL_WINDOW = Window(11, 4, 2), Window(3, 2, 0)


def scaled_channels(model: ModelSection) -> tuple[tuple[int, ...], int]:
    """Return output channels of the five convolutions and units of the hidden linear layers, at the section's width."""
    scaled = [size * model.width // 64 for size in (*CONV_CHANNELS, HIDDEN_UNITS)]
    return tuple(scaled[:-1]), scaled[-1]


def layers(model: ModelSection, classes: int) -> Iterator[LayerSpec]:
    """Yield the layers of Krizhevsky 2012, section 3.5 and figure 2; `config.model.AlexNetSection` names the sources.

    At full width and 1000 classes: 60,965,224 parameters with two groups and without batch norm (62,378,344 with one
    group). Padding follows torchvision's network: 224 px give 55 x 55 after conv1.
    """
    options, (channels, hidden) = model.alexnet, scaled_channels(model)
    inputs = 3
    path: WindowPath = (FIRST_WINDOW,)
    for number, outputs in enumerate(channels, start=1):
        kernel, stride, padding = (
            FIRST_WINDOW if number == 1 else Window(KERNELS[number - 1], 1, KERNELS[number - 1] // 2)
        )
        yield LayerSpec(
            f"conv{number}",
            "convolution",
            inputs,
            outputs,
            (kernel, kernel),
            stride,
            (padding, padding),
            groups=options.groups if number in GROUPED else 1,
            bias=not options.convolution_norm,
            norm=f"bn{number}" if options.convolution_norm else "",
            path=path,
        )
        inputs = outputs
        if number in POOLED:
            path = (*path, POOL_WINDOW)
    if options.pool5_norm:
        yield LayerSpec("bn_pool5", "norm", inputs, inputs, path=path)
    yield LayerSpec("fc6", "linear", inputs * FC6_INPUT_SIDE**2, hidden, bias=True)
    yield LayerSpec("fc7", "linear", hidden, hidden, bias=True)
    yield LayerSpec("fc8", "linear", hidden, classes, bias=True)
