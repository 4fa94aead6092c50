"""An exponential moving average of the weights and of batch norm's running statistics, on the device.

    average = decay * average + (1 - decay) * weights,  after every so many updates

It begins with the initial weights and has no correction for that, as in timm, torchvision's reference and Composer.
A masked update counts as one: its weights, those from before, are averaged once more. Each rank averages what it
updates, so a sharded update shares the memory out too. Nothing here is part of a recorded graph: whether an update is
the last of `every` is the host's to know.
"""

import torch
from torch import nn

from podscale.config.ema import EmaSection
from podscale.pytorch.weights import Weights


class Ema:
    """`values`: the average of this rank's share of the weights, fp32, in the order of `Weights.own`; `buffers`: those
    of the model's buffers by name, equal on all ranks."""

    def __init__(self, model: nn.Module, weights: Weights, *, decay: float, every: int = 1) -> None:
        """Begins with the values that the model has."""
        self._model, self._weights = model, weights
        self._decay, self._every = decay, every
        self.values = torch.cat(weights.updated()) if weights.updated() else weights.masters.new_zeros(0)
        self.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """Takes in the weights as they are after `step` updates, where this is one of those that count."""
        if step % self._every:
            return
        updated = self._weights.updated()
        mine = list(self.values.split([len(part) for part in updated]))
        torch._foreach_lerp_([*mine, *self.buffers.values()], [*updated, *self._model.buffers()], 1.0 - self._decay)

    @torch.no_grad()
    def restart(self) -> None:
        """Begins again with the values that the model has now."""
        for kept, now in zip(self.buffers.values(), self._model.buffers(), strict=True):
            kept.copy_(now)
        if updated := self._weights.updated():
            self.values.copy_(torch.cat(updated))


def build_ema(section: EmaSection, model: nn.Module, weights: Weights) -> Ema | None:
    """The average that the document asks for."""
    if section.decay is None:
        return None
    return Ema(model, weights, decay=section.decay, every=section.every_steps)
