"""Training on photographs by each loader: accuracy, digest of the weights, wait for images, CPU seconds.

    python -m benchmarks.loaders imagenette224.tar

Runs `podscale run imagenette` for a few epochs with the loader `reference`, which decodes down to the crop with
simplejpeg and resizes with Pillow, and with `native`, with its decode index and without. The shards are packed before
and are not counted. Takes about five minutes on two idle cores. The small form trains a narrow model on generated
images.
"""

import hashlib
import resource
import tempfile
from pathlib import Path
from typing import NamedTuple

from safetensors.numpy import load_file

from benchmarks.conditions import head
from benchmarks.harness import Options, write_results
from benchmarks.imagenette import PACKAGES, SMALL, run
from benchmarks.samples import write_archive
from podscale.evaluation import evaluation_json
from podscale.evaluation.history import read_history
from podscale.runs import read_outcomes

LOADERS = {
    "`reference`": ("input.loader=reference",),
    "`native` without decode index": ("input.loader=native", "data.decode_index=null"),
    "`native` with decode index": ("input.loader=native",),
}
"""Changes of the preset, by the name of the row."""


class Measured(NamedTuple):
    """A run: seconds of the train stage, its wait for images, CPU seconds of the whole run, final scores, sha256 of the
    weights."""

    seconds: float
    wait: float
    cpu_seconds: float
    top1: float
    loss: float
    weights: str


def main() -> None:
    parser = Options(__doc__)
    parser.add_argument("images", type=Path, nargs="?", help="archive or folder of imagenette")
    parser.add_size("--epochs", type=int, full=3, small=1)
    options = parser.read()
    if options.images is None and not options.small:
        parser.error("images: missing. Give the archive or folder of imagenette.")
    lines = head("Training by each loader", PACKAGES)
    with tempfile.TemporaryDirectory() as scratch:
        images = (options.images or write_archive(Path(scratch, "generated.tar"), images=96)).resolve()
        small = SMALL if options.small else ()
        found = {
            name: measure(Path(scratch, str(number)), images, (*small, f"train.epochs={options.epochs}", *changes))
            for number, (name, changes) in enumerate(LOADERS.items())
        }
    write_results(options.results, "loaders.md", [*lines, *describe(found, options.epochs)])


def measure(folder: Path, images: Path, changes: tuple[str, ...]) -> Measured:
    """Pack the shards, then measure the run."""
    run(folder, images, changes, "shard")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run(folder, images, changes)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = folder / "runs" / "imagenette"
    history = read_history(done / "metrics.jsonl")
    scores = evaluation_json.read_evaluation(done / "evaluation.json").scores
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    seconds = read_outcomes(done / "outcome.json")["train"].seconds
    assert scores.loss is not None
    weights = weights_digest(done / "model" / "model.safetensors")
    return Measured(seconds, history.phases["data_wait"], cpu, scores.top1, scores.loss, weights)


def weights_digest(file: Path) -> str:
    """Return the sha256 of all arrays of a model, in the order of their names."""
    digest = hashlib.sha256()
    for name, array in sorted(load_file(file).items()):
        digest.update(name.encode() + array.tobytes())
    return digest.hexdigest()


def describe(found: dict[str, Measured], epochs: int) -> list[str]:
    equal = len({one.weights for one in found.values()}) == 1
    weights = "The final weights are the same to the bit." if equal else "The final weights DIFFER."
    return [
        f"`podscale run imagenette` for {epochs} epochs: a ResNet-18 of width 32 at 64 px on two processes, which also",
        f"decode. All loaders give the same pixels. {weights}",
        "",
        "| loader | training, s | wait of a rank for images, s | CPU seconds of the run | top-1 | loss, nats "
        "| sha256 of the weights |",
        "|---|---:|---:|---:|---:|---:|---|",
        *(
            f"| {name} | {one.seconds:.1f} | {one.wait:.1f} | {one.cpu_seconds:.0f} | {one.top1:.2%} | {one.loss:.6f} "
            f"| `{one.weights[:16]}` |"
            for name, one in found.items()
        ),
    ]


if __name__ == "__main__":
    main()
