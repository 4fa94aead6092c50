"""Native decoder at the limits of size: images of up to 8,192 pixels a side, and headers that claim 65,500."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.crop_parity.oracles import Photograph
from podscale.data import native as native_module
from podscale.data.crop import CropParams
from podscale.data.decode_index import NO_INDEX
from podscale.data.native import CropDecoder, build_decode_index
from tests.support.jpeg_crops import SAMPLINGS, as_record, large
from tests.support.loading import needs_native
from tests.support.native_crops import SIZE, assert_exact, native

pytestmark = needs_native

ROOT = Path(__file__).resolve().parents[3]

THIN = [(4096, 9), (9, 4096), (4097, 16), (17, 4099), (8192, 33), (33, 8192), (8191, 3), (1, 8191)]
"""Heights and widths, pixels."""
LARGE = (4096, 8192)


def crops_of(height: int, width: int) -> list[CropParams]:
    """Return the last pixel, a crop at the lower right, one across the middle, and the whole image."""
    low, wide = min(height, 300), min(width, 500)
    boxes = [
        (width - 1, height - 1, 1, 1),
        (width - wide, height - low, wide, low),
        ((width - wide) // 2, (height - low) // 2, wide, low),
        (0, 0, width, height),
    ]
    return [CropParams(*box, SIZE, SIZE, 0, 0, flip) for box, flip in zip(boxes, [False, True] * 2, strict=True)]


def assert_exact_in_every_way(image: Photograph, crops: list[CropParams], kernels: Sequence[str]) -> None:
    """Compare crops of the file with the oracles; other kernels, and other ways to the same crops, with them."""
    shape, index = (image.height, image.width), as_record(build_decode_index(image.record, 8, max_percent=100))
    assert len(index)
    expected = None
    for name in kernels:
        decoder = CropDecoder(1, kernels=name)
        [packed] = decoder.pack([image.record], [2**40])
        assert packed is not None
        for record, entries in ((image.record, NO_INDEX), (image.record, index), (packed, NO_INDEX)):
            images, status = native(decoder, record, shape, crops, index=entries)
            assert not status.any()
            if expected is None:
                expected = images
                assert_exact(expected, image, crops)
            assert np.array_equal(images, expected), name


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_crops_of_long_and_thin_images(kind) -> None:
    for height, width in THIN:
        image = Photograph(as_record(large(kind, height, width)), height, width)
        assert_exact_in_every_way(image, crops_of(height, width), native_module.kernels())


def test_crops_of_an_image_of_33_million_pixels() -> None:
    """A part of it, and all of it, by the kernels of this CPU."""
    height, width = LARGE
    image = Photograph(as_record(large("4:2:0", height, width)), height, width)
    assert_exact_in_every_way(image, crops_of(height, width)[1::2], native_module.kernels()[:1])


REGION_BYTES = 3 * 2**27
"""Most bytes of the samples of a region, which a thread keeps."""
OTHER_BYTES = 64 * 2**20
"""Memory that Python and the rest of the decoder may take in addition, bytes."""
CPU_SECONDS = 5


@pytest.mark.parametrize(
    ("height", "width", "most_bytes"),
    [
        (65_500, 65_500, OTHER_BYTES),
        (65_535, 65_535, OTHER_BYTES),
        (65_535, 1, OTHER_BYTES),
        (11_585, 11_585, REGION_BYTES + OTHER_BYTES),
        (2_049, 65_500, REGION_BYTES + OTHER_BYTES),
    ],
)
def test_an_enormous_size_in_the_header(height, width, most_bytes) -> None:
    """A header that claims more than its data is refused.

    The samples of a region of 2^27 pixels are allocated and set to 0 before its data is read; a larger one is refused
    at once. So a header costs memory and time up to that limit, and no more.
    """
    command = [sys.executable, "-m", "tests.support.native_claim", str(height), str(width)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert all(found["status"])
    assert found["packed"] is False
    assert found["bytes"] <= most_bytes
    assert found["cpu_seconds"] < CPU_SECONDS
