"""Small models with random weights in run directories, and images of every broken kind."""

import io
import struct
import tarfile
import zlib
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from podscale.config import RunConfig, dumps, loads
from podscale.prediction.predictor import Prediction
from podscale.pytorch.models import build_model
from podscale.pytorch.models.state import model_arrays
from podscale.pytorch.train_state import as_array
from podscale.training.model_weights import TrainedModel, export_model
from podscale.training.run_progress import RunProgress
from tests.support.shard_set import encode_image, smooth_pixels

SIZE = 32
DOCUMENT = f"""
run: {{id: small, seed: 3}}
input: {{image_size: {SIZE}, interpolation: bicubic}}
model: {{name: resnet18, stem: small, width: 4}}
launch: {{processes: 1, threads: 1}}
"""
CLASSES = ["ant", "bee", "cat", "dog", "eel", "fox"]


def write_model_run(workspace: Path, document: str = DOCUMENT, classes: list[str] = CLASSES) -> RunConfig:
    """Write a run directory with a model of random weights whose classes differ clearly; return its document."""
    config = loads(document, "test", [f"run.workspace={workspace}"])
    torch.manual_seed(config.run.seed)
    model = build_model(config.model, len(classes))
    arrays = {name: as_array(tensor) for name, tensor in model_arrays(model).items()}
    head = [name for name, array in arrays.items() if array.ndim == 2][-1]
    arrays[head] = arrays[head] * 20
    run = workspace / "runs" / config.run.id
    export_model(arrays, TrainedModel(config, classes, RunProgress(step=1)), run / "model")
    (run / "config.yaml").write_text(dumps(config))
    return config


def photograph(seed: int, height: int = 60, width: int = 80) -> bytes:
    """Return a JPEG."""
    return encode_image(smooth_pixels(seed, height, width))


def write_photographs(folder: Path, count: int) -> list[Path]:
    """Write JPEGs of different sizes into two folders; return their paths in the order of a listing."""
    paths = []
    for number in range(count):
        path = folder / ("a" if number < count // 2 else "b") / f"{number:04d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(photograph(number, 40 + number % 7, 50 + number % 5))
        paths.append(path)
    return paths


def write_photo_folder(folder: Path) -> Path:
    """Write 23 photographs and all odd images into the folders a, b and odd; return the folder."""
    write_photographs(folder, 23)
    (folder / "odd").mkdir()
    for name, (content, _, _) in odd_images().items():
        (folder / "odd" / name).write_bytes(content)
    return folder


def assert_same_rows(rows: list[Prediction], others: list[Prediction]) -> None:
    """Compare rows; sums over a batch of another size may differ in their last bits."""
    assert [replace(row, probabilities=()) for row in rows] == [replace(row, probabilities=()) for row in others]
    for row, other in zip(rows, others, strict=True):
        np.testing.assert_allclose(row.probabilities, other.probabilities, rtol=1e-4, atol=1e-6)


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def png_with_size(width: int, height: int) -> bytes:
    """Return a PNG of few bytes whose header declares this size."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b""))
    chunks = (struct.pack(">I", len(c)) + kind + c + struct.pack(">I", zlib.crc32(kind + c)) for kind, c in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def animation(kind: str) -> bytes:
    """Return an animated image of three frames."""
    first, *others = (Image.fromarray(smooth_pixels(seed, 20, 20)) for seed in range(3))
    out = io.BytesIO()
    first.save(out, kind, save_all=True, append_images=others)
    return out.getvalue()


@cache
def odd_images() -> dict[str, tuple[bytes, str | None, str | None]]:
    """Return encoded images by file name, with the reason why they have no prediction, without and with conversion."""
    good, pixels = photograph(0), smooth_pixels(1, 30, 40)
    deep = encode_image((np.arange(400, dtype=np.uint16) * 160).reshape(20, 20), kind="PNG")
    declared = bytearray(good)
    frame = declared.find(b"\xff\xc0")
    declared[frame + 5 : frame + 9] = struct.pack(">HH", 65000, 65000)
    return {
        "alpha.png": (encode_image(np.dstack([pixels, pixels[..., 0]]), kind="PNG"), None, None),
        "animated.gif": (animation("GIF"), "unusable_format", None),
        "animated.png": (animation("PNG"), None, None),
        "cmyk.jpg": (encode_image(np.dstack([pixels, pixels[..., 0]])), None, None),
        "cut.jpg": (good[: len(good) // 2], "corrupt", "corrupt"),
        "cut.png": (encode_image(pixels, kind="PNG")[:200], "corrupt", "corrupt"),
        "deep.png": (deep, "unusable_depth", None),
        "empty.jpg": (b"", "empty", "empty"),
        "good.jpg": (good, None, None),
        "huge.jpg": (bytes(declared), "too_many_pixels", "too_many_pixels"),
        "huge.png": (png_with_size(60000, 60000), "too_many_pixels", "too_many_pixels"),
        "one.png": (encode_image(pixels[:1, :1], kind="PNG"), None, None),
        "text.png": (b"no image at all", "not_an_image", "not_an_image"),
    }
