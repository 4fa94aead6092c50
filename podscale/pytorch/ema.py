"""An exponential moving average of the weights and of batch norm's running statistics, on the device.

    average = decay * average + (1 - decay) * weights,  after every so many updates

It begins with the initial weights and has no correction for that, as in timm, torchvision's reference and Composer.
A masked update counts as one: its weights, those from before, are averaged once more. Each rank averages what it
updates, so a sharded update shares the memory out too. Nothing here is part of a recorded graph: whether an update is
the last of `every` is the host's to know.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from podscale.config.optimizer import EmaSection


class Ema:
    """`values`: the average of this rank's share of the weights, fp32, in the order of `Weights.own`; `buffers`: those
    of the model's buffers by name, equal on all ranks."""

    def __init__(
        self, model: nn.Module, read_weights: Callable[[], Sequence[Tensor]], *, decay: float, every: int = 1
    ) -> None:
        """Begins with the values that the model has. read_weights: this rank's weights as they are, in the order of
        them.
        """
        self._model, self._read_weights = model, read_weights
        self._decay, self._every = decay, every
        self.values = torch.cat(list(read_weights()))
        self.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Takes in the weights as they are after `step` updates, where this is one of those that count."""
        if step % self._every:
            return
        updated = self._read_weights()
        mine = list(self.values.split([len(part) for part in updated]))
        torch._foreach_lerp_([*mine, *self.buffers.values()], [*updated, *self._model.buffers()], 1.0 - self._decay)

    @torch.no_grad()
    def reset(self) -> None:
        """Begins again with the values that the model has now."""
        for kept, now in zip(self.buffers.values(), self._model.buffers(), strict=True):
            kept.copy_(now)
        self.values.copy_(torch.cat(list(self._read_weights())))


def build_ema(section: EmaSection, model: nn.Module, read_weights: Callable[[], Sequence[Tensor]]) -> Ema | None:
    """The average that the document asks for."""
    if section.decay is None:
        return None
    return Ema(model, read_weights, decay=section.decay, every=section.every_steps)
