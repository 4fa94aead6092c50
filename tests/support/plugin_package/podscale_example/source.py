"""Drawn images of horizontal and vertical stripes."""

import io
from collections.abc import Iterator

from PIL import Image

from podscale.data.sources import SourceItem

CLASSES = ("horizontal", "vertical")


class Stripes:
    """Source of `count` images of each class; `location` is the count."""

    def __init__(self, location: str) -> None:
        self._count = int(location)

    def items(self) -> Iterator[SourceItem]:
        for label in CLASSES:
            for number in range(self._count):
                name = f"{label}/{number:04d}.png"
                yield SourceItem(name.encode(), label, len(self._draw(label, number)))

    def read(self, item: SourceItem) -> bytes:
        return self._draw(item.label, int(item.name[-8:-4]))

    def _draw(self, label: str, number: int) -> bytes:
        """Return a PNG; the colour and the width of the stripes follow from the number."""
        stripes = Image.new("RGB", (1, 16))
        colour, width = (80 + number % 160, 60, 200 - number % 100), 1 + number % 3
        for row in range(16):
            stripes.putpixel((0, row), colour if row // width % 2 else (0, 0, number % 256))
        image = stripes.resize((16, 16), Image.Resampling.NEAREST)
        out = io.BytesIO()
        (image if label == "horizontal" else image.transpose(Image.Transpose.ROTATE_90)).save(out, "PNG")
        return out.getvalue()
