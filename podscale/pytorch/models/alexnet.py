"""AlexNet (Krizhevsky 2012) with batch norm instead of local response normalisation (You 2017, Jia 2018).

| layer | output at 224 px | of |
|---|---|---|
| conv1 11x11, stride 4, padding 2; pool 3x3, stride 2 | 96 x 27 x 27 | Krizhevsky 2012, section 3.5 |
| conv2 5x5, two groups; pool 3x3, stride 2 | 256 x 13 x 13 | |
| conv3 3x3 | 384 x 13 x 13 | |
| conv4 3x3, two groups | 384 x 13 x 13 | |
| conv5 3x3, two groups; pool5 3x3, stride 2; batch norm | 256 x 6 x 6 | batch norm after pool5: Jia 2018 (recalled) |
| fc6, fc7, each with ReLU and dropout | 4096 | Krizhevsky 2012, sections 3.5 and 4.2 |
| fc8 | classes | |

Batch norm follows each convolution, before ReLU and pooling, and then the convolutions have no bias. That is our
reading of "AlexNet-BN" (You 2017 names it; its layer table was not read). Groups and initialisation of the papers' runs
are unknown; the defaults here are two groups and He's initialisation.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from podscale import models
from podscale.config import ModelSection
from podscale.models.alexnet import FC6_INPUT_SIDE, POOL_WINDOW, POOLED
from podscale.pytorch.batch_norm import BatchNorm
from podscale.pytorch.models.stem import build_layer


class AlexNet(nn.Module):
    """Images float [n, 3, height, width] -> logits [n, classes]. Its layers are those of the model spec."""

    bn_pool5: nn.Module
    fc6: nn.Linear
    fc7: nn.Linear
    fc8: nn.Linear

    def __init__(self, model: ModelSection, classes: int) -> None:
        super().__init__()
        for layer in models.layered_spec(model, classes).layers:
            is_norm = layer.kind == "norm"
            self.add_module(layer.name, _build_norm(layer.out_channels, model) if is_norm else build_layer(layer))
            if layer.norm:
                self.add_module(layer.norm, _build_norm(layer.out_channels, model))
        self.dropout = model.alexnet.dropout

    def regions(self) -> list[Callable[[Tensor], Tensor]]:
        """Return the network as functions to call one after the other."""
        return [self.forward_features, self.forward_head]

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def forward_features(self, x: Tensor) -> Tensor:
        """Map images `x` [n, 3, height, width] to the input of fc6, [n, channels, 6, 6]."""
        for number in range(1, 6):
            x = getattr(self, f"conv{number}")(x)
            if hasattr(self, f"bn{number}"):
                x = getattr(self, f"bn{number}")(x)
            x = F.relu(x, inplace=True)
            if number in POOLED:
                x = F.max_pool2d(x, POOL_WINDOW.kernel, POOL_WINDOW.stride)
        if hasattr(self, "bn_pool5"):
            x = self.bn_pool5(x)
        is_full = x.shape[-2:] == (FC6_INPUT_SIDE, FC6_INPUT_SIDE)  # other sizes are pooled, as in torchvision
        return x if is_full else F.adaptive_avg_pool2d(x, FC6_INPUT_SIDE)

    def forward_head(self, x: Tensor) -> Tensor:
        x = torch.flatten(x, 1)
        for hidden in (self.fc6, self.fc7):
            x = F.dropout(F.relu(hidden(x), inplace=True), self.dropout, self.training)
        return self.fc8(x)  # type: ignore[no-any-return]


def alexnet(model: ModelSection, classes: int) -> AlexNet:
    """Build AlexNet: He's initialisation by fan-in, the classifier N(0, 0.01), biases 0."""
    network = AlexNet(model, classes)
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    nn.init.normal_(network.fc8.weight, std=0.01)
    return network


def _build_norm(channels: int, model: ModelSection) -> BatchNorm:
    return BatchNorm(channels, eps=model.batch_norm.eps, momentum=model.batch_norm.momentum)
