"""Inception-V3 and Inception-ResNet-V2, built from the tables of `podscale.models.inception`; the auxiliary head."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from podscale import models
from podscale.config import ModelSection
from podscale.models.branches import BranchNode, ConvNode, Nodes, PoolNode, ResidualNode
from podscale.models.inception import inception_table
from podscale.pytorch.batch_norm import BatchNorm
from podscale.pytorch.models.stem import build_layer


class InceptionOutputs(NamedTuple):
    """Logits of the main and of the auxiliary head, float [n, classes] each."""

    logits: Tensor
    auxiliary: Tensor


Outputs = Tensor | InceptionOutputs
"""Output of a network: logits, or in training those of both heads. Evaluation has no auxiliary head."""


class Inception(nn.Module):
    """Images float [n, 3, height, width] -> logits [n, classes], or in training those of both heads if it has two."""

    def __init__(self, model: ModelSection, classes: int) -> None:
        super().__init__()
        self.table = inception_table(model)
        self._named: dict[str, nn.Module] = {}
        for layer in models.layered_spec(model, classes).layers:
            self._add_module_at(layer.name, build_layer(layer))
            if layer.norm:
                norm = BatchNorm(layer.out_channels, eps=model.batch_norm.eps, momentum=model.batch_norm.momentum)
                self._add_module_at(layer.norm, norm)
        self.dropout = model.inception.dropout

    def _add_module_at(self, name: str, module: nn.Module) -> None:
        """Add a module under its dotted name, so that its parameters have the names of the model spec."""
        *parents, last = name.split(".")
        owner: nn.Module = self
        for parent in parents:
            if not hasattr(owner, parent):
                owner.add_module(parent, nn.Module())
            owner = getattr(owner, parent)
        owner.add_module(last, module)
        self._named[name] = module  # a shorter lookup for forward

    def regions(self) -> list[Callable[[Outputs], Outputs]]:
        """Return the network as functions to call one after the other; they pass auxiliary logits on."""
        return [*(partial(self._run_stage, number) for number, _ in enumerate(self.table.stages)), self._forward_head]

    def forward(self, x: Outputs) -> Outputs:
        for region in self.regions():
            x = region(x)
        return x

    def _run_stage(self, number: int, x: Outputs) -> Outputs:
        nodes = self.table.stages[number]
        if isinstance(x, InceptionOutputs):
            return InceptionOutputs(self._run_nodes(nodes, x.logits), x.auxiliary)
        x = self._run_nodes(nodes, x)
        if self.training and self.table.auxiliary and number == self.table.auxiliary_after:
            features = self._run_nodes(self.table.auxiliary, x).mean(dim=(2, 3))
            return InceptionOutputs(x, self._named[self.table.auxiliary_classifier](features))
        return x

    def _forward_head(self, x: Outputs) -> Outputs:
        if isinstance(x, InceptionOutputs):
            return InceptionOutputs(self._logits(x.logits), x.auxiliary)
        return self._logits(x)

    def _logits(self, x: Tensor) -> Tensor:
        x = F.dropout(x.mean(dim=(2, 3)), self.dropout, self.training)
        return self._named[self.table.classifier](x)  # type: ignore[no-any-return]

    def _run_nodes(self, nodes: Nodes, x: Tensor) -> Tensor:
        for node in nodes:
            match node:
                case ConvNode(name):
                    x = F.relu(self._named[f"{name}.bn"](self._named[f"{name}.conv"](x)), inplace=True)
                case PoolNode():
                    x = _pool(node, x)
                case BranchNode(branches):
                    x = torch.cat([self._run_nodes(branch, x) for branch in branches], dim=1)
                case ResidualNode(projection, inner, scale, linear):
                    x = x + scale * self._named[projection](self._run_nodes((inner,), x))
                    x = x if linear else F.relu(x, inplace=True)
        return x


def inception(model: ModelSection, classes: int) -> Inception:
    """Build the network: He's initialisation by fan-in, classifiers N(0, 0.01), biases 0."""
    network = Inception(model, classes)
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
        if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    return network


def _pool(node: PoolNode, x: Tensor) -> Tensor:
    if node.kind == "max":
        return F.max_pool2d(x, *node.window)
    return F.avg_pool2d(x, *node.window, count_include_pad=node.count_padding)
