"""The writer of a shard: the file is the concatenation of its pieces, whatever their sizes."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from podscale.data.sharding import file_formats
from podscale.data.sharding.pack import FLUSH_BYTES, FLUSH_PIECES, _ShardWriter

SIZES = {
    "large": [300_000, 700_000, 2 * FLUSH_BYTES, 1, 5 * FLUSH_BYTES + 17, 40_000],
    "to the byte": [
        FLUSH_BYTES - 4 * file_formats.TAR_BLOCK_BYTES,
        FLUSH_BYTES - 3 * file_formats.TAR_BLOCK_BYTES,
        FLUSH_BYTES,
    ],
    "many small ones": [10] * (2 * FLUSH_PIECES),
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_a_shard_is_its_samples_one_after_the_other(sizes: list[int], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    contents = [rng.bytes(size) for size in sizes]
    path = tmp_path / "shard.tar"
    with _ShardWriter(path, sum(sizes), hashing=True) as writer:
        offsets = [writer.write_sample(key, b"jpg", content, label=key) for key, content in enumerate(contents)]
    expected = b""
    for key, content in enumerate(contents):
        label = b"%d" % key
        expected += (
            file_formats.tar_header(b"%08d.jpg" % key, len(content))
            + content
            + bytes(file_formats.tar_padding(len(content)))
        )
        expected += (
            file_formats.tar_header(b"%08d.cls" % key, len(label)) + label + bytes(file_formats.tar_padding(len(label)))
        )
    expected += file_formats.TAR_END
    written = path.read_bytes()
    assert written == expected
    assert writer.position == len(expected)
    assert writer.sha256 == hashlib.sha256(expected).hexdigest()
    for offset, content in zip(offsets, contents, strict=True):
        assert written[offset : offset + len(content)] == content


def test_writes_end_at_multiples_of_a_megabyte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    write = os.writev

    def counting(descriptor: int, pieces: Sequence[bytes]) -> int:
        sizes.append(sum(map(len, pieces)))
        return write(descriptor, pieces)

    monkeypatch.setattr(os, "writev", counting)
    with _ShardWriter(tmp_path / "shard.tar", 20 * 2**20, hashing=False) as writer:
        for key in range(100):
            writer.write_sample(key, b"jpg", bytes(150_000), label=0)
    assert len(sizes) > 10
    assert set(sizes[:-1]) == {FLUSH_BYTES}
