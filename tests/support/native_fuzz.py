"""Fuzzing of the native decoder: `python -m tests.support.native_fuzz [--minutes N]`, or `make fuzz`.

Builds native/fuzz with AddressSanitizer and the counters of libFuzzer, which needs cargo but no nightly compiler. Runs
it from small JPEGs of every kind, or from the corpus of the run before. Then it crops each file of the corpus by the
reference path and by Pillow alone too: the pixels must be the same, or the native decoder must refuse the file. So the
differences that are looked for are at places that the coverage led to. Writes benchmarks/results/native-fuzz.md: this
run, and the sum of the runs of these sources on this machine.
"""

import argparse
import hashlib
import io
import json
import os
import re
import resource
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.conditions import head
from benchmarks.harness import RESULTS, ROOT, write_results
from podscale.data.decode import BadRecord, decode
from podscale.data.native import CropDecoder
from tests.support.jpeg_crops import SAMPLINGS, as_record, damage, encoded, long_codes, random_crops
from tests.support.loading import special_images
from tests.support.native_crops import SIZE, same_or_refused

FOLDER = ROOT / "native" / "fuzz"
TARGET = "x86_64-unknown-linux-gnu"
PROGRAM = FOLDER / "target" / TARGET / "release" / "podscale-native-fuzz"
CORPUS = FOLDER / "corpus"
RUNS = FOLDER / "runs.json"
"""Counts of earlier runs: digest of the sources -> runs, CPU seconds and inputs."""
COVERAGE = ("level=4", "inline-8bit-counters", "pc-table", "trace-compares")
CHOICE_BYTES = 8
"""Bytes before the file of an input: they choose the crop (see native/fuzz/src/main.rs)."""
MAX_BYTES = 4096
SHAPES = ((1, 1), (7, 6), (16, 16), (17, 18), (31, 33), (48, 64))
LARGEST = 2**20
"""Pixels of an image that Pillow decodes for the comparison."""
LIMITS = ("-timeout=10", "-rss_limit_mb=2048")
"""Most seconds of an input, and most memory of the fuzzer in MiB; more counts as a crash."""


def build() -> None:
    """Build the fuzzer. A stable compiler takes flags of unstable options with RUSTC_BOOTSTRAP."""
    flags = ["-Cpasses=sancov-module", "--cfg fuzzing", "-Zsanitizer=address"]
    flags += [f"-Cllvm-args=-sanitizer-coverage-{option}" for option in COVERAGE]
    environment = {**os.environ, "RUSTC_BOOTSTRAP": "1", "RUSTFLAGS": " ".join(flags)}
    subprocess.run(["cargo", "build", "--release", "--target", TARGET], cwd=FOLDER, env=environment, check=True)


def seed_files() -> list[bytes]:
    """Return small JPEGs of every kind, and damaged ones."""
    generator, files = np.random.default_rng(0), list(special_images().values())
    for kind in SAMPLINGS:
        good = [encoded(kind, *shape) for shape in SHAPES]
        files += good + [bytes(damage(generator, as_record(good[-1]), attempt)) for attempt in range(8)]
    files += [long_codes(generator, *shape) for shape in SHAPES]
    return [file for file in files if len(file) <= MAX_BYTES - CHOICE_BYTES]


def write_seeds(folder: Path) -> None:
    """Write the seeds, each behind the bytes that choose a crop."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(1)
    for number, file in enumerate(seed_files()):
        (folder / f"seed-{number}").write_bytes(generator.bytes(CHOICE_BYTES) + file)


def fuzz(corpus: Path, minutes: float) -> dict[str, int]:
    """Run the fuzzer, and return its counts and CPU seconds. Raises CalledProcessError if an input crashes it."""
    seconds = round(minutes * 60)
    command = [PROGRAM, corpus, f"-max_len={MAX_BYTES}", f"-max_total_time={seconds}", "-print_final_stats=1", *LIMITS]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([*command, f"-artifact_prefix={corpus.parent}/"], stderr=subprocess.PIPE, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    sys.stderr.write(done.stderr[-4000:])
    done.check_returncode()
    [inputs] = re.findall(r"number_of_executed_units: *(\d+)", done.stderr)
    edges = re.findall(r"cov: (\d+)", done.stderr)[-1]
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"inputs": int(inputs), "edges": int(edges), "cpu_seconds": round(cpu)}


def source_digest() -> str:
    """Return the digest of what the fuzzer is built from."""
    sources = [*(FOLDER.parent / "src").rglob("*.rs"), *(FOLDER / "src").rglob("*.rs"), FOLDER / "Cargo.lock"]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(sources))).hexdigest()


def add_run(file: Path, digest: str, counts: dict[str, int]) -> dict[str, int]:
    """Add a run to those of the same sources in a file, and return their sums."""
    runs = json.loads(file.read_text()) if file.exists() else {}
    before = runs.get(digest, {})
    sums = {"runs": 1, "cpu_seconds": counts["cpu_seconds"], "inputs": counts["inputs"]}
    sums = {name: value + before.get(name, 0) for name, value in sums.items()}
    file.write_text(json.dumps({digest: sums}))
    return sums


def compare(corpus: Path) -> Counter[str]:
    """Crop the files of a corpus natively, by the reference path and by Pillow; return the number of files by outcome.

    Raises AssertionError if the native decoder gives other pixels, or pixels of a crop that the reference path refuses.
    """
    decoder, counts = CropDecoder(1), Counter[str]()
    for path in sorted(corpus.iterdir()):
        record = as_record(path.read_bytes()[CHOICE_BYTES:])
        shape = declared_shape(record)
        generator = np.random.default_rng(len(record))
        if shape is None or shape[0] * shape[1] > LARGEST:
            counts["without a size that Pillow reads, or too large"] += 1
            continue
        crops = random_crops(generator, *shape, SIZE)
        try:
            equal = same_or_refused(decoder, record, shape, crops)
        except AssertionError as error:
            raise AssertionError(f"{path}: {error}") from error
        if equal == len(crops):
            counts["all crops decoded"] += 1
        elif equal:
            counts["crops of its intact part decoded, others refused"] += 1
        else:
            decision = "decoded" if is_decodable(record) else "refused too"
            counts[f"refused natively, {decision} by the reference path"] += 1
    return counts


def declared_shape(record: np.ndarray) -> tuple[int, int] | None:
    """Return height and width as Pillow reads them; None if it does not know the file."""
    try:
        with Image.open(io.BytesIO(record.tobytes())) as image:
            return image.height, image.width
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None


def is_decodable(record: np.ndarray) -> bool:
    try:
        decode(record)
    except BadRecord:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="time of the fuzzer (default: 10)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    options = parser.parse_args()
    build()
    lines = head("Fuzzing of the native decoder", ("pillow", "numpy"), f"make fuzz MINUTES={options.minutes:g}")
    if not CORPUS.exists():
        write_seeds(CORPUS)
    at_start = len(list(CORPUS.iterdir()))
    digest = source_digest()
    counts = fuzz(CORPUS, options.minutes)
    sums = add_run(RUNS, digest, counts)
    compared = compare(CORPUS)
    write_results(options.results, "native-fuzz.md", [*lines, *describe(at_start, counts, sums, compared)])


def describe(at_start: int, counts: dict[str, int], sums: dict[str, int], compared: Counter[str]) -> list[str]:
    """Return the lines of the page."""
    rows = {
        "CPU seconds": (counts["cpu_seconds"], sums["cpu_seconds"]),
        "inputs": (counts["inputs"], sums["inputs"]),
    }
    return [
        "libFuzzer with AddressSanitizer, debug assertions and overflow checks: headers, tables, scans, decode",
        "indexes, packed coefficients and crop boxes (native/fuzz/src/main.rs). A crash, a read out of bounds, or a",
        "difference between versions of the kernels would have ended it without this page.",
        "",
        "Not fuzzed: files of more than 4,096 bytes, and headers of more than 2^20 pixels; index files other than",
        "those of the file itself with one byte changed (the crop is computed and not compared); impossible crops;",
        "resized rectangles with sides other than 20 to 51 pixels. Tests have stale indexes and those of other images",
        "(tests/unit/data/loaders/test_decode_index.py), impossible crops (tests/unit/data/test_native.py), and long",
        "images (tests/unit/data/test_native_sizes.py).",
        "",
        f"| | this run | {sums['runs']} runs of these sources |",
        "|---|---:|---:|",
        *(f"| {name} | {run:,} | {total:,} |" for name, (run, total) in rows.items()),
        "",
        f"{counts['edges']:,} edges of the program were reached. The corpus had {at_start:,} files at the start and",
        f"{compared.total():,} at the end.",
        "",
        "Then each file of the corpus is cropped natively, by the reference path and by Pillow alone, unless Pillow",
        "refuses the file. A difference of a pixel, or a crop that only the native decoder decodes, would stop it.",
        "",
        "| files | |",
        "|---|---:|",
        *(f"| {name} | {value:,} |" for name, value in compared.most_common()),
    ]


if __name__ == "__main__":
    main()
