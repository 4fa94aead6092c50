"""Replacement of a model's batch norm by ours, which follows the document's span and averages its statistics."""

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from podscale.config.model import BatchNormSection
from podscale.errors import InputError
from podscale.pytorch.batch_norm.layer import BatchNorm

PLAIN_LAYERS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class FlattenedBatchNorm(BatchNorm):
    """Batch norm of inputs that are no images, [n, channels, ...], as images of one column."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(*x.shape[:2], -1, 1)).view(x.shape)


class ActivatedBatchNorm(BatchNorm):
    """Batch norm, then dropout and activation: timm's BatchNormAct2d."""

    drop: nn.Module
    act: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(self.drop(super().forward(x)))
        return y


def convert_batch_norm(network: nn.Module, section: BatchNormSection, model_name: str) -> nn.Module:
    """Replace every batch norm in `network`, in place, with its weights and statistics; return the network.

    An epsilon or momentum of the document that differs from the default replaces the model's own.

    Raises InputError for a batch norm that ours cannot replace.
    """
    if isinstance(network, _BatchNorm):
        return _convert(network, section, model_name)
    for name, child in list(network.named_children()):
        if isinstance(child, _BatchNorm):
            setattr(network, name, _convert(child, section, model_name))
        else:
            convert_batch_norm(child, section, model_name)
    return network


def _convert(layer: _BatchNorm, section: BatchNormSection, model_name: str) -> BatchNorm:
    kind = type(layer)
    if not layer.affine or not layer.track_running_stats or layer.momentum is None:
        problem = "has a batch norm without scale, running statistics or momentum, which Podscale cannot group"
        raise InputError(problem, field="model.name", got=model_name, hint="Choose another model.")
    if kind in PLAIN_LAYERS:
        takes_images = kind in (nn.BatchNorm2d, nn.SyncBatchNorm)
        ours = (BatchNorm if takes_images else FlattenedBatchNorm)(layer.num_features)
    elif kind.__name__ == "BatchNormAct2d" and hasattr(layer, "act") and hasattr(layer, "drop"):
        ours = ActivatedBatchNorm(layer.num_features)
        ours.drop, ours.act = layer.get_submodule("drop"), layer.get_submodule("act")
    else:
        raise InputError(
            f"has a batch norm of a kind that Podscale does not know, {kind.__module__}.{kind.__qualname__}",
            field="model.name",
            got=model_name,
            hint="Use torch.nn.BatchNorm2d, or choose another model.",
        )
    default = BatchNormSection()
    ours.eps = layer.eps if section.eps == default.eps else section.eps
    ours.momentum = layer.momentum if section.momentum == default.momentum else section.momentum
    ours.weight, ours.bias = layer.weight, layer.bias
    ours.running_mean, ours.running_var = layer.get_buffer("running_mean"), layer.get_buffer("running_var")
    return ours.train(layer.training)
