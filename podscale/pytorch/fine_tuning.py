"""Frozen parameters and factors of the learning rate, on the model and the flat weights of one rank."""

import torch
from torch import Tensor, nn

from podscale.config import RunConfig
from podscale.pytorch.batch_norm import BatchNorm
from podscale.pytorch.flat_buffers import FlatWeights, GradientBuffer
from podscale.training.fine_tuning import frozen_names, head_names, learning_rate_scales


def freeze_parameters(config: RunConfig, model: nn.Module, classes: int) -> None:
    """Freeze the parameters that `train.freeze` names, and the batch norms of which it freezes one, if asked for.

    Raises InputError if a pattern matches no parameter, or no parameter is left to train.
    """
    if not config.train.freeze:
        return
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    frozen = frozen_names(config.train, trained, head_names(config.model, classes))
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    if config.train.freeze_batch_norm:
        for owner in {name.rpartition(".")[0] for name in frozen}:
            module = model.get_submodule(owner)
            if isinstance(module, BatchNorm):
                module.is_frozen = True


class RateScales:
    """Factors of the learning rate, for any optimizer whose change of a weight is proportional to the learning rate.

    `scales` is fp32, in the order of `FlatWeights.masters`. After a step, each weight goes that part of the way from
    its old value. An optimizer's state does not depend on the factor: momentum that contains the learning rate is
    proportional to it too.
    """

    def __init__(self, weights: FlatWeights, scales: Tensor) -> None:
        self._masters, self._scales = weights.masters, scales
        self._before = torch.empty_like(weights.masters)

    def save(self) -> None:
        """Save the weights before a step."""
        self._before.copy_(self._masters)

    def apply(self) -> None:
        """Scale the change of each weight since `save`. A factor of 1 leaves it to the bit."""
        torch.lerp(self._before, self._masters, self._scales, out=self._masters)


def build_rate_scales(
    config: RunConfig, buffer: GradientBuffer, weights: FlatWeights, classes: int
) -> RateScales | None:
    """Build the factors of `train.learning_rate_scale` and `train.layer_decay`; None if all are 1."""
    train = config.train
    if not train.learning_rate_scale and train.layer_decay is None:
        return None
    scales = learning_rate_scales(train, list(buffer.parameters), head_names(config.model, classes))
    flat = torch.ones_like(buffer.flat)
    for name, view in weights.named_views(flat).items():
        view.fill_(scales[name])
    return RateScales(weights, flat if len(weights.masters) == len(flat) else weights.local(flat))
