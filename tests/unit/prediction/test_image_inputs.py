"""Images of folders, tars, shard sets and lists: all of them once, in order, each with its bytes."""

import io
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from podscale.config import RunConfig
from podscale.errors import InputError
from podscale.prediction.image_inputs import (
    UNREADABLE,
    ImageItem,
    TooLarge,
    iter_items,
    open_inputs,
    standard_input_lines,
)
from tests.conftest import MakeShardSet
from tests.support.prediction import photograph, write_photographs, write_tar
from tests.support.shard_set import Sample

CONFIG = RunConfig()
MANY = 2**30


def items_of(*locations: object, lines: tuple[str, ...] = ()) -> list[ImageItem]:
    return list(iter_items(open_inputs([str(location) for location in locations], CONFIG, lines)))


def contents_of(*locations: object, lines: tuple[str, ...] = ()) -> list[bytes]:
    inputs = open_inputs([str(location) for location in locations], CONFIG, lines)
    return [bytes(inputs[item.source].read(item, MANY).data) for item in iter_items(inputs)]


def test_a_folder_is_listed_by_name_with_its_tars(tmp_path: Path) -> None:
    paths = write_photographs(tmp_path / "photos", 4)
    (tmp_path / "photos" / "a" / ".hidden.jpg").write_bytes(b"x")
    (tmp_path / "photos" / "a" / "notes.txt").write_bytes(b"x")
    write_tar(tmp_path / "photos" / "aa.tar", {"z.jpg": b"z", "k.cls": b"1", "y.png": b"y"})
    tar = tmp_path / "photos" / "aa.tar"
    expected = [str(paths[0]), str(paths[1]), f"{tar}!z.jpg", f"{tar}!y.png", str(paths[2]), str(paths[3])]
    assert [item.name for item in items_of(f"{tmp_path}/photos/")] == expected
    contents = contents_of(tmp_path / "photos")
    assert contents == [paths[0].read_bytes(), paths[1].read_bytes(), b"z", b"y", *(p.read_bytes() for p in paths[2:])]


def test_a_named_file_is_an_image_whatever_its_name(tmp_path: Path) -> None:
    (tmp_path / "picture").write_bytes(b"content")
    assert contents_of(tmp_path / "picture", tmp_path / "picture") == [b"content"] * 2


def test_a_shard_set_has_its_records_and_labels(make_shard_set: MakeShardSet) -> None:
    images = [photograph(seed) for seed in range(4)]
    splits = {"train": [Sample(images[0], 1)], "validation": [Sample(image, 0) for image in images[1:]]}
    shards = make_shard_set(splits, classes=["ant", "bee"])
    whole = items_of(shards)
    assert [item.label for item in whole] == ["bee", "ant", "ant", "ant"]
    assert [item.name for item in items_of(shards / "validation")] == [item.name for item in whole[1:]]
    assert contents_of(shards / "validation") == images[1:]
    assert [item.name for item in items_of(f"{shards}/validation/")] == [item.name for item in whole[1:]]
    (opened,) = open_inputs([str(shards)], CONFIG)
    assert opened.count == 4
    image = pickle.loads(pickle.dumps(opened)).read(whole[0], MANY)
    assert image.shape == (60, 80)
    assert np.asarray(image.data).tobytes() == images[0]


def test_labels_are_fit_for_any_output(make_shard_set: MakeShardSet) -> None:
    """So are the class names of a model, which labels are compared to."""
    shards = make_shard_set({"train": [Sample(photograph(0), 0)]}, classes=["a\x07nt"])
    assert [item.label for item in items_of(shards)] == ["a\\x07nt"]


def test_folders_named_like_those_of_a_split_are_folders(tmp_path: Path) -> None:
    for name in ("index", "sources"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.jpg").write_bytes(name.encode())
    assert contents_of(tmp_path) == [b"index", b"sources"]


def test_names_of_other_encodings_are_read_and_shown_as_escapes(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    folder.mkdir()
    (folder / "x.jpg").write_bytes(b"content")
    write_tar(folder / "x.tar", {"y.jpg": b"y"})
    inputs, lines = (folder, folder / "x.jpg", "-"), (f"{folder}/x.jpg\n",)
    assert contents_of(*inputs, lines=lines) == [b"content", b"y", b"content", b"content"]
    names = [item.name.removeprefix(f"{tmp_path}/") for item in items_of(*inputs, lines=lines)]
    assert names == [r"\xff/x.jpg", r"\xff/x.tar!y.jpg", r"\xff/x.jpg", r"\xff/x.jpg"]


def test_standard_input_has_any_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff.jpg\n"), encoding="utf-8", errors="strict"))
    assert [os.fsencode(line) for line in standard_input_lines()] == [b"\xff.jpg\n"]


def test_a_list_names_files_and_urls(tmp_path: Path) -> None:
    (tmp_path / "one.jpg").write_bytes(b"1")
    lines = (f"{tmp_path}/one.jpg\n", "\n", f"file://{tmp_path}/one.jpg\r\n", f"{tmp_path}/gone.jpg\n")
    (source,) = open_inputs(["-"], CONFIG, lines)
    first, second, missing = source.items(0)
    assert [bytes(source.read(item, MANY).data) for item in (first, second)] == [b"1", b"1"]
    with pytest.raises(InputError):
        source.read(missing, MANY)


def test_a_list_is_read_only_as_far_as_it_is_needed() -> None:
    def endless():
        for number in range(10):
            assert number < 3
            yield f"{number}.jpg\n"

    items = iter_items(open_inputs(["-"], CONFIG, endless()))
    assert [next(items).name for _ in range(3)] == ["0.jpg", "1.jpg", "2.jpg"]


def test_missing_and_compressed_inputs_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").write_bytes(b"x")
    for wrong in (tmp_path / "nothing", tmp_path / "a.tar.gz", "no-such-scheme://bucket/x"):
        with pytest.raises(InputError) as refusal:
            open_inputs([str(wrong)], CONFIG)
        assert refusal.value.field == str(wrong)
    for names in ([], ["-", "-"]):
        with pytest.raises(InputError) as refusal:
            open_inputs(names, CONFIG)
        assert refusal.value.field == "IMAGES"


def test_a_truncated_tar_gives_its_images_and_one_failure(tmp_path: Path) -> None:
    whole = write_tar(tmp_path / "whole.tar", {f"{n}.jpg": photograph(n) for n in range(3)})
    cut = tmp_path / "cut.tar"
    cut.write_bytes(whole.read_bytes()[: whole.stat().st_size // 3])
    (tmp_path / "next.jpg").write_bytes(b"next")
    items = items_of(cut, tmp_path / "next.jpg")
    assert [item.name for item in items if item.failure and item.failure.reason == UNREADABLE] == [str(cut)]
    assert items[-1].name == str(tmp_path / "next.jpg")
    assert items[0].name == f"{cut}!0.jpg"


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "large.jpg").write_bytes(bytes(1000))
    for location in (str(tmp_path), "-"):
        (source,) = open_inputs([location], CONFIG, [f"{tmp_path}/large.jpg\n"])
        (item,) = source.items(0)
        with pytest.raises(TooLarge):
            source.read(item, 999)


def test_threads_read_different_tars_at_once(tmp_path: Path) -> None:
    """A storage keeps the file of byte ranges open, so threads must not share one."""
    for number in range(8):
        write_tar(tmp_path / f"{number}.tar", {f"{n}.jpg": b"%d-%d" % (number, n) * 200 for n in range(40)})
    (source,) = open_inputs([str(tmp_path)], CONFIG)
    items = sorted(source.items(0), key=lambda item: item.offset or 0)
    with ThreadPoolExecutor(8) as pool:
        contents = list(pool.map(lambda item: bytes(source.read(item, MANY).data), items))
    for item, content in zip(items, contents, strict=True):
        tar, _, member = item.name.rpartition("/")[2].partition("!")
        assert content.startswith(f"{tar.removesuffix('.tar')}-{member.removesuffix('.jpg')}".encode()), item
