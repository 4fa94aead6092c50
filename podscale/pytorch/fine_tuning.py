"""Frozen parameters and factors of the learning rate, on the model and the flat weights of one rank."""

import torch
from torch import Tensor, nn

from podscale.config import RunConfig
from podscale.pytorch.batch_norm import BatchNorm
from podscale.pytorch.flat_buffers import FlatWeights, GradientBuffer
from podscale.training.fine_tuning import learning_rate_scales, trained_spec


def freeze_parameters(config: RunConfig, model: nn.Module, classes: int) -> None:
    """Freeze the parameters that `train.freeze` names, and the batch norms of which it freezes one, if asked for.

    Raises InputError if a pattern matches no parameter, or no parameter is left to train.
    """
    trained = {parameter.name for parameter in trained_spec(config, classes).parameters}
    for prefix, module in model.named_modules():
        own = module.named_parameters(prefix, recurse=False)
        frozen = [parameter for name, parameter in own if parameter.requires_grad and name not in trained]
        for parameter in frozen:
            parameter.requires_grad_(False)
        if frozen and isinstance(module, BatchNorm):
            module.is_frozen = config.train.freeze_batch_norm


class RateScales:
    """Factors of the learning rate, for any optimizer whose change of a weight is proportional to the learning rate.

    After a step, each weight goes that part of the way from its old value. An optimizer's state does not depend on the
    factor: momentum that contains the learning rate is proportional to it too.

    Args:
        masters: fp32 weights that this rank steps (`FlatWeights.local_masters`).
        scales: fp32 factors, in the order of `masters`.
    """

    def __init__(self, masters: list[Tensor], scales: Tensor) -> None:
        self._masters = masters
        self._scales = scales.split([len(part) for part in masters])
        self._before = [torch.empty_like(part) for part in masters]

    def save(self) -> None:
        """Save the weights before a step."""
        torch._foreach_copy_(self._before, self._masters)

    def apply(self) -> None:
        """Scale the change of each weight since `save`. A factor of 1 leaves it to the bit."""
        for before, weights, scales in zip(self._before, self._masters, self._scales, strict=True):
            torch.lerp(before, weights, scales, out=weights)


def build_rate_scales(
    config: RunConfig, buffer: GradientBuffer, weights: FlatWeights, classes: int
) -> RateScales | None:
    """Build the factors of `train.learning_rate_scale` and `train.layer_decay`; None if all are 1."""
    scales = learning_rate_scales(config, list(buffer.parameters), classes)
    if not scales:
        return None
    flat = torch.ones_like(buffer.flat)
    for name, view in weights.named_views(flat).items():
        view.fill_(scales[name])
    return RateScales(weights.local_masters(), weights.local(flat))
