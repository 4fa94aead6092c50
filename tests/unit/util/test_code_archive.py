"""Archives of a user's code: the same bytes for the same files, without what is ignored."""

import io
import os
import tarfile
from pathlib import Path

import pytest

from podscale.util.code_archive import CodeArchive, changed_files, pack_code
from tests.support.refusals import refused


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "mine"
    (made / "nets").mkdir(parents=True)
    (made / "nets" / "__init__.py").write_text("")
    (made / "nets" / "wide.py").write_text("WIDTH = 4\n")
    (made / "train.py").write_text("import nets\n")
    return made


def test_the_same_files_give_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    first = pack_code(folder)
    (folder / "train.py").touch()
    (folder / "train.py").chmod(0o755)
    (folder / "nets" / "__pycache__").mkdir()
    (folder / "nets" / "__pycache__" / "wide.pyc").write_bytes(b"compiled")
    assert pack_code(folder) == first
    assert set(first.files()) == {"nets/__init__.py", "nets/wide.py", "train.py"}


def test_a_package_keeps_its_name(folder: Path) -> None:
    assert set(pack_code(folder / "nets").files()) == {"nets/__init__.py", "nets/wide.py"}


def test_patterns_of_gitignore_leave_files_out(folder: Path) -> None:
    (folder / "data").mkdir()
    (folder / "data" / "photo.jpg").write_bytes(b"1")
    (folder / "notes.txt").write_text("2")
    (folder / "keep.txt").write_text("3")
    (folder / ".podscaleignore").write_text("# not code\ndata/\n*.txt\n!keep.txt\n")
    assert set(pack_code(folder).files()) == {"nets/__init__.py", "nets/wide.py", "train.py", "keep.txt"}


def test_an_archive_is_unpacked_read_only(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    text = pack_code(folder).to_text()
    assert text is not None
    archive = CodeArchive.from_text(text)
    archive.unpack(target)
    assert (target / "nets" / "wide.py").read_text() == "WIDTH = 4\n"
    assert [oct(path.stat().st_mode & 0o222) for path in (target, target / "train.py")] == ["0o0", "0o0"]
    target.chmod(0o755)
    (target / "nets").chmod(0o755)


def test_text_has_nothing_that_kubernetes_or_argo_replaces(folder: Path) -> None:
    (folder / "random.bin").write_bytes(os.urandom(20_000))
    archive = pack_code(folder)
    text = archive.to_text()
    assert text is not None
    assert not set(text) & set("${}\"'\\")
    assert CodeArchive.from_text(text) == archive


@pytest.mark.parametrize("size", [49_000, 200_000], ids=["only as text", "before its end"])
def test_text_that_would_be_too_long_is_none(folder: Path, size: int) -> None:
    (folder / "random.bin").write_bytes(os.urandom(size))
    assert pack_code(folder).to_text() is None


def test_pipes_and_links_to_nothing_are_left_out(folder: Path, tmp_path: Path) -> None:
    before = pack_code(folder)
    os.mkfifo(folder / "pipe.py")
    (folder / "lost.py").symlink_to(tmp_path / "absent")
    assert pack_code(folder) == before
    (tmp_path / "other.py").write_text("1")
    (folder / "linked.py").symlink_to(tmp_path / "other.py")
    assert changed_files(before, pack_code(folder)) == ["linked.py: added"]


@pytest.mark.parametrize("name", ["../outside.py", "/outside.py", "link.py", "twice.py"])
def test_a_foreign_archive_is_refused(name: str, tmp_path: Path) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        member = tarfile.TarInfo(name)
        if name == "link.py":
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        for _ in range(2 if name == "twice.py" else 1):
            tar.addfile(member, io.BytesIO())
    (tmp_path / "target").mkdir()
    with refused(field="launch.code", got=name):
        CodeArchive(out.getvalue()).unpack(tmp_path / "target")
    assert not (tmp_path / "outside.py").exists()
    with refused(field="launch.code"):
        CodeArchive(b"no tar").files()


def test_differences_are_files(folder: Path) -> None:
    before = pack_code(folder)
    (folder / "train.py").unlink()
    (folder / "new.py").write_text("1")
    (folder / "nets" / "wide.py").write_text("WIDTH = 8\n")
    assert changed_files(before, pack_code(folder)) == ["nets/wide.py: changed", "new.py: added", "train.py: removed"]


def test_what_cannot_be_packed_is_refused(folder: Path) -> None:
    with refused("no such", field="launch.code", got=str(folder / "absent")):
        pack_code(folder / "absent")
    (folder / "empty").mkdir()
    with refused(field="launch.code", got=str(folder / "empty")):
        pack_code(folder / "empty")
    (folder / ("long" * 60)).mkdir()
    (folder / ("long" * 60) / "module.py").write_text("1")
    with refused("long", field="launch.code"):
        pack_code(folder)
    with (folder / "data.bin").open("wb") as file:
        file.truncate(2**34)  # more than the memory of a machine
    with refused(".podscaleignore", field="launch.code"):
        pack_code(folder)
    with refused(field="launch.code_bundle"):
        CodeArchive.from_text("no archive")
