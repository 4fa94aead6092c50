"""Images per CPU-second from a shard set to training batches, by Podscale's loaders and by others.

    podscale shard <document> && python -m benchmarks.input SHARD_SET... [--images 2000] [--batch 64] [--size 224]

Every pipeline decodes, takes a random resized crop, flips half of the images and returns uint8 [n, 224, 224, 3]. CPU
time is user + system of all threads of the process (getrusage), so other load on the machine matters little. The
pipelines take turns in every round, each after a warm-up. A value is the best of the rounds; a ratio is the median over
the rounds of the images per CPU-second, divided by those of PIL + torchvision with the same filter in the same round.
The shard sets are read through links in a temporary folder, once with new decode indexes and once without any. The
loader with kept coefficients reads an epoch before its first round, and stays open between rounds.
"""

import io
import tempfile
from collections.abc import Callable, Generator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.conditions import head
from benchmarks.harness import Options, write_results
from benchmarks.measure import median_ratio
from benchmarks.samples import make_shards
from podscale.bench.input_rates import BatchSizes, Rate, loader_batches, measure_rounds
from podscale.config.data import DataSection
from podscale.config.run_config import RunConfig
from podscale.config.schedule import CropSection
from podscale.data.crop import training_crops
from podscale.data.decode import decode
from podscale.data.decode_index import SUFFIX
from podscale.data.loaders.build_loader import unavailable_reason
from podscale.data.native import CropDecoder, kernels
from podscale.data.shard_set import ShardSet, Split
from podscale.data.sharding.index_shards import index_shards
from podscale.errors import InputError

Pipeline = Callable[[Split, int, int], BatchSizes]
"""Reads batches; arguments: split, images of a batch, side in pixels."""
ROUNDS = 5
KEPT = {"decoded_cache_bytes": 2**40, "decoded_cache_form": "coefficients"}
"""Input options that keep the coefficients of all images."""
PACKAGES = ("torch", "torchvision", "nvidia-dali-cuda130", "pillow", "simplejpeg", "numpy", "opencv-python-headless")
READING = """`input.loader=auto` takes `native` on CPUs, without the extension `reference`; both have PIL's pixels to
the bit. The extension decodes only the blocks under a crop. With a decode index, which sharding writes by default, it
does not read the Huffman codes before the crop either. With kept coefficients (`input.decoded_cache_bytes`) it reads no
Huffman codes after the first epoch. The reference decodes down to the crop with simplejpeg, and PIL
resizes. On GPUs `auto` takes DALI, whose resized pixels are not PIL's."""


def podscale_loader(name: str, interpolation: str = "bilinear", options: Mapping[str, Any] | None = None) -> Pipeline:
    """Return the pipeline of one of Podscale's loaders, with one worker and these `input` options."""

    def run(split: Split, batch: int, size: int) -> BatchSizes:
        if reason := unavailable_reason(name, "cpu"):
            raise InputError(reason)
        section: dict[str, Any] = {"loader": name, "workers": 1, "image_size": size, "interpolation": interpolation}
        section |= options or {}
        return loader_batches(RunConfig.model_validate({"input": section, "train": {"global_batch": batch}}), split)

    return run


def kept_coefficients(interpolation: str = "bilinear") -> Pipeline:
    """Return the pipeline of the loader native with the coefficients of all images in memory."""
    opened: dict[Split, BatchSizes] = {}

    def run(split: Split, batch: int, size: int) -> BatchSizes:
        if split not in opened:
            opened.clear()
            opened[split] = podscale_loader("native", interpolation, KEPT)(split, batch, size)
            for _ in range(-(-len(split) // batch)):
                next(opened[split])
        while True:
            yield next(opened[split])

    return run


def kept_bytes(split: Split) -> tuple[float, float]:
    """Return the mean bytes of an image in the decoded cache: as coefficients, and as pixels."""
    pixels = (3 * split.column("height").astype(np.int64) * split.column("width")).tolist()
    records = [split.read(row) for row in range(len(split))]
    packed = CropDecoder(1).pack(records, pixels)
    kept = [size if one is None else one.nbytes for one, size in zip(packed, pixels, strict=True)]
    return sum(kept) / len(kept), sum(pixels) / len(pixels)


def pil_transforms(interpolation: str = "bilinear") -> Pipeline:
    """PIL decodes, torchvision crops and flips PIL images, as in the usual training script."""

    def run(split: Split, batch: int, size: int) -> BatchSizes:
        from PIL import Image

        augment = torchvision_transforms(size, interpolation)
        images = np.empty((batch, size, size, 3), dtype=np.uint8)
        for rows in batches(split, batch):
            for slot, row in enumerate(rows):
                image = Image.open(io.BytesIO(split.read(row).tobytes())).convert("RGB")
                images[slot] = np.asarray(augment(image))
            yield batch

    return run


def tensor_transforms(interpolation: str = "bilinear") -> Pipeline:
    """torchvision decodes, crops and flips tensors."""

    def run(split: Split, batch: int, size: int) -> BatchSizes:
        import torch
        from torchvision.io import ImageReadMode, decode_jpeg

        torch.set_num_threads(1)
        augment = torchvision_transforms(size, interpolation)
        images = torch.empty((batch, size, size, 3), dtype=torch.uint8)
        for rows in batches(split, batch):
            for slot, row in enumerate(rows):
                image = decode_jpeg(torch.from_numpy(split.read(row).copy()), mode=ImageReadMode.RGB)
                images[slot] = augment(image).permute(1, 2, 0)
            yield batch

    return run


def torchvision_transforms(size: int, interpolation: str) -> Callable[[Any], Any]:
    from torchvision.transforms import InterpolationMode, v2

    mode = InterpolationMode(interpolation)
    return v2.Compose([v2.RandomResizedCrop(size, interpolation=mode, antialias=True), v2.RandomHorizontalFlip()])


def opencv(split: Split, batch: int, size: int) -> BatchSizes:
    """simplejpeg decodes, OpenCV resizes linearly without antialiasing (pixels differ from PIL's)."""
    import cv2

    cv2.setNumThreads(1)
    images = np.empty((batch, size, size, 3), dtype=np.uint8)
    for rows in batches(split, batch):
        sizes = [split.column(name)[rows].astype(np.int64) for name in ("width", "height")]
        views = training_crops(0, np.zeros_like(rows), split.keys[rows], *sizes, crop=CropSection(), size=size)
        for slot, row in enumerate(rows.tolist()):
            view = views[slot]
            part = decode(split.read(row))[view.top : view.top + view.height, view.left : view.left + view.width]
            square = cv2.resize(part, (size, size), interpolation=cv2.INTER_LINEAR)
            images[slot] = square[:, ::-1] if view.flip else square
        yield batch


def decode_only(split: Split, batch: int, size: int) -> BatchSizes:
    """Full decode of the reference loader, without crop and resize: the limit of loaders that decode whole images."""
    for rows in batches(split, batch):
        for row in rows.tolist():
            decode(split.read(row))
        yield batch


def crops_alone(kernels: str) -> Pipeline:
    """Crops of the extension with a version of its kernels, without the loader around it."""

    def run(split: Split, batch: int, size: int) -> BatchSizes:
        decoder, images = CropDecoder(1, kernels=kernels), np.empty((batch, size, size, 3), dtype=np.uint8)
        for rows in batches(split, batch):
            widths, heights = (split.column(name)[rows].astype(np.int64) for name in ("width", "height"))
            views = training_crops(
                0, np.zeros_like(rows), split.keys[rows], widths, heights, crop=CropSection(), size=size
            )
            records = [split.read(row) for row in rows.tolist()]
            decoder.decode(records, heights, widths, views, images, "bilinear", split.decode_indexes(rows))
            yield batch

    return run


def batches(split: Split, batch: int) -> Generator[npt.NDArray[np.int64], None, None]:
    """Yield the rows of batches in random order, without end."""
    if len(split) < batch:
        raise InputError(
            f"--batch: larger than the shard set (got {batch} of {len(split)})", hint="Give a smaller --batch."
        )
    while True:
        rows = np.random.default_rng(0).permutation(len(split))
        for start in range(0, len(rows) - batch + 1, batch):
            yield rows[start : start + batch]


REFERENCE = "podscale reference (PIL's pixels)"
USUAL = "PIL + torchvision transforms"
NATIVE = "podscale native (PIL's pixels)"
COEFFICIENTS = "podscale native, kept coefficients (PIL's pixels)"
INDEXED = "podscale native with index (PIL's pixels)"
FILTERS = {"bilinear": "", "bicubic": ", bicubic"}
"""Filters, and the ends of the names of their pipelines."""
FILTERED: dict[str, Callable[[str], Pipeline]] = {
    COEFFICIENTS: kept_coefficients,
    INDEXED: partial(podscale_loader, "native"),
    NATIVE: partial(podscale_loader, "native"),
    REFERENCE: partial(podscale_loader, "reference"),
    "podscale dali (CPU)": partial(podscale_loader, "dali"),
    USUAL: pil_transforms,
    "torchvision decode_jpeg + tensor transforms": tensor_transforms,
}
"""Pipelines by the filter that they resize with."""
PIPELINES: dict[str, Pipeline] = {
    f"{name}{ending}": build(interpolation)
    for interpolation, ending in FILTERS.items()
    for name, build in FILTERED.items()
} | {"simplejpeg + OpenCV linear": opencv, "(decoding alone, simplejpeg)": decode_only}
PIPELINES |= {f"(crops alone with index, {version} kernels)": crops_alone(version) for version in kernels()}


def measure(
    plain: Split, indexed: Split, images: int, batch: int, size: int
) -> tuple[dict[str, list[Rate]], dict[str, Exception]]:
    """Return the speeds of each pipeline, one a round, and the reason of each pipeline that cannot run here."""
    pipelines = {
        name: partial(pipeline, indexed if "with index" in name else plain, batch, size)
        for name, pipeline in PIPELINES.items()
    }
    rates, reasons = measure_rounds(pipelines, ROUNDS, images=max(batch, images // ROUNDS))
    for name, error in reasons.items():
        if name == REFERENCE or not isinstance(error, ImportError | InputError):
            raise error
    return rates, reasons


def link(directory: Path, target: Path) -> Path:
    """Fill a folder with links to the files of a shard set, without its decode indexes."""
    for path in directory.rglob("*"):
        if path.is_file() and path.suffix != SUFFIX:
            place = target / path.relative_to(directory)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(path.resolve())
    return target


def table(directory: str, images: int, batch: int, size: int, scratch: Path) -> list[str]:
    """Return the table of one shard set."""
    folders = [link(Path(directory), scratch / name / Path(directory).name) for name in ("plain", "indexed")]
    interval, index = DataSection().decode_index, ""
    if interval is not None and not unavailable_reason("native", "cpu"):
        written = index_shards(folders[1], interval)
        index = f"; decode index of {written.index_bytes / written.shard_bytes:.1%} of the shards"
    split, indexed = (ShardSet.open(folder).split("train") for folder in folders)
    kilobytes = split.column("size").mean() / 1000
    lines = [f"{len(split):,} images of {kilobytes:.1f} kB on average, {size} px{index}:", ""]
    lines += ["| pipeline | images per CPU-second | ratio to PIL + torchvision | images/s |", "|---|---:|---:|---:|"]
    rates, reasons = measure(split, indexed, images, batch, size)
    for name in PIPELINES:
        if name in reasons:
            lines.append(f"| {name} | not measured: {reasons[name]} | | |")
            continue
        best = max(rates[name])
        usual = rates[USUAL + FILTERS["bicubic" if name.endswith(FILTERS["bicubic"]) else "bilinear"]]
        ratio = f"{_ratio(rates[name], usual):.2f}" if usual else ""
        lines.append(f"| {name} | {best.per_cpu_second:.0f} | {ratio} | {best.per_second:.0f} |")
    lines.append("")
    if rates[INDEXED] and rates[NATIVE]:
        ratios = [_ratio(rates[INDEXED + ending], rates[NATIVE + ending]) for ending in FILTERS.values()]
        lines += [f"`native` with index to `native` without: {ratios[0]:.2f}, bicubic {ratios[1]:.2f}.", ""]
    if rates[COEFFICIENTS]:
        kept, pixels = (size / 1000 for size in kept_bytes(split))
        lines += [f"An image in memory takes {kept:.1f} kB as coefficients, {pixels:.1f} kB as pixels.", ""]
    return lines


def _ratio(own: list[Rate], others: list[Rate]) -> float:
    return median_ratio([one.per_cpu_second for one in own], [one.per_cpu_second for one in others])


def main() -> None:
    parser = Options(__doc__)
    parser.add_argument("shard_sets", nargs="*", metavar="SHARD_SET")
    parser.add_size("--images", full=2000, small=12, type=int, help="images of a measurement")
    parser.add_size("--batch", full=64, small=4, type=int)
    parser.add_size("--size", full=224, small=32, type=int)
    options = parser.read()
    if not options.shard_sets and not options.small:
        parser.error("SHARD_SET: missing. Give the shard sets to read.")
    lines = head("Input: images per CPU-second", PACKAGES)
    with tempfile.TemporaryDirectory() as scratch:
        for directory in options.shard_sets or [str(make_shards(Path(scratch), images=24))]:
            lines += table(directory, options.images, options.batch, options.size, Path(scratch))
    write_results(options.results, "input.md", [*lines, READING])


if __name__ == "__main__":
    main()
