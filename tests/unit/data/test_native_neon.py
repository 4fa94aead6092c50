"""Kernels for ARM: under an emulator, the pixels and the refusals of this machine's kernels."""

import io
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pytest
from PIL import Image

from podscale.data.crop import CropParams
from podscale.data.decode import Pixels
from podscale.data.native import CropDecoder
from tests.support.jpeg_crops import (
    SAMPLINGS,
    SHAPES,
    as_record,
    batch_of,
    damage,
    encoded,
    extreme_blocks,
    long_codes,
    photographs,
    random_crops,
)
from tests.support.loading import needs_native

pytestmark = [needs_native, pytest.mark.slow]

NATIVE = Path(__file__).resolve().parents[3] / "native"
TARGET = "aarch64-unknown-linux-musl"
EMULATOR = "qemu-aarch64"
SIZE = 24
WAYS = 3
"""Results of an image: without a decode index, with one, and from packed coefficients."""


class Case(NamedTuple):
    """A crop of a file, whose image has `shape`."""

    file: Pixels
    shape: tuple[int, int]
    crop: CropParams
    interpolation: Literal["bilinear", "bicubic"]


@pytest.fixture(scope="module")
def program() -> Path:
    """Build native/examples/crops.rs for ARM."""
    if shutil.which(EMULATOR) is None:
        pytest.skip(f"{EMULATOR} is not on the PATH (qemu-user)")
    if shutil.which("rustc") is None:
        pytest.skip("no Rust here")
    libraries = subprocess.run(
        ["rustc", "--print", "target-libdir", "--target", TARGET], capture_output=True, text=True, check=True
    )
    if not Path(libraries.stdout.strip()).is_dir():
        pytest.skip(f"no Rust for {TARGET}: rustup target add {TARGET}")
    options = ["--release", "--no-default-features", "--locked", "--example", "crops", "--target", TARGET]
    subprocess.run(["cargo", "build", "--quiet", *options], cwd=NATIVE, check=True)
    return NATIVE / "target" / TARGET / "release/examples/crops"


def emulated(program: Path, cases: list[Case], *arguments: str) -> tuple[str, list[bytes | int]]:
    """Return the version of the kernels, and the pixels or the refusal of each case and way."""
    stream = b"".join(
        np.array(
            [
                *case.shape,
                *case.crop[:-1],
                case.crop.flip | (case.interpolation == "bicubic") << 1,
                SIZE,
                case.file.size,
            ],
            dtype="<i8",
        ).tobytes()
        + case.file.tobytes()
        for case in cases
    )
    done = subprocess.run([EMULATOR, program, *arguments], input=stream, capture_output=True, check=True)
    return done.stderr.decode().strip(), list(results(done.stdout))


def results(output: bytes) -> Iterator[bytes | int]:
    at = 0
    while at < len(output):
        status, at = output[at], at + 1
        if status:
            yield status
        else:
            yield output[at : at + 3 * SIZE * SIZE]
            at += 3 * SIZE * SIZE


def here(cases: list[Case]) -> list[bytes | int]:
    """Return the pixels or the refusal of each case by this machine's extension, whose pixels are Pillow's."""
    decoder, found = CropDecoder(1, order="fewest values first"), list[bytes | int]()
    for case in cases:
        images = np.empty((1, SIZE, SIZE, 3), np.uint8)
        height, width = np.full(1, case.shape[0]), np.full(1, case.shape[1])
        [status] = decoder.decode([case.file], height, width, batch_of([case.crop]), images, case.interpolation)
        found.append(int(status) or images.tobytes())
    return found


def check(program: Path, cases: list[Case], ways: int = WAYS) -> int:
    """Compare the first `ways` of both versions with this machine's, and the others with each other.

    Returns how many of the cases are refused.
    """
    wanted = here(cases)
    neon, portable = emulated(program, cases), emulated(program, cases, "portable")
    assert (neon[0], portable[0]) == ("neon", "portable")
    assert neon[1] == portable[1]
    assert len(neon[1]) == WAYS * len(cases)
    for number, (case, want) in enumerate(zip(cases, wanted, strict=True)):
        assert neon[1][WAYS * number :][:ways] == [want] * ways, case
    return sum(isinstance(want, int) for want in wanted)


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_crops_are_those_of_this_machine(program: Path, kind: str) -> None:
    generator = np.random.default_rng(1)
    cases = [
        Case(as_record(encoded(kind, *shape)), shape, crop, interpolation)
        for shape in SHAPES
        for crop in random_crops(generator, *shape, SIZE)
        for interpolation in ("bilinear", "bicubic")
    ]
    assert check(program, cases) == 0


def test_extreme_blocks(program: Path) -> None:
    """Their coefficients reach the limits of the words in which kernels compute."""
    generator, crop = np.random.default_rng(3), CropParams(3, 2, 50, 37, SIZE, SIZE, 0, 0, False)
    files = [as_record(extreme_blocks(generator, 40, 56, attempt)) for attempt in range(60)]
    files += [as_record(long_codes(generator, 40, 56)) for _ in range(6)]
    assert 5 < check(program, [Case(file, (40, 56), crop, "bilinear") for file in files]) < 30


@pytest.mark.parametrize("kind", ["gray", "4:2:0", "restart in rows"])
def test_damaged_files(program: Path, kind: str) -> None:
    """Files that are cut or changed; what this machine refuses is refused."""
    good, generator = as_record(encoded(kind, 60, 70)), np.random.default_rng(4)
    crop = CropParams(0, 0, 70, 30, SIZE, SIZE, 0, 0, True)
    files = [damage(generator, good, attempt) for attempt in range(300)]
    files += [np.append(good[:length], as_record(b"\xff\xd9")) for length in range(0, good.size, 7)]
    # Packed coefficients need the whole file, the crop only its upper half.
    refused = check(program, [Case(file, (60, 70), crop, "bilinear") for file in files], ways=WAYS - 1)
    assert 0 < refused < len(files)


@pytest.mark.parametrize(("archive", "every"), [("imagenet-500.tar", 20), ("imagenette224.tar", 400)])
def test_photographs(program: Path, archive: str, every: int, real_data: Path) -> None:
    generator, cases = np.random.default_rng(6), list[Case]()
    for data in photographs(real_data / archive, every):
        with Image.open(io.BytesIO(data)) as image:
            shape = image.height, image.width
        crops = random_crops(generator, *shape, SIZE)[5:12]
        cases += [Case(as_record(data), shape, crop, "bicubic" if crop.flip else "bilinear") for crop in crops]
    assert check(program, cases) <= len(cases) // 10
