"""Python's tarfile reads our tar headers as intended."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest

from podscale.data.sharding import file_formats
from podscale.data.sharding.shard_plan import ShardPlan
from podscale.data.sharding.shard_record import ShardRecord
from tests.support.refusals import refused


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 100_000, 8**11 - 1])
def test_header_says_what_tarfile_reads(size: int) -> None:
    info = tarfile.TarInfo.frombuf(file_formats.tar_header(b"00000012.jpg", size), "ascii", "strict")
    assert (info.name, info.size, info.isreg()) == ("00000012.jpg", size, True)
    assert (info.mode, info.uid, info.gid, info.mtime) == (0o644, 0, 0, 0)
    assert file_formats.tar_header(b"00000012.jpg", size)[257:265] == b"ustar\x0000"


def test_an_archive_of_several_members() -> None:
    contents = {b"a.jpg": b"x" * 700, b"a.cls": b"3", b"b.png": b"", b"b.cls": b"12"}
    archive = b"".join(
        file_formats.tar_header(name, len(content)) + content + bytes(file_formats.tar_padding(len(content)))
        for name, content in contents.items()
    )
    with tarfile.open(fileobj=io.BytesIO(archive + file_formats.TAR_END)) as opened:
        read = {info.name.encode(): opened.extractfile(info).read() for info in opened}  # type: ignore[union-attr]
    assert read == contents


def test_sample_bytes_is_image_and_label_with_headers() -> None:
    assert file_formats.tar_sample_bytes(0) == 3 * 512
    assert file_formats.tar_sample_bytes(512) == 4 * 512
    assert file_formats.tar_sample_bytes(513) == 5 * 512


def test_a_column_file_of_the_other_kind_is_refused(tmp_path: Path) -> None:
    plan, record = tmp_path / "plan", tmp_path / "record"
    bounds = {split: np.array([0, 1]) for split in ("train", "validation")}
    ShardPlan("f", ["a", "b"], bounds, {"label": np.zeros(1, "<i4")}).write(plan)
    ShardRecord("f", 1, "", {"key": np.zeros(1, "<u8")}).write(record)
    assert ShardPlan.read(plan).classes == ["a", "b"]
    assert ShardRecord.read(record).bytes == 1
    with refused("no plan", "podscale shard", field=str(record)):
        ShardPlan.read(record)
    with refused("no record", "podscale shard", field=str(plan)):
        ShardRecord.read(plan)
