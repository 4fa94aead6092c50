"""Images per CPU-second from a shard set to training batches, by Podscale's loaders and by others.

    podscale shard <document>
    python -m benchmarks.input SHARD_SET... [--images 2000] [--batch 64] [--size 224] [--intervals 8 16]

Every pipeline decodes, takes a random resized crop, flips half of the images and returns uint8 [n, 224, 224, 3]. CPU
time is user + system of all threads of the process (getrusage), so other load on the machine matters little. The
pipelines take turns in every round, each after a warm-up. A value is the best of the rounds; a ratio is the median over
the rounds of the images per CPU-second, divided by those of PIL + torchvision, DALI or tf.data with the same filter in
the same round. The last column is by wall time, with one thread.

The shard sets are read through links in a temporary folder, once with new decode indexes and once without any. The
loader with kept coefficients reads an epoch before its first round, and stays open between rounds.

Further tables have the augmentation recipes of presets beside their authors' transforms, and the parts of a crop alone.
webdataset, timm, TensorFlow and OpenCV are measured if they are installed.
"""

import argparse
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.conditions import head
from benchmarks.harness import Options, write_results
from benchmarks.input import others
from benchmarks.input.limits import limits
from benchmarks.input.pipelines import Pipeline, crops_alone, kept_coefficients, podscale_loader
from benchmarks.input.recipes import RECIPES, preset_loader
from benchmarks.measure import median_ratio
from benchmarks.samples import make_shards
from podscale.bench.input_rates import OpenPipeline, Rate, measure_rounds
from podscale.config.data import DataSection
from podscale.data.decode_index import SUFFIX
from podscale.data.loaders.build_loader import unavailable_reason
from podscale.data.native import CropDecoder, kernels
from podscale.data.shard_set import ShardSet, Split
from podscale.data.sharding.decode_indexes import index_shards
from podscale.errors import InputError

ROUNDS = 5
SIZE = 224
"""Side of the images of the main page, pixels."""
PACKAGES = (
    *("torch", "torchvision", "nvidia-dali-cuda130", "pillow", "simplejpeg", "numpy"),
    *("timm", "webdataset", "tensorflow-cpu", "opencv-python-headless"),
)
READING = """`input.loader=auto` takes `native` on CPUs, without the extension `reference`; both have PIL's pixels to
the bit. The extension decodes only the blocks under a crop. With a decode index, which sharding writes by default, it
does not read the Huffman codes before the crop either. With kept coefficients (`input.decoded_cache_bytes`) it reads no
Huffman codes after the first epoch. The reference decodes down to the crop with simplejpeg, and PIL
resizes. On GPUs `auto` takes DALI, whose resized pixels are not PIL's."""

REFERENCE = "podscale reference (PIL's pixels)"
USUAL = "PIL + torchvision transforms"
DALI = "podscale dali (CPU)"
TF_DATA = "tf.data, decode_and_crop_jpeg (without antialiasing)"
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
    DALI: partial(podscale_loader, "dali"),
    USUAL: others.pil_transforms,
    "PIL + timm's transforms (not timm's loader)": others.timm_transforms,
    "torchvision decode_jpeg + tensor transforms": others.tensor_transforms,
    "webdataset, PIL + torchvision transforms": others.webdataset,
    TF_DATA: others.tf_data,
}
"""Pipelines by the filter that they resize with."""
PIPELINES: dict[str, Pipeline] = {
    f"{name}{ending}": build(interpolation)
    for interpolation, ending in FILTERS.items()
    for name, build in FILTERED.items()
} | {
    "simplejpeg + OpenCV linear": others.opencv,
    "(decoding alone, simplejpeg)": others.decode_only,
}
BASES = (USUAL, DALI, TF_DATA)
"""Pipelines that the others are compared with."""


def measure(pipelines: Mapping[str, OpenPipeline], images: int) -> tuple[dict[str, list[Rate]], dict[str, Exception]]:
    """Return the speeds of each pipeline, one a round, and the reason of each pipeline that cannot run here."""
    rates, reasons = measure_rounds(pipelines, ROUNDS, images=max(1, images // ROUNDS))
    for name, error in reasons.items():
        if name == REFERENCE or not isinstance(error, ImportError | InputError):
            raise error
    return rates, reasons


def kept_bytes(split: Split) -> tuple[float, float]:
    """Return the mean bytes of an image in the decoded cache: as coefficients, and as pixels."""
    pixels = (3 * split.column("height").astype(np.int64) * split.column("width")).tolist()
    records = [split.read(row) for row in range(len(split))]
    packed = CropDecoder(1).pack(records, pixels)
    kept = [size if one is None else one.nbytes for one, size in zip(packed, pixels, strict=True)]
    return sum(kept) / len(kept), sum(pixels) / len(pixels)


def link(directory: Path, target: Path) -> Path:
    """Fill a folder with links to the files of a shard set, without its decode indexes."""
    for path in directory.rglob("*"):
        if path.is_file() and path.suffix != SUFFIX:
            place = target / path.relative_to(directory)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(path.resolve())
    return target


def sparser(interval: int) -> str:
    """Return the name of the pipeline with an index entry at every `interval`-th MCU."""
    return f"{INDEXED.partition(' (')[0]} of every {interval} MCUs (PIL's pixels)"


def open_indexed(directory: Path, scratch: Path, intervals: Sequence[int]) -> tuple[dict[int, Split], str]:
    """Return the training split with a decode index of each interval, and a description of the sizes."""
    splits, sizes = {}, []
    for interval in intervals:
        folder = link(directory, scratch / str(interval) / directory.name)
        if not unavailable_reason("native", "cpu"):
            written = index_shards(folder, interval)
            share = written.index_bytes / written.shard_bytes
            sizes.append(f"; index of every {interval} MCUs: {share:.1%} of the shards")
        splits[interval] = ShardSet.open(folder).split("train")
    return splits, "".join(sizes)


def table(directory: Path, options: argparse.Namespace, scratch: Path) -> list[str]:
    """Return the table of one shard set."""
    images, batch, size = options.images, options.batch, options.size
    split = ShardSet.open(link(directory, scratch / "plain" / directory.name)).split("train")
    by_interval, index = open_indexed(directory, scratch, options.intervals)
    indexed = by_interval[options.intervals[0]]
    kilobytes = split.column("size").mean() / 1000
    lines = [f"{len(split):,} images of {kilobytes:.1f} kB on average, {size} px{index}:", ""]
    lines += ["| pipeline | images per CPU-second | x PIL + torchvision | x DALI CPU | x tf.data | images/s |"]
    lines += ["|---|---:|---:|---:|---:|---:|"]
    alone = {f"(crops alone with index, {version} kernels)": crops_alone(version) for version in kernels()}
    pipelines = {
        name: partial(pipeline, indexed if "with index" in name else split, batch, size)
        for name, pipeline in {**PIPELINES, **alone}.items()
    }
    for interval in options.intervals[1:]:
        pipelines[sparser(interval)] = partial(podscale_loader("native"), by_interval[interval], batch, size)
    rates, reasons = measure(pipelines, images)
    for name in pipelines:
        if name in reasons:
            lines.append(f"| {name} | not measured: {reasons[name]} | | | | |")
            continue
        best, ending = max(rates[name]), FILTERS["bicubic" if name.endswith(FILTERS["bicubic"]) else "bilinear"]
        bases = [rates.get(base + ending, []) for base in BASES]
        cells = [f"{_ratio(rates[name], base):.2f}" if base else "" for base in bases]
        lines.append(f"| {name} | {best.per_cpu_second:.0f} | {' | '.join(cells)} | {best.per_second:.0f} |")
    lines.append("")
    if rates[INDEXED] and rates[NATIVE]:
        ratios = [_ratio(rates[INDEXED + ending], rates[NATIVE + ending]) for ending in FILTERS.values()]
        lines += [f"`native` with index to `native` without: {ratios[0]:.2f}, bicubic {ratios[1]:.2f}.", ""]
    if rates[COEFFICIENTS]:
        kept, pixels = (size / 1000 for size in kept_bytes(split))
        lines += [f"An image in memory takes {kept:.1f} kB as coefficients, {pixels:.1f} kB as pixels.", ""]
    if options.small or size == SIZE:  # the recipes have sides of their own
        lines += recipes(indexed, images, batch)
    if not unavailable_reason("native", "cpu"):
        lines += [*limits(indexed, images, size), ""]
    return lines


def recipes(split: Split, images: int, batch: int) -> list[str]:
    """Return the table of the augmentation recipes."""
    pipelines: dict[str, OpenPipeline] = {}
    for preset, recipe in RECIPES.items():
        loader, side = preset_loader(preset)
        pipelines[preset] = partial(loader, split, batch, side)
        pipelines[recipe.authors + preset] = partial(recipe.pipeline, split, batch, side)
    rates, reasons = measure(pipelines, images)
    lines = ["| recipe | podscale native, images per CPU-second | its authors' transforms | ratio |"]
    lines += ["|---|---:|---:|---:|"]
    for preset, recipe in RECIPES.items():
        names = (preset, recipe.authors + preset)
        if reason := next((reasons[name] for name in names if name in reasons), None):
            lines.append(f"| {preset} | not measured: {reason} | | |")
            continue
        ours, theirs = (max(rates[name]).per_cpu_second for name in names)
        ratio = _ratio(*(rates[name] for name in names))
        lines.append(f"| {preset} | {ours:.0f} | {recipe.authors}: {theirs:.0f} | {ratio:.2f} |")
    return [*lines, ""]


def _ratio(own: list[Rate], others: list[Rate]) -> float:
    return median_ratio([one.per_cpu_second for one in own], [one.per_cpu_second for one in others])


def main() -> None:
    parser = Options(__doc__)
    parser.add_argument("shard_sets", nargs="*", metavar="SHARD_SET")
    parser.add_size("--images", full=2000, small=12, type=int, help="images of a measurement")
    parser.add_size("--batch", full=64, small=4, type=int)
    parser.add_size("--size", full=SIZE, small=32, type=int, help=f"side; other than {SIZE}: a page of its own")
    parser.add_size(
        "--intervals",
        full=[DataSection().decode_index],
        small=[8, 16],
        type=int,
        nargs="+",
        help="MCUs between two entries of a decode index; the first is that of all tables",
    )
    options = parser.read()
    if not options.shard_sets and not options.small:
        parser.error("SHARD_SET: missing. Give the shard sets to read.")
    lines = head("Input: images per CPU-second", PACKAGES)
    with tempfile.TemporaryDirectory() as scratch:
        for directory in options.shard_sets or [str(make_shards(Path(scratch), images=24))]:
            lines += table(Path(directory), options, Path(scratch))
    page = "input.md" if options.small or options.size == SIZE else f"input-{options.size}.md"
    write_results(options.results, page, [*lines, READING])


if __name__ == "__main__":
    main()
