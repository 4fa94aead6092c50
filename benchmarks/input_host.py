"""Input on a host without accelerated decoding: images per core, with each cache and without, and where time goes.

    podscale shard <document> && python benchmarks/input_host.py SHARD_SET... [--images 500] [--rounds 5] [--size 224]

Candidates take turns, round by round, pinned to one core with one thread and then to two with two; figures are medians
over the rounds, ratios the medians of each round's. CPU time is user + system of all threads of the process, so that
other load matters little. All candidates but DALI are first shown to hand over the same pixels. Writes
results/input-host.md.
"""

import argparse
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from conditions import RESULTS, head, publish
from PIL import Image

from podscale.config.run_config import RunConfig
from podscale.config.schedule import CropSection
from podscale.data.crop import CropParams, training_crops
from podscale.data.decode import Pixels, crop_and_resize, decode, decode_rows
from podscale.data.loaders import pillow
from podscale.data.loaders.base import Loader
from podscale.data.loaders.build_loader import build_loader, open_shard_set
from podscale.data.remote_files import ReadRetryPolicy, RemoteFiles
from podscale.data.sampler import build_sampler
from podscale.data.shard_set import LocalShardMapper, ShardSet, Split
from podscale.errors import InputError
from podscale.training.schedules import image_phases

PACKAGES = ("pillow", "simplejpeg", "numpy", "nvidia-dali-cuda130")
NEEDED = 4102
"""Images/s of one of the 256 hosts that fed 1.05 million images/s to 2,048 TPU cores (Ying et al. 2018)."""
BATCH = 32
LARGE = 2**40
AS_IT_WAS = "as it was: decoded whole, cut and mirrored by NumPy"
CANDIDATES: dict[str, dict[str, Any]] = {
    AS_IT_WAS: {},
    "no cache": {},
    "records in memory": {"record_cache_bytes": LARGE},
    "decoded images kept": {"decoded_cache_bytes": LARGE},
    "dali (decodes only the crop; other pixels)": {"loader": "dali"},
}


class WholeImages:
    """How images were decoded before: whole, into fresh memory."""

    cached_bytes = 0

    def __init__(self, split: Split) -> None:
        self._split = split

    def __call__(self, row: int, rows: int) -> Pixels:
        return decode(self._split.read(row))


def cut_by_numpy(pixels: Pixels, view: CropParams, size: int) -> Pixels:
    """How views were cut before."""
    part = pixels[view.top : view.top + view.height, view.left : view.left + view.width]
    image = Image.fromarray(part)
    if part.shape[:2] != (view.out_height, view.out_width):
        image = image.resize((view.out_width, view.out_height), Image.Resampling.BILINEAR)
    square = np.asarray(image)[view.out_top : view.out_top + size, view.out_left : view.out_left + size]
    return square[:, ::-1] if view.flip else square


@contextmanager
def cutting(by: Callable[[Pixels, CropParams, int], Pixels]) -> Iterator[None]:
    pillow.crop_and_resize, kept = by, pillow.crop_and_resize
    try:
        yield
    finally:
        pillow.crop_and_resize = kept


class Turn:
    """One candidate: hands over batches where it stopped, and leaves nothing running between its turns."""

    def __init__(self, name: str, directory: str, cores: int, size: int) -> None:
        section = {"loader": "torchvision", "workers": cores, "image_size": size, **CANDIDATES[name]}
        config = RunConfig.model_validate({"input": section, "train": {"global_batch": BATCH}})
        split = open_shard_set(directory, config).split("train")
        order = build_sampler(config, split)
        self.loader: Loader = build_loader(
            config, split, order, phases=image_phases(config, len(split)), ranks=range(1), world_size=1, device="cpu"
        )
        self._cut = crop_and_resize
        if name == AS_IT_WAS:
            self.loader._images, self._cut = WholeImages(split), cut_by_numpy  # type: ignore[attr-defined]
        self._step = 0
        self.first = [np.array(batch.images) for batch in self._take(2)]
        if "decoded_cache_bytes" in section:
            list(self._take(-(-len(split) // BATCH)))  # an epoch fills the cache

    def _take(self, steps: int) -> Iterator[Any]:
        begin, self._step = self._step, self._step + steps
        with cutting(self._cut):
            yield from self.loader.batches(begin, self._step)

    def measure(self, images: int) -> float:
        """Images per CPU-second."""
        cpu = cpu_seconds()
        count = sum(len(batch) for batch in self._take(images // BATCH))
        return count / (cpu_seconds() - cpu)


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def loaders(directory: str, cores: int, images: int, rounds: int, size: int) -> list[str]:
    """A table of all candidates on so many cores."""
    os.sched_setaffinity(0, range(cores))
    turns: dict[str, Turn] = {}
    lines = []
    for name in CANDIDATES:
        try:
            turns[name] = Turn(name, directory, cores, size)
        except (ImportError, InputError) as error:
            lines.append(f"| {cores} | {name} | not measured: {error} | | |")
    for name, turn in turns.items():
        if "dali" not in name:
            assert all(map(np.array_equal, turn.first, turns[AS_IT_WAS].first)), f"{name}: other pixels"
    found: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(rounds):
        for name, turn in turns.items():
            found[name].append(turn.measure(images))
    for name, turn in turns.items():
        turn.loader.close()
        rate = statistics.median(found[name])
        ratio = statistics.median(mine / before for mine, before in zip(found[name], found[AS_IT_WAS], strict=True))
        lines.append(f"| {cores} | {name} | {rate:.0f} | {ratio:.2f} | {NEEDED / rate:.1f} |")
    return lines


def parts(directory: str, images: int, size: int) -> list[str]:
    """Microseconds of CPU for one image, part by part, in one thread."""
    split = ShardSet.open(directory).split("train")
    rows = np.random.default_rng(0).permutation(len(split))[:images]
    widths, heights = (split.column(name)[rows].astype(np.int64) for name in ("width", "height"))
    views = training_crops(0, np.zeros_like(rows), split.keys[rows], widths, heights, crop=CropSection(), size=size)
    jobs = [
        (split.read(row), int(height), int(width), views[slot])
        for slot, (row, height, width) in enumerate(zip(rows.tolist(), heights, widths, strict=True))
    ]
    buffer = np.empty(3 * int((widths * heights).max()), dtype=np.uint8)
    whole = [decode(record) for record, *_ in jobs]
    measured: dict[str, Callable[[], object]] = {
        "decoding, as it was": lambda: [decode(record) for record, *_ in jobs],
        "decoding, whole, into memory used again": lambda: [decode(record, buffer) for record, *_ in jobs],
        "decoding, as far as the crop": lambda: [
            decode_rows(record, height, width, view.top + view.height, buffer) for record, height, width, view in jobs
        ],
        "cutting, resizing, mirroring, as it was": lambda: [
            cut_by_numpy(pixels, job[3], size).copy() for pixels, job in zip(whole, jobs, strict=True)
        ],
        "cutting, resizing, mirroring": lambda: [
            np.array(crop_and_resize(pixels, job[3], size)) for pixels, job in zip(whole, jobs, strict=True)
        ],
    }
    figures: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(3):
        for name, work in measured.items():
            cpu = cpu_seconds()
            work()
            figures[name].append((cpu_seconds() - cpu) / len(jobs) * 1e6)
    share = float(np.mean((views.top + views.height) / heights))
    lines = [f"Crops end at {share:.0%} of the height on average. Microseconds of CPU for one image:", ""]
    lines += ["| part | µs |", "|---|---:|"]
    return [*lines, *(f"| {name} | {min(values):.0f} |" for name, values in figures.items()), ""]


class Ranges(BaseHTTPRequestHandler):
    """Answers range requests after a pause, as an object store does."""

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
        """Nothing: requests are no news here."""


def serve(root: str, pause: float, port: Any) -> None:
    Ranges.root, Ranges.pause = Path(root), pause
    with ThreadingHTTPServer(("127.0.0.1", 0), Ranges) as server:
        port.send(server.server_port)
        server.serve_forever()


def bringing(directory: str, pause: float) -> list[str]:
    """How fast records come into memory for the first time: whole shards against records, from a store and a disk."""
    split = ShardSet.open(directory).split("train")
    paths = [split.directory / name for name in split.shard_names]
    rows = np.random.default_rng(0).permutation(len(split))
    sizes = split.column("size")
    context = get_context("spawn")
    mine, theirs = context.Pipe()
    server = context.Process(target=serve, args=(directory, pause, theirs), daemon=True)
    server.start()
    files = RemoteFiles(f"http://127.0.0.1:{mine.recv()}", ReadRetryPolicy())
    lines = [
        f"Bringing records to memory, {split.column('size').mean() / 1000:.0f} kB each, in shards of "
        f"{paths[0].stat().st_size / 1e6:.0f} MB; the store answers {pause * 1000:.0f} ms late:",
        "",
        "| from | how | MB/s | records/s |",
        "|---|---|---:|---:|",
    ]

    def timed(source: str, how: str, work: Callable[[], object], chosen: np.ndarray | None = None) -> None:
        chosen = rows if chosen is None else chosen
        begin = time.perf_counter()
        work()
        seconds = time.perf_counter() - begin
        rate = float(sizes[chosen].sum()) / seconds / 1e6
        lines.append(f"| {source} | {how} | {rate:.0f} | {len(chosen) / seconds:.0f} |")

    def record(row: int) -> None:
        name = f"train/{split.shard_names[int(split.column('shard')[row])]}"
        begin = int(split.column("offset")[row])
        files._read_range(name, begin, begin + int(sizes[row]))

    def shard(path: Path) -> None:
        for block in files.blocks(f"train/{path.name}", path.stat().st_size):
            len(block)

    timed("store", "whole shards, one after the other", lambda: [shard(path) for path in paths])
    few = rows[:64]
    timed("store", "records, one after the other", lambda: [record(row) for row in few.tolist()], few)
    with ThreadPoolExecutor(8) as pool:
        timed("store", "records, by 8 threads", lambda: [*pool.map(record, rows.tolist())])
    server.terminate()

    def forget() -> None:
        for path in paths:
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def mapped() -> None:
        for row in rows.tolist():
            split.read(row).copy()

    forget()  # before anything is mapped: mapped pages stay
    timed("disk, cold", "whole shards, one after the other", lambda: [LocalShardMapper().read(path) for path in paths])
    forget()
    timed("disk, cold", "records of mapped shards, in random order", mapped)
    timed("page cache", "records of mapped shards, in random order", mapped)
    held = {path: LocalShardMapper().read(path) for path in paths}
    where = split.column("shard"), split.column("offset")

    def kept() -> None:
        for row in rows.tolist():
            begin = int(where[1][row])
            held[paths[int(where[0][row])]][begin : begin + int(sizes[row])].copy()

    timed("records in memory", "in random order", kept)
    return [*lines, ""]


READING = """`as it was` is the loader before: the whole image decoded into fresh memory, the rectangle copied out and
mirrored by NumPy. Pixels are the same to the bit in all rows but DALI's. `records in memory` costs and gains nothing
here, where the page cache holds the shards: it is for shards behind a URL or on a slow volume (last table)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shard_sets", nargs="+", metavar="SHARD_SET")
    parser.add_argument("--images", type=int, default=500, help="images of one measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--pause", type=float, default=0.02, help="seconds until the store answers")
    arguments = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    lines = head("Input on hosts: images per core", PACKAGES)
    for directory in arguments.shard_sets:
        split = ShardSet.open(directory).split("train")
        lines += [f"{len(split):,} images of {split.column('size').mean() / 1000:.1f} kB, {arguments.size} px:", ""]
        lines += [
            f"| cores, threads | loader | images per CPU-second | ratio | cores for {NEEDED:,} images/s |",
            "|---:|---|---:|---:|---:|",
        ]
        for number in range(1, min(cores, 2) + 1):
            lines += loaders(directory, number, arguments.images, arguments.rounds, arguments.size)
        lines += ["", *parts(directory, min(arguments.images, 200), arguments.size)]
    lines += bringing(arguments.shard_sets[0], arguments.pause)
    publish(RESULTS / "input-host.md", [*lines, READING])


if __name__ == "__main__":
    main()
