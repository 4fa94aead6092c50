"""A small convolutional network."""

from torch import nn


def tiny(num_classes: int, channels: int = 8) -> nn.Module:
    """Return a network of two convolutions.

    Args:
        num_classes: classes of the shard set; Podscale sets it.
        channels: outputs of the convolutions.
    """
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * channels, num_classes),
    )
