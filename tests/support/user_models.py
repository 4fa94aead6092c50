"""Models that a user might name by python:MODULE:CALLABLE, good ones and ones that Podscale refuses."""

from typing import Any

import torch
from torch import Tensor, nn


def depthwise(num_classes: int, channels: int = 8) -> nn.Module:
    """Return a network without batch norm whose costs are easily counted by hand."""
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1, bias=False),
        nn.GroupNorm(2, channels),
        nn.Conv2d(channels, channels, 3, padding=1, groups=channels),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, num_classes),
    )


def with_keywords(num_classes: int, channels: int, **options: int) -> nn.Module:
    """Return a network whose class does not take the keywords of this function."""
    return depthwise(num_classes, channels * options.get("times", 1))


def strided_pointwise(num_classes: int) -> nn.Module:
    """Return a network whose 1x1 convolutions have few input channels and a stride."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.Conv2d(4, 6, 1, stride=2),
        nn.ReLU(),
        nn.Conv2d(6, 8, 1, stride=(2, 1), bias=False),
        nn.BatchNorm2d(8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, num_classes),
    )


class FixedBatch(nn.Module):
    """Network whose batch is a constant, so that it cannot be exported."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(3, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.mean(dim=(2, 3)).reshape(len(x), 3))  # type: ignore[no-any-return]


class Tokens(nn.Module):
    """Class token, learned positions, a scale of each channel and an embedding of a fixed index."""

    def __init__(self, num_classes: int, side: int = 4) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 6))
        self.pos_embed = nn.Parameter(torch.zeros(1, side**2 + 1, 6))
        self.patch = nn.Conv2d(3, 6, 4, 4)
        self.gamma = nn.Parameter(torch.ones(6))
        self.mixing = nn.Parameter(torch.ones(6, 6))
        self.table = nn.Embedding(2, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, num_classes)
        self.register_buffer("index", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed
        x = x @ self.mixing * self.gamma + self.table(self.index)
        return self.head(self.norm(x)[:, 0])  # type: ignore[no-any-return]


class Frozen(nn.Module):
    """Network with a parameter that is not trained."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((3, 1, 1), 2.0), requires_grad=False)
        self.norm = nn.BatchNorm2d(3, eps=1e-3, momentum=0.01)
        self.fc = nn.Linear(3, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(x * self.scale).mean(dim=(2, 3)))  # type: ignore[no-any-return]


class TwoHeads(nn.Module):
    """Network that returns two outputs in training."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(3, num_classes)

    def forward(self, x: Tensor) -> Any:
        logits = self.fc(x.mean(dim=(2, 3)))
        return (logits, logits) if self.training else logits


class Counting(TwoHeads):
    """Network that counts its passes in a buffer."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.passes += 1
        return self.fc(x.mean(dim=(2, 3)))


class Unused(TwoHeads):
    """Network with a layer that forward does not call."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.spare = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        return self.fc(x.mean(dim=(2, 3)))


def without_statistics(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(3, affine=False), nn.Flatten(), nn.Linear(48, num_classes))


def no_module(num_classes: int) -> object:
    return object()


def fails(num_classes: int) -> nn.Module:
    raise RuntimeError("no weights")


NOT_CALLABLE = 3
