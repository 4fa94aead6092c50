"""Other readers of our shards: DALI's readers.webdataset with our index files, the webdataset library, GNU tar."""

import io
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from podscale.config.data import DataSection
from podscale.data.shard_set import ShardSet, Split
from podscale.data.sharding.build_shard_set import build_shard_set


@pytest.fixture(scope="module")
def shard_set(tmp_path_factory: pytest.TempPathFactory) -> ShardSet:
    """Shard set of JPEG and PNG images in several shards."""
    root = tmp_path_factory.mktemp("readers")
    for number in range(60):
        path = root / "images" / "abc"[number % 3] / f"{number}.{'png' if number % 5 == 0 else 'jpg'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (40, 50, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    data = DataSection(source=str(root / "images"), shard_bytes=50_000)
    build_shard_set(data, root / "set", workers=1)
    return ShardSet.open(root / "set")


def expected(split: Split) -> list[tuple[bytes, int]]:
    return [(split.read(i).tobytes(), int(split.labels[i])) for i in range(len(split))]


def tars(split: Split) -> list[Path]:
    assert len(split.shard_names) > 1
    return [split.directory / name for name in split.shard_names]


def test_webdataset_reads_the_tars(shard_set: ShardSet) -> None:
    webdataset = pytest.importorskip("webdataset")
    split = shard_set.split("train")
    stream = webdataset.WebDataset([str(path) for path in tars(split)], shardshuffle=False)
    samples = list(stream)
    assert [(sample.get("jpg") or sample.get("png"), int(sample["cls"])) for sample in samples] == expected(split)
    assert [int(sample["__key__"]) for sample in samples] == split.keys.tolist()


def test_dali_reads_tars_and_index_files(shard_set: ShardSet) -> None:
    pytest.importorskip("nvidia.dali", reason="DALI is not installed (Linux on x86-64 only)")
    from nvidia.dali import fn, pipeline_def

    split = shard_set.split("train")

    @pipeline_def(batch_size=4, num_threads=1, device_id=None)
    def pipeline():  # type: ignore[no-untyped-def]
        return tuple(
            fn.readers.webdataset(
                paths=[str(path) for path in tars(split)],
                index_paths=[str(path.with_suffix(".idx")) for path in tars(split)],
                ext=["jpg;png", "cls"],
                missing_component_behavior="error",
            )
        )

    reader = pipeline()
    reader.build()
    samples: list[tuple[bytes, int]] = []
    while len(samples) < len(split):
        images, labels = reader.run()
        for i in range(len(images)):
            samples.append((images.at(i).tobytes(), int(labels.at(i).tobytes())))
    assert samples[: len(split)] == expected(split)


def test_our_index_files_are_those_of_dalis_tool(shard_set: ShardSet, tmp_path: Path) -> None:
    pytest.importorskip("wds2idx", reason="DALI is not installed (Linux on x86-64 only)")
    if shutil.which("tar") is None:
        pytest.skip("wds2idx needs GNU tar")
    for path in tars(shard_set.split("train")):
        subprocess.run(
            [sys.executable, "-m", "wds2idx", str(path), str(tmp_path / "own.idx")], check=True, capture_output=True
        )
        assert path.with_suffix(".idx").read_text() == (tmp_path / "own.idx").read_text()


def test_a_shard_set_is_a_source_too(shard_set: ShardSet, tmp_path: Path) -> None:
    """Its tars are in WebDataset form: sharding them again gives the same images and labels."""
    build_shard_set(DataSection(source=str(shard_set.directory), format="tar"), tmp_path / "again", workers=1)
    again = ShardSet.open(tmp_path / "again")
    for name in ("train", "validation"):
        assert sorted(expected(again.split(name))) == sorted(expected(shard_set.split(name)))


def test_images_decode_as_their_format_says(shard_set: ShardSet) -> None:
    split = shard_set.split("validation")
    for i in range(len(split)):
        picture = Image.open(io.BytesIO(split.read(i).tobytes()))
        assert {"JPEG": 1, "PNG": 2}[str(picture.format)] == split.column("format")[i]
