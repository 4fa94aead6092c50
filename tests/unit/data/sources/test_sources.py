"""Sources: the listing of each layout, the bytes of each image, and refused layouts."""

import hashlib
import io
import os
import pickle
import tarfile
from pathlib import Path

import fsspec
import numpy as np
import pytest
from PIL import Image

from podscale.config.data import DataSection
from podscale.data.sources import SourceItem, SourceMissing, digits, open_source
from podscale.errors import ABSENT
from tests.support.refusals import refused


def write(root: Path, *names: str) -> dict[str, bytes]:
    """Write files whose content is their own name, because sources do not decode images."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())
    return {name: name.encode() for name in names}


def listed(source: Path | str, form: str = "auto") -> dict[str, tuple[str, str]]:
    """Return {name: (class, split)}, after reading every image and comparing its size."""
    opened = pickle.loads(pickle.dumps(open_source(DataSection(source=str(source), format=form))))
    found = {}
    for item in opened.items():
        assert len(opened.read(item)) == item.size
        found[os.fsdecode(item.name)] = (item.label, item.split)
    return found


@pytest.mark.parametrize("name", ["folder", "t.csv", "images.tar"])
def test_short_reads_are_continued(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As network file systems may; `listed` compares the bytes with the size."""
    images = write(tmp_path / "folder", *(f"{label}/{label}.jpg" for label in ("cat", "dog")))
    (tmp_path / "t.csv").write_text("".join(f"folder/{image},{image[:3]}\n" for image in images))
    make_tar(tmp_path / "images.tar", images)
    read, pread = os.read, os.pread
    monkeypatch.setattr(os, "read", lambda file, size: read(file, min(size, 3)))
    monkeypatch.setattr(os, "pread", lambda file, size, offset: pread(file, min(size, 3), offset))
    assert sorted(label for label, _ in listed(tmp_path / name).values()) == ["cat", "dog"]


def make_tar(path: Path, members: dict[str, bytes], form: int = tarfile.USTAR_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


TREE = ("train/cat/1.jpg", "train/cat/deep/2.JPEG", "train/dog/3.png", "val/cat/4.jpg", "val/dog/5.webp")
PLACES = [("cat", "train"), ("cat", "train"), ("dog", "train"), ("cat", "validation"), ("dog", "validation")]


class TestImageFolder:
    def test_train_and_val(self, tmp_path: Path) -> None:
        write(tmp_path, *TREE, "train/cat/notes.txt", "train/.hidden/x.jpg", "val/dog/._5.jpg", "README.md")
        assert listed(tmp_path) == dict(zip(TREE, PLACES, strict=True))

    @pytest.mark.parametrize("top", ["", "a/b/"])
    def test_one_tree(self, tmp_path: Path, top: str) -> None:
        write(tmp_path, top + "cat/1.jpg", top + "cat/x/2.jpg", top + "train/3.jpg")  # train is a class here
        found = listed(tmp_path)
        assert sorted(found.values()) == [("cat", ""), ("cat", ""), ("train", "")]

    def test_test_folders_are_left_out(self, tmp_path: Path) -> None:
        write(tmp_path, *TREE, "test/cat/9.jpg")
        assert sorted(listed(tmp_path)) == sorted(TREE)

    def test_strange_names(self, tmp_path: Path) -> None:
        names = [b"cat/new\nline.jpg", b"cat/\xff\xfe.jpg", b"c\xe9/\xc3\xa9.jpg", b"cat/a\tb.jpg"]
        for name in names:
            path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"x")
        source = open_source(DataSection(source=str(tmp_path)))
        items = list(source.items())
        assert sorted(item.name for item in items) == sorted(names)
        assert {item.label for item in items} == {"cat", "c\\xe9"}
        assert all(source.read(item) == b"x" for item in items)

    def test_links_are_followed_and_loops_refused(self, tmp_path: Path) -> None:
        write(tmp_path / "elsewhere", "1.jpg")
        write(tmp_path / "set", "cat/1.jpg")
        (tmp_path / "set" / "dog").symlink_to(tmp_path / "elsewhere")
        assert listed(tmp_path / "set") == {"cat/1.jpg": ("cat", ""), "dog/1.jpg": ("dog", "")}
        (tmp_path / "set" / "dog" / "up").symlink_to(tmp_path / "set")
        with refused("dog/up", field="data.source", got=str(tmp_path / "set")):
            listed(tmp_path / "set")

    def test_an_unreadable_image_is_listed_and_fails_alone(self, tmp_path: Path) -> None:
        write(tmp_path, "cat/1.jpg", "dog/1.jpg")
        (tmp_path / "cat" / "gone.jpg").symlink_to("nowhere")
        (tmp_path / "cat" / "self.jpg").symlink_to("self.jpg")
        (tmp_path / "cat" / "folder.jpg").mkdir()
        source = open_source(DataSection(source=str(tmp_path)))
        sizes = {item.name: item.size for item in source.items()}
        assert sizes[b"cat/gone.jpg"] == sizes[b"cat/self.jpg"] == sizes[b"cat/folder.jpg"] == 0
        for name in (b"cat/gone.jpg", b"cat/self.jpg", b"cat/folder.jpg"):
            with pytest.raises(OSError):
                source.read(SourceItem(name, "cat", 0))

    @pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
    def test_a_folder_without_permission(self, tmp_path: Path) -> None:
        write(tmp_path, "cat/1.jpg", "dog/1.jpg")
        (tmp_path / "dog").chmod(0)
        with refused("dog: ", os.strerror(13), field="data.source", got=str(tmp_path)):
            listed(tmp_path)

    def test_images_outside_class_folders_are_refused(self, tmp_path: Path) -> None:
        write(tmp_path, "1.jpg", "cat/2.jpg")
        with refused("1.jpg: ", "<class>/<image>", field="data.source", got=str(tmp_path)):
            listed(tmp_path)
        write(tmp_path / "b", *TREE, "other/cat/1.jpg")
        with refused("other/cat/1.jpg: ", "train/", "val/", field="data.source"):
            listed(tmp_path / "b")

    def test_a_url(self) -> None:
        fs = fsspec.filesystem("memory")
        for name in TREE:
            fs.pipe(f"/images/{name}", name.encode())
        assert listed("memory://images") == dict(zip(TREE, PLACES, strict=True))
        with refused(field="data.source", got="memory://nowhere", kind=SourceMissing):
            listed("memory://nowhere")
        with refused("podscale[cluster]", field="data.source", got="nosuch://bucket/images"):
            listed("nosuch://bucket/images")

    def test_a_file_url_and_a_missing_path(self, tmp_path: Path) -> None:
        write(tmp_path, *TREE)
        assert len(listed(f"file://{tmp_path}")) == 5
        with refused(field="data.source", got=str(tmp_path / "missing"), kind=SourceMissing):
            listed(tmp_path / "missing")

    def test_a_single_file_of_another_format_is_refused(self, tmp_path: Path) -> None:
        write(tmp_path, "images.zip")
        with refused(".tar", ".csv", ".jsonl", field="data.source", got=str(tmp_path / "images.zip")):
            listed(tmp_path / "images.zip")


class TestTar:
    @pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
    def test_class_folders(self, tmp_path: Path, form: int) -> None:
        long = "train/cat/" + "x" * 90 + ".jpg"
        names = (*TREE, long) if form != tarfile.USTAR_FORMAT else TREE
        tar = make_tar(tmp_path / "images.tar", {f"./top/{name}": name.encode() for name in names}, form)
        found = listed(tar)
        assert list(found) == [f"top/{name}" for name in names]
        assert list(found.values())[:5] == PLACES

    def test_bytes_are_those_of_the_members(self, tmp_path: Path) -> None:
        tar = make_tar(tmp_path / "a.tar", {name: name.encode() for name in TREE})
        source = open_source(DataSection(source=str(tar)))
        assert all(source.read(item) == item.name for item in source.items())

    def test_several_archives_of_a_folder_and_a_url(self, tmp_path: Path) -> None:
        make_tar(tmp_path / "one.tar", {"cat/1.jpg": b"1"})
        make_tar(tmp_path / "two.tar", {"dog/1.jpg": b"2", "cat/1.jpg": b"3"})
        expected = {
            "one.tar!cat/1.jpg": ("cat", ""),
            "two.tar!dog/1.jpg": ("dog", ""),
            "two.tar!cat/1.jpg": ("cat", ""),
        }
        assert listed(tmp_path) == expected
        fs = fsspec.filesystem("memory")
        for name in ("one.tar", "two.tar"):
            fs.pipe(f"/tars/{name}", (tmp_path / name).read_bytes())
        assert listed("memory://tars") == expected

    def test_webdataset_form(self, tmp_path: Path) -> None:
        make_tar(tmp_path / "x-train-0.tar", {"a.jpg": b"1", "a.cls": b"0", "b.jpg": b"2", "b.cls": b"11\n"})
        make_tar(tmp_path / "x-val-0.tar", {"a.png": b"1", "a.cls": b"11", "a.json": b"{}"})
        assert listed(tmp_path) == {
            "x-train-0.tar!a.jpg": ("00", "train"),
            "x-train-0.tar!b.jpg": ("11", "train"),
            "x-val-0.tar!a.png": ("11", "validation"),
        }

    @pytest.mark.parametrize(
        ("members", "expected"),
        [
            ({"a.jpg": b"1", "a.png": b"2", "a.cls": b"0"}, "two samples have the key a"),
            ({"a.jpg": b"1", "a.cls": b"cat"}, "a.cls: b'cat' is not a class number"),
            ({"a.jpg": b"1", "a.cls": b"1", "b.jpg": b"1"}, "sample b has no image or no .cls"),
        ],
    )
    def test_samples_that_do_not_pair(self, tmp_path: Path, members: dict[str, bytes], expected: str) -> None:
        tar = make_tar(tmp_path / "a.tar", members)
        with refused(expected, field="data.source", got=str(tar)):
            listed(tar)

    def test_links_and_devices_are_no_images(self, tmp_path: Path) -> None:
        tar = make_tar(tmp_path / "a.tar", {"cat/1.jpg": b"1", "dog/1.jpg": b"1"})
        with tarfile.open(tar, "a") as archive:
            for name, kind in (
                ("cat/2.jpg", tarfile.SYMTYPE),
                ("cat/3.jpg", tarfile.LNKTYPE),
                ("d.jpg", tarfile.CHRTYPE),
            ):
                info = tarfile.TarInfo(name)
                info.type, info.linkname = kind, "/etc/passwd"
                archive.addfile(info)
        assert list(listed(tar)) == ["cat/1.jpg", "dog/1.jpg"]

    def test_a_cut_or_compressed_or_odd_tar(self, tmp_path: Path) -> None:
        tar = make_tar(tmp_path / "a.tar", {"cat/1.jpg": b"1" * 5000, "dog/1.jpg": b"1" * 5000})
        tar.write_bytes(tar.read_bytes()[:9000])
        with refused(field="data.source", got=str(tar)):
            listed(tar)
        tar.write_bytes(b"hello" * 1000)
        with refused(field="data.source", got=str(tar)):
            listed(tar)
        (tmp_path / "b.tar.gz").write_bytes(b"x")
        with refused("Decompress it", field="data.source", got=str(tmp_path / "b.tar.gz")):
            listed(tmp_path / "b.tar.gz")


class TestTable:
    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("t.csv", "path,label\ncat/1.jpg,cat\ndog/2.jpg,dog\n"),
            ("t.csv", "cat/1.jpg,cat\n\ndog/2.jpg,dog\n"),
            ("t.csv", "\npath,label\ncat/1.jpg,cat\ndog/2.jpg,dog\n"),
            ("t.csv", "\r\n  \r\nlabel,file\r\ncat,cat/1.jpg\r\ndog,dog/2.jpg\r\n"),
            ("t.csv", "\ufefflabel,x,file\r\ncat,9,cat/1.jpg\r\ndog,9,dog/2.jpg\r\n"),
            ("t.jsonl", '{"path": "cat/1.jpg", "label": "cat"}\n{"file": "dog/2.jpg", "class": "dog"}\n'),
        ],
    )
    def test_rows(self, tmp_path: Path, name: str, text: str) -> None:
        write(tmp_path, "cat/1.jpg", "dog/2.jpg")
        (tmp_path / name).write_text(text, newline="")
        assert listed(tmp_path / name) == {"cat/1.jpg": ("cat", ""), "dog/2.jpg": ("dog", "")}

    def test_splits_absolute_paths_and_urls(self, tmp_path: Path) -> None:
        write(tmp_path / "images", "a.jpg")
        fsspec.filesystem("memory").pipe("/far/b.jpg", b"12345")
        text = f"path,label,split\n{tmp_path}/images/a.jpg,cat,train\nmemory://far/b.jpg,dog,val\n"
        (tmp_path / "t.csv").write_text(text)
        assert listed(tmp_path / "t.csv") == {
            f"{tmp_path}/images/a.jpg": ("cat", "train"),
            "memory://far/b.jpg": ("dog", "validation"),
        }

    def test_a_missing_image_is_refused_when_read(self, tmp_path: Path) -> None:
        (tmp_path / "t.csv").write_text("nowhere.jpg,cat\n")
        source = open_source(DataSection(source=str(tmp_path / "t.csv")))
        (item,) = source.items()
        with pytest.raises(OSError):
            source.read(item)

    @pytest.mark.parametrize(
        ("name", "text", "line", "got"),
        [
            ("t.csv", "path,label\na.jpg\n", 2, ["a.jpg"]),
            ("t.csv", "a.jpg,cat,test\n", 1, "test"),
            ("t.csv", "a.jpg,\n", 1, ABSENT),
            ("t.csv", "\n,\n", 2, ABSENT),
            pytest.param("t.csv", 'a.jpg,"cat\n' + 50_000 * "b.jpg\n", 21_846, ABSENT, id="quotation mark not closed"),
            ("t.jsonl", '{"path": "a.jpg"}\n', 1, '{"path": "a.jpg"}'),
            ("t.jsonl", '\n["a.jpg", "cat"]\n', 2, '["a.jpg", "cat"]'),
            ("t.jsonl", "path,label\n", 1, "path,label"),
        ],
    )
    def test_bad_rows_are_named(self, tmp_path: Path, name: str, text: str, line: int, got: object) -> None:
        (tmp_path / name).write_text(text)
        with refused(field=f"{tmp_path / name}:{line}", got=got):
            listed(tmp_path / name)


SYNSETS = ("n01440764", "n01484850")


class TestImageNet:
    def folders(self, root: Path, labels: str, name: str) -> None:
        write(root, *(f"ILSVRC/Data/CLS-LOC/train/{s}/{s}_{i}.JPEG" for s in SYNSETS for i in (1, 2)))
        write(root, *(f"ILSVRC/Data/CLS-LOC/val/ILSVRC2012_val_0000000{i}.JPEG" for i in (1, 2, 3)))
        (root / name).write_text(labels)

    @pytest.mark.parametrize(
        ("name", "labels"),
        [
            ("imagenet_2012_validation_synset_labels.txt", "n01484850\nn01440764\nn01484850\n"),
            (
                "LOC_val_solution.csv",
                "ImageId,PredictionString\nILSVRC2012_val_00000002,n01440764 1 2 3 4 n01440764 1 2 3 4\n"
                "ILSVRC2012_val_00000001,n01484850 1 2 3 4\nILSVRC2012_val_00000003,n01484850 1 2 3 4\n",
            ),
            ("val.txt", "".join(f"ILSVRC2012_val_0000000{i}.JPEG {SYNSETS[i % 2]}\n" for i in (1, 2, 3))),
        ],
    )
    def test_folders_with_a_label_file(self, tmp_path: Path, name: str, labels: str) -> None:
        self.folders(tmp_path, labels, name)
        found = listed(tmp_path, "imagenet")
        validation = [location for path, location in sorted(found.items()) if "_val_" in path]
        assert validation == [(SYNSETS[1], "validation"), (SYNSETS[0], "validation"), (SYNSETS[1], "validation")]
        assert sum(location == (SYNSETS[0], "train") for location in found.values()) == 2

    def test_the_development_kit(self, tmp_path: Path) -> None:
        from scipy.io import savemat

        self.folders(tmp_path, "2\n1\n2\n", "ILSVRC2012_validation_ground_truth.txt")
        rows = np.array([(1, SYNSETS[0]), (2, SYNSETS[1])], dtype=[("ILSVRC2012_ID", "i4"), ("WNID", "O")])
        savemat(tmp_path / "meta.mat", {"synsets": rows})
        found = listed(tmp_path, "imagenet")
        assert [p[0] for n, p in sorted(found.items()) if "_val_" in n] == [SYNSETS[1], SYNSETS[0], SYNSETS[1]]

    def test_the_tars(self, tmp_path: Path) -> None:
        inner = {}
        for synset in SYNSETS:
            members = {f"{synset}_{i}.JPEG": f"{synset} {i}".encode() * 99 for i in range(3)}
            inner[f"{synset}.tar"] = make_tar(tmp_path / "work" / f"{synset}.tar", members).read_bytes()
        make_tar(tmp_path / "in" / "ILSVRC2012_img_train.tar", inner)
        images = {f"ILSVRC2012_val_0000000{i}.JPEG": b"v%d" % i for i in (1, 2)}
        make_tar(tmp_path / "in" / "ILSVRC2012_img_val.tar", images)
        (tmp_path / "in" / "validation_labels.txt").write_text("n01484850\nn01440764\n")
        source = open_source(DataSection(source=str(tmp_path / "in")))  # data.format=auto detects it
        items = list(source.items())
        content = {item.name.rpartition(b"/")[2].decode(): source.read(item) for item in items}
        assert content["n01484850_2.JPEG"] == b"n01484850 2" * 99
        assert content["ILSVRC2012_img_val.tar!ILSVRC2012_val_00000002.JPEG"] == b"v2"
        assert [item.label for item in items if item.split == "validation"] == [SYNSETS[1], SYNSETS[0]]
        assert sum(item.split == "train" for item in items) == 6

    @pytest.mark.parametrize(
        ("name", "labels", "expected"),
        [
            ("val.txt", "n01440764\n", "1 labels for 3 validation images"),
            ("val.csv", "ILSVRC2012_val_00000001,n01440764\n", "no label for ILSVRC2012_val_00000002"),
            ("val.txt", "1\n2\n1\n", "Class numbers need the kit's meta.mat"),
            ("other.md", "", "needs one label file for the validation images, found none"),
        ],
    )
    def test_labels_that_do_not_fit(self, tmp_path: Path, name: str, labels: str, expected: str) -> None:
        self.folders(tmp_path, labels, name)
        with refused(expected, field="data.source", got=str(tmp_path)):
            listed(tmp_path, "imagenet")


def test_the_digits_are_lossless() -> None:
    source, truth = open_source(DataSection()), digits.load()
    items = list(source.items())
    assert len(items) == 1797
    for item, levels, label in list(zip(items, truth["levels"], truth["labels"], strict=True))[::50]:
        picture = Image.open(io.BytesIO(source.read(item)))
        assert (picture.mode, picture.size, item.label, item.split) == ("L", (8, 8), str(label), "")
        assert (np.rint(np.asarray(picture).astype(float) * 16 / 255) == levels).all()


def test_the_digits_are_those_of_scikit_learn() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    truth, arrays = datasets.load_digits(), digits.load()
    assert {name: (array.dtype.name, array.shape) for name, array in arrays.items()} == {
        "levels": ("uint8", (1797, 8, 8)),
        "labels": ("uint8", (1797,)),
    }
    assert (arrays["levels"] == truth.images).all()
    assert (arrays["labels"] == truth.target).all()


def test_no_byte_of_the_digits_has_changed() -> None:
    """The shard sets and weights of every run on the digits depend on each byte. Does not need scikit-learn."""
    source, total = open_source(DataSection()), hashlib.sha256()
    for item in source.items():
        total.update(item.name + item.label.encode() + source.read(item))
    assert total.hexdigest() == "b3562e46c0d6fa31ee658e60b44660ff2e28d6226d9a8f214fe3af3526b267d5"
