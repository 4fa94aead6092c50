"""Cost of a header that claims more than its data: `python -m tests.support.native_claim HEIGHT WIDTH`.

A process of its own, because its largest resident memory counts. Prints, as JSON, the status of a crop of the whole
image and of its last corner, if coefficients were packed, and memory (bytes) and CPU seconds of all of these.
"""

import json
import re
import sys
import time
from pathlib import Path

import numpy as np

from podscale.data import native as native_module
from podscale.data.crop import CropParams
from podscale.data.decode import Pixels
from podscale.data.native import CropDecoder
from tests.support.jpeg_crops import as_record
from tests.support.native_crops import SIZE, native
from tests.support.shard_set import encode_image, smooth_pixels


def claiming(height: int, width: int) -> Pixels:
    """Return a JPEG 4:4:4 of 60 x 50 pixels whose header has another size."""
    data = bytearray(encode_image(smooth_pixels(1, 50, 60), subsampling=0))
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = np.array([height, width], dtype=">u2").tobytes()
    return as_record(bytes(data))


def peak_bytes() -> int:
    """Return the largest resident memory of this program so far. getrusage has that of its parent if it is larger."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    [kibibytes] = re.findall(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    return 1024 * int(kibibytes)


def main() -> None:
    height, width = int(sys.argv[1]), int(sys.argv[2])
    record, decoder = claiming(height, width), CropDecoder(1)
    corner = min(height, 9), min(width, 9)
    crops = [
        CropParams(0, 0, width, height, SIZE, SIZE, 0, 0, False),
        CropParams(width - corner[1], height - corner[0], corner[1], corner[0], SIZE, SIZE, 0, 0, False),
    ]
    native_module.pillow_order()
    native(decoder, claiming(50, 60), (50, 60), [CropParams(0, 0, 60, 50, SIZE, SIZE, 0, 0, False)])
    before, begin = peak_bytes(), time.process_time()
    _, status = native(decoder, record, (height, width), crops)
    [packed] = decoder.pack([record], [2**40])
    found = {"status": status.tolist(), "packed": packed is not None}
    print(json.dumps({**found, "bytes": peak_bytes() - before, "cpu_seconds": time.process_time() - begin}))


if __name__ == "__main__":
    main()
