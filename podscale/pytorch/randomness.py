"""Random numbers that an update draws itself (dropout), keyed like everything else that is random in a run.

Before each update the device's generator is set to a key of (seed, update, rank). So a resumed run draws what the
uninterrupted one drew, ranks draw differently, and a replayed CUDA graph, which reads the generator's seed when it
starts, draws anew in every update.
"""

import torch
from torch import nn

from podscale.data.rng import derive_key
from podscale.pytorch.world import World

_DROPOUT_KEY_DOMAIN = 0x64726F70  # "drop"


class DropoutRng:
    """Sets the generator of a rank's device; does nothing for a model that draws nothing."""

    def __init__(self, model: nn.Module, seed: int, world: World) -> None:
        self._has_dropout = any(getattr(module, "dropout", 0.0) for module in model.modules())
        self._seed, self._rank = seed, world.rank
        self._generator = torch.cuda.default_generators[world.device.index] if world.on_gpu else torch.default_generator

    def start_step(self, step: int) -> None:
        """To be called before update `step` (from 0), never while a CUDA graph is being recorded."""
        if self._has_dropout:
            self._generator.manual_seed(int(derive_key(self._seed, _DROPOUT_KEY_DOMAIN, step, self._rank)[0] >> 1))
