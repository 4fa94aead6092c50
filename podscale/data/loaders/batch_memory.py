"""Memory of the images that loaders decode on the CPU: pinned if they go to a GPU, so that the copy needs no other one.

Pinned memory comes from torch's cache. The cache reuses memory that nobody holds any more, once the copies from it are
over, so a training soon allocates none.
"""

import logging
from functools import partial
from typing import Protocol

import numpy as np

from podscale.data.decode import Pixels

log = logging.getLogger("podscale.data")


class AllocateImages(Protocol):
    """Allocator of a batch's images."""

    def __call__(self, shape: tuple[int, ...], /) -> Pixels:
        """Return an uninitialised uint8 array."""
        ...


def image_allocator(device: str) -> AllocateImages:
    """Return the allocator for images that go to this device (torch's name)."""
    return PinnedAllocator() if device.startswith("cuda") else allocate_pageable


allocate_pageable: AllocateImages = partial(np.empty, dtype=np.uint8)


class PinnedAllocator:
    """Allocator of pinned memory, and of ordinary memory after pinning failed (no CUDA, or a limit of the machine).

    Call it in the thread that launches the training's kernels: CUDA refuses it while another one records a graph.
    """

    def __init__(self) -> None:
        self._can_pin = True

    def __call__(self, shape: tuple[int, ...], /) -> Pixels:
        import torch  # only if the engine is PyTorch

        if self._can_pin:
            try:
                # The array holds the tensor. torch finds the memory by its address, also from another tensor on it.
                return torch.empty(shape, dtype=torch.uint8, pin_memory=True).numpy()
            except RuntimeError as error:
                self._can_pin = False
                log.warning("batches are in memory that is not pinned, which costs a copy each: %s", error)
        return allocate_pageable(shape)
