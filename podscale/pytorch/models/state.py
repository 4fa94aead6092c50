"""Arrays of a model that a checkpoint holds beside its trained parameters."""

from torch import Tensor, nn

from podscale.pytorch.batch_norm import BatchNorm


def running_statistics(network: nn.Module) -> dict[str, Tensor]:
    """Return the running statistics of batch norm by name, in the order of the modules."""
    return {
        f"{prefix}.{name}".removeprefix("."): buffer
        for prefix, module in network.named_modules()
        if isinstance(module, BatchNorm)
        for name, buffer in module.named_buffers(recurse=False)
    }


def untrained_arrays(network: nn.Module) -> dict[str, Tensor]:
    """Return the running statistics of batch norm, then the frozen parameters, by name.

    Other buffers are constants that the model builds itself, and no part of a checkpoint.
    """
    frozen = {name: p.detach() for name, p in network.named_parameters() if not p.requires_grad}
    return running_statistics(network) | frozen


def model_arrays(network: nn.Module) -> dict[str, Tensor]:
    """Return every array of a checkpoint's model by name: trained parameters, then `untrained_arrays`."""
    trained = {name: p.detach() for name, p in network.named_parameters() if p.requires_grad}
    return trained | untrained_arrays(network)
