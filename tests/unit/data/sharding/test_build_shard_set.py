"""Building: the same bytes from any number of workers and pods, also if resumed or repaired; bad input is refused."""

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from PIL import Image

from podscale.config.data import DataSection
from podscale.data.index import ImageFlag
from podscale.data.manifest import MANIFEST_FILE, ShardPart
from podscale.data.shard_set import ShardSet
from podscale.data.sharding.build_shard_set import BuildResult, build_shard_set
from podscale.data.sources import SourceMissing
from podscale.util.progress_reports import ProgressUpdate
from tests.support.refusals import refused


def picture(seed: int, form: str = "JPEG", mode: str = "RGB") -> bytes:
    noise = np.random.default_rng(seed).integers(0, 256, (8, 10, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(noise).resize((60, 48)).convert(mode).save(out, form)
    return out.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make train/ and val/ of two classes, 30 + 10 images."""
    for seed in range(40):
        split, label = "val" if seed % 4 == 0 else "train", ("cat", "dog")[seed // 4 % 2]
        path = tmp_path / "images" / split / label / f"{seed:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(seed))
    return tmp_path / "images"


def section(folder: Path, **options: Any) -> DataSection:
    return DataSection(**{"source": str(folder), "shard_bytes": 16384, "max_reject_rate": 0.2, **options})


def build(folder: Path, out: Path, *, workers: int = 1, index: int = 0, of: int = 1, **options: Any) -> BuildResult:
    return build_shard_set(section(folder, **options), out, ShardPart(index, of), workers=workers)


def tree(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def rejects(out: Path) -> dict[str, str]:
    return {
        entry["source"].rpartition("/")[2]: entry["reason"]
        for entry in map(json.loads, (out / "rejects.jsonl").read_text().splitlines())
    }


def test_a_set_holds_every_image_with_its_label(folder: Path, tmp_path: Path) -> None:
    result = build(folder, tmp_path / "set")
    opened = ShardSet.open(tmp_path / "set")
    assert opened.classes == ["cat", "dog"]
    assert result.manifest == opened.manifest
    assert not result.reused
    images = {}
    for name, directory in (("train", "train"), ("validation", "val")):
        split = opened.split(name)
        for i in range(len(split)):
            source = split.source(i).decode()
            images[source] = split.read(i).tobytes()
            assert source.startswith(f"{directory}/{opened.classes[split.labels[i]]}/")
            assert (split.column("height")[i], split.column("width")[i]) == (48, 60)
    assert images == {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.jpg")}
    assert opened.manifest.splits["train"].class_counts == (15, 15)
    assert len(opened.manifest.splits["train"].shards) > 2


def test_tars_are_plain_and_named_by_key(folder: Path, tmp_path: Path) -> None:
    build(folder, tmp_path / "set")
    names = []
    for path in sorted((tmp_path / "set" / "train").glob("*.tar")):
        with tarfile.open(path) as archive:
            for info in archive:
                names.append(info.name)
                assert (info.mode, info.uid, info.gid, info.mtime, info.isreg()) == (0o644, 0, 0, 0, True)
    assert names == [f"{key:08d}.{ending}" for key in range(30) for ending in ("jpg", "cls")]


def test_workers_and_pods_do_not_change_a_byte(folder: Path, tmp_path: Path) -> None:
    build(folder, tmp_path / "one")
    expected = tree(tmp_path / "one")
    for path in folder.rglob("*.jpg"):
        path.touch()  # a newer file time is no change
    finished = [build(folder, tmp_path / "pods", index=i, of=3) for i in (2, 0, 1)]
    assert [result.complete_manifest is not None for result in finished] == [False, False, True]
    assert tree(tmp_path / "pods") == expected


def test_packing_processes_write_the_same_bytes(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(folder, tmp_path / "one")
    monkeypatch.setattr("podscale.data.sharding.pack.SERIAL_PACK_BYTES", 0)
    updates: list[ProgressUpdate] = []
    build_shard_set(section(folder), tmp_path / "two", workers=2, progress=updates.append)
    assert tree(tmp_path / "two") == tree(tmp_path / "one")
    assert [(u.images, u.total) for u in updates if u.stage == "pack" and u.done] == [(40, 40)]


def test_a_complete_set_is_reused_untouched(folder: Path, tmp_path: Path) -> None:
    first = build(folder, tmp_path / "set")
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "set").rglob("*")}
    again = build(folder, tmp_path / "set")
    assert again.reused
    assert (again.manifest, again.packed_shards) == (first.manifest, 0)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "set").rglob("*")} == times


def test_only_missing_shards_are_packed(folder: Path, tmp_path: Path) -> None:
    build(folder, tmp_path / "set")
    expected = tree(tmp_path / "set")
    (tmp_path / "set" / MANIFEST_FILE).unlink()
    victims = sorted((tmp_path / "set" / "train").glob("*.tar"))[:2]
    victims[0].unlink()
    victims[1].write_bytes(victims[1].read_bytes()[:-512])
    (victims[0].parent / ".shard-00000-of-00009.tar.77.tmp").write_bytes(b"left by a dead packer")
    result = build(folder, tmp_path / "set")
    assert (result.packed_shards, result.existing_shards) == (2, len(list((tmp_path / "set").rglob("*.tar"))) - 2)
    assert tree(tmp_path / "set") == expected


def test_verify_finds_and_mends_a_damaged_shard(folder: Path, tmp_path: Path) -> None:
    build(folder, tmp_path / "set")
    expected = tree(tmp_path / "set")
    shard = next((tmp_path / "set" / "train").glob("*.tar"))
    content = bytearray(shard.read_bytes())
    content[1000] ^= 1
    shard.write_bytes(content)
    assert build(folder, tmp_path / "set").reused  # the size is right: only reading finds it
    result = build_shard_set(section(folder), tmp_path / "set", workers=1, verify=True)
    assert (result.reused, result.packed_shards) == (False, 1)
    assert tree(tmp_path / "set") == expected
    assert build_shard_set(section(folder), tmp_path / "set", workers=1, verify=True).reused


def test_a_changed_source_is_noticed(folder: Path, tmp_path: Path) -> None:
    build(folder, tmp_path / "set")
    before = tree(tmp_path / "set")
    (folder / "train" / "cat" / "new.jpg").write_bytes(picture(99))
    with refused("1 added", "train/cat/new.jpg", field="data.source", got=str(folder)):
        build(folder, tmp_path / "set")
    assert tree(tmp_path / "set") == before


def test_a_removed_source_leaves_a_complete_set_usable(folder: Path, tmp_path: Path) -> None:
    build(folder, tmp_path / "set")
    folder.rename(tmp_path / "elsewhere")
    result = build(folder, tmp_path / "set")
    assert result.reused
    assert " data.source: " in result.messages[0]
    assert f"(got {str(folder)!r})" in result.messages[0]
    with refused(field="data.source", got=str(folder), kind=SourceMissing):
        build(folder, tmp_path / "other")


def test_a_source_that_changed_before_the_end_starts_over(folder: Path, tmp_path: Path) -> None:
    build(folder, tmp_path / "set", index=0, of=2)
    (folder / "train" / "cat" / "new.jpg").write_bytes(picture(99))
    build(folder, tmp_path / "set")
    build(folder, tmp_path / "fresh")
    assert tree(tmp_path / "set") == tree(tmp_path / "fresh")


def test_a_directory_of_another_data_section_is_refused(folder: Path, tmp_path: Path) -> None:
    build(folder, tmp_path / "set")
    with refused(field=tmp_path / "set"):
        build(folder, tmp_path / "set", quality=50)


BAD = {
    "empty.jpg": (b"", "empty"),
    "truncated.jpg": (picture(1)[:-300], "corrupt"),
    "page.jpg": (b"<html>404</html>", "not_an_image"),
    "gif.jpg": (picture(2, "GIF"), "unusable_format"),
}


def test_unusable_images_are_quarantined(folder: Path, tmp_path: Path) -> None:
    for name, (content, _) in BAD.items():
        (folder / "train" / "cat" / name).write_bytes(content)
    (folder / "train" / "cat" / "dangling.jpg").symlink_to("nowhere")
    (folder / "train" / "dog" / "folder.jpg").mkdir()
    (folder / "train" / "dog" / "large.jpg").write_bytes(picture(3) + bytes(5000))
    result = build(folder, tmp_path / "set", max_bytes=5000)
    expected = {name: reason for name, (_, reason) in BAD.items()}
    expected |= {"dangling.jpg": "unreadable", "folder.jpg": "unreadable", "large.jpg": "too_many_bytes"}
    assert rejects(tmp_path / "set") == expected
    assert result.manifest.rejects == {r: list(expected.values()).count(r) for r in sorted(set(expected.values()))}
    assert result.manifest.count == 40
    assert build(folder, tmp_path / "set", max_bytes=5000).reused


def test_policy_fail_names_the_image_and_leaves_no_set(folder: Path, tmp_path: Path) -> None:
    (folder / "train" / "cat" / "bad.jpg").write_bytes(picture(1)[:-300])
    with refused("train/cat/bad.jpg", "corrupt", "data.policy", field="data.source", got=str(folder)):
        build(folder, tmp_path / "set", policy="fail")
    assert not (tmp_path / "set" / MANIFEST_FILE).exists()
    assert not list((tmp_path / "set").rglob("*.tmp"))


def test_policy_convert_saves_what_can_be_saved(folder: Path, tmp_path: Path) -> None:
    for name, (content, _) in BAD.items():
        (folder / "train" / "cat" / name).write_bytes(content)
    (folder / "train" / "cat" / "png.jpg").write_bytes(picture(5, "PNG"))
    (folder / "train" / "cat" / "cmyk.jpg").write_bytes(picture(6, mode="CMYK"))
    build(folder, tmp_path / "set", policy="convert")
    assert set(rejects(tmp_path / "set")) == {"empty.jpg", "truncated.jpg", "page.jpg"}
    split = ShardSet.open(tmp_path / "set").split("train")
    converted = {
        split.source(i).rpartition(b"/")[2].decode(): split.read(i).tobytes()
        for i in range(len(split))
        if split.column("flags")[i] & ImageFlag.CONVERTED
    }
    assert set(converted) == {"gif.jpg", "png.jpg", "cmyk.jpg"}
    assert all(Image.open(io.BytesIO(data)).mode == "RGB" for data in converted.values())


@pytest.mark.parametrize("rate", [0.0, 0.02])
def test_too_many_rejects_fail_with_a_list(folder: Path, tmp_path: Path, rate: float) -> None:
    (folder / "train" / "cat" / "a.jpg").write_bytes(b"")
    (folder / "val" / "cat" / "b.jpg").write_bytes(picture(1)[:-300])
    with refused("of 42 images", "rejects.jsonl", field="data.max_reject_rate", got=rate):
        build(folder, tmp_path / "set", max_reject_rate=rate)
    assert rejects(tmp_path / "set")
    assert not (tmp_path / "set" / MANIFEST_FILE).exists()


class Flaky(MemoryFileSystem):  # type: ignore[misc]
    """Store that lists everything and, while it is down, fails to read one image."""

    protocol = "flaky"
    store: ClassVar[dict[str, Any]] = {}  # MemoryFileSystem's own is shared by the whole process
    pseudo_dirs: ClassVar[list[str]] = [""]
    down = True

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("flaky:/")))

    def cat_file(self, path: str, *arguments: Any, **options: Any) -> bytes:
        if self.down and path.endswith("003.jpg"):
            raise TimeoutError("no answer")
        return bytes(super().cat_file(path, *arguments, **options))


def test_an_unreadable_image_is_tried_again(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejects of an outage must not remain after the store has recovered."""
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    for path in folder.rglob("*.jpg"):
        Flaky().pipe_file(f"/images/{path.relative_to(folder)}", path.read_bytes())
    data = DataSection(source="flaky://images", shard_bytes=16384, max_reject_rate=0)
    with refused("1 unreadable", field="data.max_reject_rate"):
        build_shard_set(data, tmp_path / "set", workers=1)
    monkeypatch.setattr(Flaky, "down", False)
    result = build_shard_set(data, tmp_path / "set", workers=1)
    assert result.manifest.count == 40
    assert not rejects(tmp_path / "set")


def test_a_class_that_loses_all_its_images_is_an_error(folder: Path, tmp_path: Path) -> None:
    for path in (folder / "val" / "dog").iterdir():
        path.write_bytes(b"broken")
    with refused("'dog'", "validation", field="data.source", got=str(folder)):
        build(folder, tmp_path / "set", max_reject_rate=0.5)


@pytest.fixture
def twins(folder: Path) -> Path:
    """Make three pairs of duplicates: one inside train, one across splits, one across splits with another label."""
    cat = sorted((folder / "train" / "cat").iterdir())
    (folder / "train" / "cat" / "twin.jpg").write_bytes(cat[0].read_bytes())
    (folder / "val" / "cat" / "crossing.jpg").write_bytes(cat[1].read_bytes())
    (folder / "val" / "dog" / "conflict.jpg").write_bytes(cat[2].read_bytes())
    return folder


def duplicates(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "duplicates.jsonl").read_text().splitlines()]


def test_duplicates_are_reported(twins: Path, tmp_path: Path) -> None:
    result = build(twins, tmp_path / "set")
    assert result.manifest.duplicates == {"inside": 1, "across": 2, "conflicting": 1, "dropped": 0}
    assert result.manifest.count == 43
    listed = duplicates(tmp_path / "set")
    assert len(listed) == 3
    (conflict,) = [group for group in listed if group["conflicting"]]
    assert {(image["split"], image["class"]) for image in conflict["images"]} == {
        ("validation", "dog"),
        ("train", "cat"),
    }


def test_duplicates_are_dropped_by_flag(twins: Path, tmp_path: Path) -> None:
    reported = build(twins, tmp_path / "reported").manifest
    result = build(twins, tmp_path / "set", dedup="drop")
    assert result.manifest.duplicates["dropped"] == 3
    assert [s.sha256 for s in result.manifest.splits["train"].shards] == [
        s.sha256 for s in reported.splits["train"].shards
    ]
    opened = ShardSet.open(tmp_path / "set")
    # of a pair across splits the validation image is kept: it must not have been trained on
    assert (len(opened.split("train")), len(opened.split("validation"))) == (28, 12)
    sources = [opened.split("train").source(i) for i in range(28)]
    records = {opened.split("train").read(i).tobytes() for i in range(28)}
    assert len(records) == len(set(sources)) == 28
    assert not records & {opened.split("validation").read(i).tobytes() for i in range(12)}


def test_duplicates_can_fail_the_build(twins: Path, tmp_path: Path) -> None:
    with refused("3 groups", "data.dedup", field="data.source", got=str(twins)):
        build(twins, tmp_path / "set", dedup="fail")
    assert not (tmp_path / "set" / MANIFEST_FILE).exists()


def test_reencoding_is_recorded(folder: Path, tmp_path: Path) -> None:
    result = build(folder, tmp_path / "set", resize_short=16, quality=70)
    split = ShardSet.open(tmp_path / "set").split("train")
    assert (split.column("height") == 16).all()
    assert (split.column("flags") & ImageFlag.RESIZED).all()
    assert (result.manifest.options["resize_short"], result.manifest.options["quality"]) == (16, 70)


def test_an_image_that_changes_while_packing_stops_it(folder: Path, tmp_path: Path) -> None:
    from podscale.data.sharding.pack import Packer, PackTask
    from podscale.data.sharding.shard_plan import plan_shards
    from podscale.data.sharding.validate_image import ImageRules
    from podscale.data.sources import open_source

    data = section(folder)
    source = open_source(data)
    plan = plan_shards(source, data)
    for path in folder.rglob("*.jpg"):
        path.write_bytes(path.read_bytes() + b"more")
    for name in ("train", "records/train"):
        (tmp_path / "set" / name).mkdir(parents=True)
    with refused(".jpg: changed", field="data.source", got=str(folder)):
        Packer(tmp_path / "set", data, ImageRules.from_section(data)).pack(
            plan, source, PackTask("train", 0), lambda progress: None
        )
    assert not [path for path in (tmp_path / "set").rglob("*") if path.is_file()]


@pytest.mark.parametrize("content", [{}, {"train/cat/1.txt": b""}])
def test_an_empty_folder(tmp_path: Path, content: dict[str, bytes]) -> None:
    (tmp_path / "images" / "train" / "cat").mkdir(parents=True)
    for name, data in content.items():
        (tmp_path / "images" / name).write_bytes(data)
    with refused(field="data.source", got=str(tmp_path / "images")):
        build(tmp_path / "images", tmp_path / "set")


def test_file_names_of_any_bytes_survive(folder: Path, tmp_path: Path) -> None:
    names = [b"new\nline.jpg", b"\xff\xfe.jpg"]
    for number, name in enumerate(names):
        with open(bytes(folder / "train" / "cat") + b"/" + name, "wb") as file:  # noqa: PTH123
            file.write(picture(100 + number))
    (folder / "train" / "cat" / "bad\n.jpg").write_bytes(b"")
    build(folder, tmp_path / "set")
    split = ShardSet.open(tmp_path / "set").split("train")
    assert {b"train/cat/" + name for name in names} <= {split.source(i) for i in range(len(split))}
    assert rejects(tmp_path / "set") == {"bad\n.jpg": "empty"}
