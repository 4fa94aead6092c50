"""Rates at which records come into memory for the first time: whole shards against records, from a store and a disk."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.measure import rate
from podscale.data.remote_files import ReadRetryPolicy, RemoteFiles
from podscale.data.shard_set import LocalShardMapper, ShardSet, Split

Rows = npt.NDArray[np.int64]


class Ranges(BaseHTTPRequestHandler):
    """Answers range requests after a pause, as an object store does."""

    disable_nagle_algorithm = True  # else a body waits 40 ms for the acknowledgement of its header
    root, pause = Path(), 0.0
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        begin, end = (int(number) for number in self.headers["Range"].removeprefix("bytes=").split("-"))
        with (self.root / self.path.lstrip("/")).open("rb") as file:
            file.seek(begin)
            content = file.read(end + 1 - begin)
        time.sleep(self.pause)
        self.send_response(206)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def serve(root: str, pause: float, port: Connection) -> None:
    """Serve a folder for ever; sends the port."""
    Ranges.root, Ranges.pause = Path(root), pause
    with ThreadingHTTPServer(("127.0.0.1", 0), Ranges) as server:
        port.send(server.server_port)
        server.serve_forever()


@contextmanager
def store(directory: str, pause: float) -> Iterator[RemoteFiles]:
    """A store of this folder in a process of its own, for the time of the block."""
    context = get_context("spawn")
    mine, theirs = context.Pipe()
    server = context.Process(target=serve, args=(directory, pause, theirs), daemon=True)
    server.start()
    theirs.close()
    try:
        yield RemoteFiles(f"http://127.0.0.1:{mine.recv()}", ReadRetryPolicy())
    finally:
        server.terminate()
        server.join()


class Table:
    """Rows of the table, timed one after the other."""

    def __init__(self, split: Split, pause: float) -> None:
        self._sizes = split.column("size")
        shard = (split.directory / split.shard_names[0]).stat().st_size
        self.lines = [
            f"Bringing records to memory, {self._sizes.mean() / 1000:.0f} kB each, in shards of {shard / 1e6:.0f} MB; "
            f"the store answers {pause * 1000:.0f} ms late:",
            "",
            "| from | how | MB/s | records/s |",
            "|---|---|---:|---:|",
        ]

    def add(self, source: str, how: str, rows: Rows, work: Callable[[], object]) -> None:
        """Time `work`, which brings these rows."""
        begin = time.perf_counter()
        work()
        seconds = time.perf_counter() - begin
        megabytes = float(self._sizes[rows].sum()) / 1e6
        self.lines.append(f"| {source} | {how} | {rate(megabytes, seconds):.0f} | {rate(len(rows), seconds):.0f} |")


def transfer(directory: str, pause: float) -> list[str]:
    """Table of the rates. Args: pause: seconds until the store answers."""
    split = ShardSet.open(directory).split("train")
    rows = np.random.default_rng(0).permutation(len(split))
    table = Table(split, pause)
    with store(directory, pause) as files:
        from_store(table, split, files, rows)
    from_disk(table, split, rows)
    return [*table.lines, ""]


def from_store(table: Table, split: Split, files: RemoteFiles, rows: Rows) -> None:
    """Shards and records over HTTP."""
    shards, offsets, sizes = (split.column(name) for name in ("shard", "offset", "size"))

    def record(row: int) -> None:
        begin = int(offsets[row])
        files._read_range(f"train/{split.shard_names[int(shards[row])]}", begin, begin + int(sizes[row]))

    def records(chosen: Rows) -> None:
        for row in chosen.tolist():
            record(row)

    def whole() -> None:
        for name in split.shard_names:
            for block in files.blocks(f"train/{name}", (split.directory / name).stat().st_size):
                len(block)

    table.add("store", "whole shards, one after the other", rows, whole)
    few = rows[:64]
    table.add("store", "records, one after the other", few, lambda: records(few))
    with ThreadPoolExecutor(8) as pool:
        table.add("store", "records, by 8 threads", rows, lambda: list(pool.map(record, rows.tolist())))


def from_disk(table: Table, split: Split, rows: Rows) -> None:
    """Shards and records of a cold disk, of the page cache and of memory."""
    paths = [split.directory / name for name in split.shard_names]
    shards, offsets, sizes = (split.column(name) for name in ("shard", "offset", "size"))

    def mapped() -> None:
        for row in rows.tolist():
            split.read(row).copy()

    forget(paths)  # before anything is mapped: mapped pages stay
    table.add(
        "disk, cold", "whole shards, one after the other", rows, lambda: [LocalShardMapper().read(p) for p in paths]
    )
    forget(paths)
    table.add("disk, cold", "records of mapped shards, in random order", rows, mapped)
    table.add("page cache", "records of mapped shards, in random order", rows, mapped)
    held = [LocalShardMapper().read(path) for path in paths]

    def kept() -> None:
        for row in rows.tolist():
            begin = int(offsets[row])
            held[int(shards[row])][begin : begin + int(sizes[row])].copy()

    table.add("records in memory", "in random order", rows, kept)


def forget(paths: Sequence[Path]) -> None:
    """Drop files from the page cache."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
