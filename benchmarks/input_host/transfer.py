"""Rates of reading records for the first time: whole shards against single records, from a store and from disk."""

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


class RangeHandler(BaseHTTPRequestHandler):
    """HTTP handler of range requests that answers after a pause, as an object store does."""

    disable_nagle_algorithm = True  # otherwise a body waits 40 ms for the acknowledgement of its header
    root, pause = Path(), 0.0
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        start, end = (int(number) for number in self.headers["Range"].removeprefix("bytes=").split("-"))
        with (self.root / self.path.lstrip("/")).open("rb") as file:
            file.seek(start)
            content = file.read(end + 1 - start)
        time.sleep(self.pause)
        self.send_response(206)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def serve(root: str, pause: float, port: Connection) -> None:
    """Send the port, and serve a folder until the process is stopped."""
    RangeHandler.root, RangeHandler.pause = Path(root), pause
    with ThreadingHTTPServer(("127.0.0.1", 0), RangeHandler) as server:
        port.send(server.server_port)
        server.serve_forever()


@contextmanager
def store(directory: str, pause: float) -> Iterator[RemoteFiles]:
    """Serve a folder as a store from another process during the block."""
    context = get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    server = context.Process(target=serve, args=(directory, pause, writer), daemon=True)
    server.start()
    writer.close()
    try:
        yield RemoteFiles(f"http://127.0.0.1:{reader.recv()}", ReadRetryPolicy())
    finally:
        server.terminate()
        server.join()


class TransferTable:
    """Table whose rows are timed one after the other."""

    def __init__(self, split: Split, pause: float) -> None:
        self._sizes = split.column("size")
        shard = (split.directory / split.shard_names[0]).stat().st_size
        self.lines = [
            f"Reading records into memory, {self._sizes.mean() / 1000:.0f} kB each, in shards of {shard / 1e6:.0f} MB; "
            f"latency of the store {pause * 1000:.0f} ms:",
            "",
            "| from | how | MB/s | records/s |",
            "|---|---|---:|---:|",
        ]

    def add(self, source: str, how: str, rows: Rows, read: Callable[[], object]) -> None:
        """Time `read`, which reads these rows."""
        start = time.perf_counter()
        read()
        seconds = time.perf_counter() - start
        megabytes = float(self._sizes[rows].sum()) / 1e6
        self.lines.append(f"| {source} | {how} | {rate(megabytes, seconds):.0f} | {rate(len(rows), seconds):.0f} |")


def transfer(directory: str, pause: float) -> list[str]:
    """Return the table of the rates; `pause`: latency of the store, seconds."""
    split = ShardSet.open(directory).split("train")
    rows = np.random.default_rng(0).permutation(len(split))
    table = TransferTable(split, pause)
    with store(directory, pause) as files:
        measure_store(table, split, files, rows)
    measure_disk(table, split, rows)
    return [*table.lines, ""]


def measure_store(table: TransferTable, split: Split, files: RemoteFiles, rows: Rows) -> None:
    shards, offsets, sizes = (split.column(name) for name in ("shard", "offset", "size"))

    def read_record(row: int) -> int:
        start = int(offsets[row])
        name = f"train/{split.shard_names[int(shards[row])]}"
        return len(files._read_range(name, start, start + int(sizes[row])))

    def read_shards() -> None:
        for name in split.shard_names:
            for block in files.blocks(f"train/{name}", (split.directory / name).stat().st_size):
                len(block)

    table.add("store", "whole shards, one after the other", rows, read_shards)
    few = rows[:64]
    table.add("store", "records, one after the other", few, lambda: [read_record(row) for row in few.tolist()])
    with ThreadPoolExecutor(8) as pool:
        table.add("store", "records, by 8 threads", rows, lambda: list(pool.map(read_record, rows.tolist())))


def measure_disk(table: TransferTable, split: Split, rows: Rows) -> None:
    """Measure shards and records from a cold disk, the page cache and memory."""
    paths = [split.directory / name for name in split.shard_names]
    shards, offsets, sizes = (split.column(name) for name in ("shard", "offset", "size"))

    def read_mapped() -> None:
        for row in rows.tolist():
            split.read(row).copy()

    drop_from_page_cache(paths)  # before shards are mapped, since mapped pages stay
    table.add(
        "disk, cold", "whole shards, one after the other", rows, lambda: [LocalShardMapper().read(p) for p in paths]
    )
    drop_from_page_cache(paths)
    table.add("disk, cold", "records of mapped shards, in random order", rows, read_mapped)
    table.add("page cache", "records of mapped shards, in random order", rows, read_mapped)
    in_memory = [LocalShardMapper().read(path) for path in paths]

    def read_memory() -> None:
        for row in rows.tolist():
            start = int(offsets[row])
            in_memory[int(shards[row])][start : start + int(sizes[row])].copy()

    table.add("records in memory", "in random order", rows, read_memory)


def drop_from_page_cache(paths: Sequence[Path]) -> None:
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
