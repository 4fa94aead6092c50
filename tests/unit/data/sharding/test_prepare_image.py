"""Conversion: unusable kinds become a clean baseline JPEG of the same picture; other images are not changed."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pil
from PIL import ImageOps

from podscale.config.data import DataSection
from podscale.data.index import JPEG, PNG, ImageFlag
from podscale.data.sharding.validate_image import ImageHeader, ImageRules, InvalidImage, prepare_image


def picture(size: tuple[int, int] = (96, 64)) -> Pil.Image:
    across, down = np.meshgrid(np.linspace(0, 255, size[0]), np.linspace(0, 255, size[1]))
    return Pil.fromarray(np.stack([across, down, 255 - across], axis=-1).astype(np.uint8))


def encoded(image: Pil.Image, form: str = "JPEG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **({"quality": 95} if form == "JPEG" else {}), **options)
    return out.getvalue()


def rules(**options: Any) -> ImageRules:
    return ImageRules.from_section(DataSection(source="x", **options))


def pixels(data: bytes) -> Any:
    return np.asarray(Pil.open(io.BytesIO(data)).convert("RGB")).astype(int)


def difference(data: bytes, expected: Pil.Image) -> float:
    return float(np.abs(pixels(data) - np.asarray(expected.convert("RGB")).astype(int)).mean())


def rotated() -> bytes:
    exif = Pil.Exif()
    exif[0x0112] = 6
    return encoded(picture(), exif=exif)


@pytest.mark.parametrize("options", [{}, {"policy": "convert"}, {"resize_short": 64}])
def test_a_clean_image_passes_untouched(options: dict[str, Any]) -> None:
    for data in (encoded(picture()), encoded(picture().convert("L"))):
        assert prepare_image(b"a.jpg", data, rules(**options))[0] is data


@pytest.mark.parametrize(
    ("name", "data"),
    [
        (b"a.jpg", encoded(picture().convert("CMYK"))),
        (b"a.JPEG", encoded(picture(), "PNG")),
        (b"a.jpg", encoded(picture(), "GIF")),
        (b"a.jpg", encoded(picture(), "BMP")),
        (b"a.png", encoded(picture(), "WEBP", quality=95)),
    ],
)
def test_convert_makes_a_clean_rgb_jpeg(name: bytes, data: bytes) -> None:
    out, image = prepare_image(name, data, rules(policy="convert", quality=95))
    assert image == ImageHeader(JPEG, 64, 96, ImageFlag.CONVERTED)
    assert Pil.open(io.BytesIO(out)).mode == "RGB"
    assert difference(out, Pil.open(io.BytesIO(data)).convert("RGB")) < 4


def test_convert_turns_a_picture_upright() -> None:
    out, image = prepare_image(b"a.jpg", rotated(), rules(policy="convert", quality=95))
    assert image == ImageHeader(JPEG, 96, 64, ImageFlag.CONVERTED)
    upright = ImageOps.exif_transpose(Pil.open(io.BytesIO(rotated())))
    assert difference(out, upright) < 3
    assert 0x0112 not in Pil.open(io.BytesIO(out)).getexif()


def test_convert_scales_sixteen_bits() -> None:
    levels = np.linspace(0, 65535, 96 * 64).reshape(64, 96).astype(np.uint16)
    out, image = prepare_image(b"a.png", encoded(Pil.fromarray(levels), "PNG"), rules(policy="convert", quality=95))
    assert image.flags == ImageFlag.CONVERTED
    assert np.abs(pixels(out)[..., 0] - (levels >> 8)).mean() < 2


def test_quarantine_keeps_usable_kinds_with_their_flags() -> None:
    """ImageNet has CMYK images and a PNG named .JPEG that every published run trained on."""
    for name, data, form, flags in (
        (b"a.jpg", encoded(picture().convert("CMYK")), JPEG, ImageFlag.CMYK),
        (b"a.jpg", encoded(picture(), "PNG"), PNG, ImageFlag(0)),
        (b"a.jpg", rotated(), JPEG, ImageFlag.ROTATED),
    ):
        out, image = prepare_image(name, data, rules())
        assert out is data
        assert (image.format, image.flags) == (form, flags)


def test_resize_reduces_the_short_side_and_never_enlarges() -> None:
    out, image = prepare_image(b"a.jpg", encoded(picture((300, 200))), rules(resize_short=50))
    assert image == ImageHeader(JPEG, 50, 75, ImageFlag.RESIZED)
    assert difference(out, picture((75, 50))) < 4
    gray, image = prepare_image(b"a.jpg", encoded(picture((300, 200)).convert("L")), rules(resize_short=50))
    assert image.flags == ImageFlag.RESIZED | ImageFlag.GRAY
    assert Pil.open(io.BytesIO(gray)).mode == "L"
    small = encoded(picture((40, 30)))
    assert prepare_image(b"a.jpg", small, rules(resize_short=50))[0] is small


def test_quality_is_that_of_the_document() -> None:
    data = encoded(picture((300, 200)))
    sizes = [len(prepare_image(b"a.jpg", data, rules(resize_short=100, quality=q))[0]) for q in (30, 60, 95)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[2]


def test_what_is_broken_is_not_converted() -> None:
    for data in (encoded(picture())[:-200], encoded(picture(), "GIF")[:200], b"", b"hello"):
        with pytest.raises(InvalidImage):
            prepare_image(b"a.jpg", data, rules(policy="convert"))


def test_a_bomb_of_a_convertible_kind_is_not_decoded() -> None:
    data = encoded(Pil.new("P", (9000, 9000)), "GIF")
    with pytest.raises(InvalidImage, match="too_many_pixels"):
        prepare_image(b"a.gif", data, rules(policy="convert"))
