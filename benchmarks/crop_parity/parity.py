"""Counts of crops of the native decoder that equal those of the reference path and of Pillow."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.crop_parity.oracles import DAMAGES, Photograph
from podscale.config.data import Interpolation
from podscale.data import native
from podscale.data.crop import CropParams, CropParamsBatch
from podscale.data.decode import RESAMPLING, Pixels
from podscale.data.decode_index import NO_INDEX
from podscale.data.native import REASONS, Coefficients, CropDecoder, build_decode_index

INTERVAL = 8
"""MCUs between two entries of a decode index, the default of `data.decode_index`."""
WAYS = ("file", "decode index", "coefficients")
"""Sources of a crop."""
DAMAGED_SIZE = 32
"""Side of the crops of damaged files, pixels."""
ANY_BYTES = 2**40
"""Size that no coefficients have, bytes."""
OTHER_THAN_REFERENCE, OTHER_THAN_PILLOW = "other than the reference path", "other than Pillow"
OTHER_DECISIONS, STALE_INDEX_USED = "decided otherwise by a version of the kernels", "index of the intact file used"
DIFFERENCES = (OTHER_THAN_REFERENCE, OTHER_THAN_PILLOW, OTHER_DECISIONS, STALE_INDEX_USED)


@dataclass(frozen=True)
class NativeSource:
    """Photograph as one version of the kernels reads it in one of WAYS."""

    kernels: str
    way: str
    decoder: CropDecoder
    record: Pixels | Coefficients
    index: Pixels

    def crop(
        self, photograph: Photograph, crops: Sequence[CropParams], size: int, interpolation: Interpolation
    ) -> tuple[Pixels, list[int]]:
        """Return the crops, uint8 [n, size, size, 3], and the status of each."""
        count = len(crops)
        columns = CropParamsBatch(*(np.array(column) for column in zip(*crops, strict=True)))
        sides = np.full(count, photograph.height), np.full(count, photograph.width)
        images = np.zeros((count, size, size, 3), dtype=np.uint8)
        indexes = [self.index] * count
        status = self.decoder.decode([self.record] * count, *sides, columns, images, interpolation, indexes)
        return images, status.tolist()


@dataclass
class Parity:
    """Comparison of the photographs of one archive or folder.

    Args:
        photographs: Photographs compared.
        without_index: Photographs for which no decode index is written.
        refused: Photographs with a refused crop by reason.
        crops: Crops by version of the kernels, way and outcome.
        damaged: Files or crops by kind of damage and outcome.
    """

    photographs: int = 0
    without_index: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    crops: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    damaged: Counter[tuple[str, str]] = field(default_factory=Counter)
    decoders: dict[str, CropDecoder] = field(
        default_factory=lambda: {kernels: CropDecoder(1, kernels=kernels) for kernels in native.kernels()}
    )

    @property
    def differences(self) -> int:
        """Number of crops and decisions that differ."""
        found = [*self.crops.items(), *self.damaged.items()]
        return sum(count for key, count in found if key[-1] in DIFFERENCES)

    def compare(self, data: bytes, number: int, sizes: Sequence[int]) -> None:
        """Compare crops of one photograph of these sizes, and of a damaged copy of it."""
        photograph = Photograph.open(data)
        index = np.frombuffer(build_decode_index(photograph.record, INTERVAL), dtype=np.uint8)
        sources, reasons = self._sources(photograph, index), set[str]()
        for size in sizes:
            crops = photograph.crops(number, size)
            for interpolation in RESAMPLING:
                reasons |= self._compare_crops(photograph, crops, size, interpolation, sources)
        self.photographs += 1
        self.without_index += not len(index)
        self.refused.update(reasons)
        self._compare_damaged(photograph.damaged(number), DAMAGES[number % len(DAMAGES)], index)

    def _sources(self, photograph: Photograph, index: Pixels) -> list[NativeSource]:
        """Return the photograph in all ways that it has, for each version of the kernels."""
        found = []
        for kernels, decoder in self.decoders.items():
            found.append(NativeSource(kernels, "file", decoder, photograph.record, NO_INDEX))
            if len(index):
                found.append(NativeSource(kernels, "decode index", decoder, photograph.record, index))
            [packed] = decoder.pack([photograph.record], [ANY_BYTES])
            if packed is not None:
                found.append(NativeSource(kernels, "coefficients", decoder, packed, NO_INDEX))
        return found

    def _compare_crops(
        self,
        photograph: Photograph,
        crops: list[CropParams],
        size: int,
        interpolation: Interpolation,
        sources: list[NativeSource],
    ) -> set[str]:
        """Compare the crops of all sources. Returns the reasons for which some were refused."""
        references = [photograph.crop_by_reference(crop, size, interpolation) for crop in crops]
        pillows = [photograph.crop_by_pillow(crop, size, interpolation) for crop in crops]
        reasons = set[str]()
        for source in sources:
            images, status = source.crop(photograph, crops, size, interpolation)
            for image, refusal, reference, pillow in zip(images, status, references, pillows, strict=True):
                outcomes = ["refused" if refusal else "crops"]
                if refusal:
                    reasons.add(REASONS[refusal])
                else:
                    outcomes += _differences(image, reference, pillow)
                self.crops.update((source.kernels, source.way, outcome) for outcome in outcomes)
        return reasons

    def _compare_damaged(self, photograph: Photograph, kind: str, intact_index: Pixels) -> None:
        """Compare the upper half and the whole of a damaged file: refused, or the pixels of the reference path.

        A file that Pillow refuses and the reference path decodes is no difference: its damage is below the crop.
        """
        height, width = photograph.height, photograph.width
        square = (DAMAGED_SIZE, DAMAGED_SIZE, 0, 0, False)
        crops = [CropParams(0, 0, width, rows, *square) for rows in (max(1, height // 2), height)]
        references = [photograph.crop_by_reference(crop, DAMAGED_SIZE, "bilinear") for crop in crops]
        pillows = [photograph.crop_by_pillow(crop, DAMAGED_SIZE, "bilinear") for crop in crops]
        index = np.frombuffer(build_decode_index(photograph.record, INTERVAL), dtype=np.uint8)
        outcomes, decisions = ["files"], set[tuple[bool, ...]]()
        for source in self._sources(photograph, index):
            images, status = source.crop(photograph, crops, DAMAGED_SIZE, "bilinear")
            if source.way == "file":
                decisions.add(tuple(refusal == 0 for refusal in status))
            for image, refusal, reference, pillow in zip(images, status, references, pillows, strict=True):
                outcomes.append("refused" if refusal else "crops")
                if not refusal:
                    outcomes += _differences(image, reference, image if pillow is None else pillow)
                    outcomes += ["refused by Pillow"] if pillow is None else []
        outcomes += [OTHER_DECISIONS] if len(decisions) > 1 else []
        for kernels, decoder in self.decoders.items() if len(intact_index) else ():
            stale = NativeSource(kernels, "decode index", decoder, photograph.record, intact_index)
            _, status = stale.crop(photograph, crops, DAMAGED_SIZE, "bilinear")
            outcomes += [STALE_INDEX_USED] * status.count(0)
        self.damaged.update((kind, outcome) for outcome in outcomes)


def _differences(image: Pixels, reference: Pixels | None, pillow: Pixels | None) -> list[str]:
    """Return the oracles that have other pixels than a crop; None has none."""
    wanted = {OTHER_THAN_REFERENCE: reference, OTHER_THAN_PILLOW: pillow}
    return [name for name, pixels in wanted.items() if pixels is None or not np.array_equal(image, pixels)]
