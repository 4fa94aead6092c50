"""Decoded cache that the processes of a node share: real processes, counts, a killed writer, and what is left over."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podscale.config.run_config import RunConfig
from podscale.data import native
from podscale.data.decode import decode
from podscale.data.loaders.cpu import CachingDecoder
from podscale.data.loaders.decoded_cache import OwnImages, SharedImages, open_image_store
from podscale.data.native import Coefficients
from podscale.data.shard_set import ShardSet, Split
from podscale.util import env
from podscale.util.shared_memory import shared_memory
from tests.support.loading import assert_same_batches, document, needs_native, train_and_close
from tests.support.logs import logged
from tests.support.polling import until
from tests.support.shared_cache_rank import RANKS, batch_digest, block_of

pytestmark = needs_native
NAME = "podscale-test"
MIB = 2**20
EPOCH = 6
"""Steps that read the 48 images of the set `mixed` once."""
FORMS: dict[str, dict[str, Any]] = {
    "reference": {"loader": "reference"},
    "coefficients, blocked": {
        "loader": "native",
        "decoded_cache_form": "coefficients",
        "order": "blocked",
        "groups": 4,
    },
}


@contextmanager
def rank_process(path: str | None, *arguments: object) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "tests.support.shared_cache_rank", *map(str, arguments)]
    process = subprocess.Popen(
        command, env={**os.environ, env.DECODED_CACHE: path or ""}, stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def read_by_ranks(path: str | None, directory: Path, config: RunConfig, steps: int) -> list[Any]:
    """Return what each rank read, from processes that run at the same time."""
    tasks = [("read", directory, rank, steps, config.model_dump_json()) for rank in range(RANKS)]
    with rank_process(path, *tasks[0]) as one, rank_process(path, *tasks[1]) as other:
        return [json.loads(process.communicate(timeout=120)[0]) for process in (one, other)]


@pytest.fixture
def split(make_shard_set) -> Split:
    return ShardSet.open(make_shard_set()).split("train")


@pytest.fixture
def shared() -> Iterator[str]:
    with shared_memory(NAME, 4 * MIB) as path:
        assert path is not None
        yield path


@pytest.mark.parametrize("form", FORMS)
def test_an_image_is_decoded_by_one_of_the_ranks(form, mixed) -> None:
    """Each rank alone would decode 7 of 8 images in three epochs: 84 of both."""
    config = document(input={"max_bad_rate": 1.0, "workers": 1, "decoded_cache_bytes": 8 * MIB, **FORMS[form]})
    plain = document(input={"max_bad_rate": 1.0, "order": config.input.order, "groups": config.input.groups})
    with shared_memory(NAME, RANKS * 8 * MIB) as path:
        found = read_by_ranks(path, mixed, config, 3 * EPOCH)
        images = SharedImages(str(path), ShardSet.open(mixed).split("train"), 8 * MIB)
    for rank, one in enumerate(found):
        expected = train_and_close(plain, mixed, 0, 3 * EPOCH, ranks=range(rank, rank + 1), world=RANKS)[0]
        assert one["digests"] == [batch_digest(batch) for batch in expected]
    kept = [images.find(row) for row in range(48)]
    assert sum(image is not None for image in kept) == 45, "three images are damaged"
    assert any(isinstance(image, Coefficients) for image in kept) == (form != "reference")
    assert max(one["packed"] if form != "reference" else one["decoded"] for one in found) < 45
    assert 45 <= sum(one["packed"] if form != "reference" else one["decoded"] for one in found) <= 60
    assert sum(one["cached_bytes"] for one in found) <= sum(image.nbytes for image in kept if image is not None) + 4096


def test_a_restart_from_the_middle_has_the_same_batches(mixed, shared, monkeypatch) -> None:
    """It finds the images of the rank before it, if the memory is the same; after a new launch it is not."""
    plain = document(input={"max_bad_rate": 1.0})
    expected = train_and_close(plain, mixed, 0, 3 * EPOCH)[0]
    cached = document("native", input={"max_bad_rate": 1.0, "decoded_cache_bytes": MIB})
    monkeypatch.setenv(env.DECODED_CACHE, shared)
    assert_same_batches(expected[:9], train_and_close(cached, mixed, 0, 9)[0])
    assert_same_batches(expected[9:], train_and_close(cached, mixed, 9, 3 * EPOCH)[0])


@pytest.mark.parametrize("limit", [30_000, 100_000])
def test_a_full_memory_does_not_grow(limit, mixed, monkeypatch) -> None:
    expected = train_and_close(document(input={"max_bad_rate": 1.0}), mixed, 0, 3 * EPOCH)[0]
    cached = document("native", input={"max_bad_rate": 1.0, "decoded_cache_bytes": limit})
    with shared_memory(NAME, limit) as path:
        monkeypatch.setenv(env.DECODED_CACHE, str(path))
        found, loader = train_and_close(cached, mixed, 0, 3 * EPOCH)
    assert_same_batches(expected, found)
    assert limit / 2 < loader.cached_bytes["decoded"] <= limit
    assert loader._images._store.limit_bytes == limit - 4096 - 48 * 8


def test_two_processes_that_write_the_same_rows(split, shared) -> None:
    tasks = [("fill", split.directory.parent, seed) for seed in range(2)]
    with rank_process(shared, *tasks[0]) as one, rank_process(shared, *tasks[1]) as other:
        assert [process.wait(120) for process in (one, other)] == [0, 0]
    images = SharedImages(shared, split, MIB)
    places = sorted(images._table.find(row) for row in range(len(split)))
    assert all(begin + length <= following for (begin, length, _), (following, *_) in pairwise(places))
    assert sorted(length for _, length, _ in places) == [len(block_of(row)) for row in range(len(split))]
    assert images._table.used == sum(-(-length // 16) * 16 + 16 for _, length, _ in places), "no block is lost"


def test_a_killed_writer_neither_blocks_the_others_nor_gives_them_wrong_pixels(split) -> None:
    size = 64 * MIB
    for _ in range(5):  # it may be killed between two blocks
        with shared_memory(NAME, 16 * size) as path, rank_process(path, "write", split.directory.parent, size) as rank:
            images = SharedImages(str(path), split, size)
            until(lambda images=images: images._table.used > 0, 60)
            rank.kill()
            rank.wait(60)
        places = [images._table.find(row) for row in range(len(split))]
        row = places.index(None)
        if images._table.used > row * size + size:
            break
    else:
        pytest.fail("never killed while it wrote")
    cache = CachingDecoder(split, images)
    for _ in range(2):
        assert np.array_equal(cache(row), decode(split.read(row)))
        assert images.find(row) is None, "its row is not kept"
    assert np.array_equal(cache(row + 1), decode(split.read(row + 1)))
    assert np.array_equal(images.find(row + 1), decode(split.read(row + 1)))


def memory_names() -> set[str]:
    """Return the mapped files of all processes that have the name of these tests, and such names in /dev/shm."""
    names = {path.name for path in Path("/dev/shm").iterdir() if NAME in path.name}
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            names |= {line.split(maxsplit=5)[5].strip() for line in maps.read_text().splitlines() if NAME in line}
        except OSError:
            continue  # it exited
    return names


def test_nothing_is_left_of_processes_that_were_killed(split) -> None:
    program = (
        "import subprocess, sys\n"
        "from podscale.util.shared_memory import shared_memory\n"
        f"with shared_memory({NAME + '-killed'!r}, 2**28) as path:\n"
        "    rank = 'import sys, time; from podscale.util.shared_memory import map_shared\\n'\n"
        "    rank += 'memory = map_shared(sys.argv[1]); memory[:9] = bytes(9); print(flush=True); time.sleep(600)'\n"
        "    child = subprocess.Popen([sys.executable, '-c', rank, path], stdout=subprocess.PIPE)\n"
        "    child.stdout.readline()\n"
        "    print(child.pid, flush=True)\n"
        "    child.wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert any("-killed" in name for name in memory_names())
        parent.kill()
        os.kill(child, 9)
    until(lambda: not any("-killed" in name for name in memory_names()))


def test_the_memory_cannot_shrink_under_a_reader(shared) -> None:
    with pytest.raises(PermissionError):
        os.truncate(shared, 10)


def test_without_shared_memory_each_process_has_its_own_cache(split, shared, monkeypatch, caplog) -> None:
    def store(path: str | None) -> Any:
        caplog.clear()
        monkeypatch.setenv(env.DECODED_CACHE, path or "")
        return open_image_store(split, MIB)

    assert isinstance(store(None), OwnImages)
    assert not caplog.text
    assert isinstance(store("/proc/self/fd/999"), OwnImages)
    ((error,),) = logged(caplog)
    assert error.errno == errno.ENOENT
    with shared_memory(NAME, 4096) as small:
        assert isinstance(store(small), OwnImages)
    ((error,),) = logged(caplog)
    assert type(error) is ValueError
    with monkeypatch.context() as patched:
        patched.setattr(native, "_native", None)
        assert isinstance(store(shared), OwnImages)
        assert logged(caplog) == [()], "reported before the memory is opened"
    assert isinstance(store(shared), SharedImages)
    assert logged(caplog) == []
    other = ShardSet.open(split.directory.parent).split("validation")
    assert isinstance(open_image_store(other, MIB), OwnImages)
    ((error,),) = logged(caplog)
    assert type(error) is ValueError
    for size in (0, 2**70):
        with shared_memory(NAME, size) as none:
            assert none is None
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert isinstance(store(None), OwnImages)
    assert logged(caplog) == [()]
