"""What a loader hands over, and what a place in the sample order is."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Batch:
    """The images of one rank for one update (training) or one step (evaluation).

    images: uint8 [n, height, width, 3]; a NumPy array, or a device tensor where a loader decodes on the device. Such a
    tensor is complete when it is handed over: whoever uses it need not know the loader's stream.
    labels: int64 [n] class indices.
    keys: uint64 [n] sample keys, for predictions and for proving the order.
    weights: float32 [n]; 1 for a sample, 0 for padding, which keeps shapes equal across ranks and counts nowhere.
    step: number of the global batch this is a slice of, from 0 over the whole run.
    """

    images: Any
    labels: npt.NDArray[np.int64]
    keys: npt.NDArray[np.uint64]
    weights: npt.NDArray[np.float32]
    step: int

    def __len__(self) -> int:
        return len(self.labels)


class Loader(Protocol):
    """A source of batches that follows the sample order exactly and can start anywhere in it."""

    @property
    def bad_records(self) -> int:
        """Records of this rank that could not be decoded and were substituted, so far."""
        ...

    @property
    def queued_batches(self) -> int | None:
        """Batches that wait to be taken, asked from any thread; None where the loader cannot tell."""
        ...

    @property
    def cached_bytes(self) -> Mapping[str, int]:
        """Bytes that this process keeps in memory, by cache: `records` (compressed) and `decoded`."""
        ...

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """The rank's slices of the global batches start, ..., stop - 1, in order."""
        ...

    def close(self) -> None:
        """Ends worker processes and releases memory; safe to call twice."""
        ...
