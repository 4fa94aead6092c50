"""`podscale bench train`: rate and parts of a training on this machine."""

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from podscale import config
from podscale.bench.sweep import SweepRow, SweepSettings, named_sweep, run_sweep, variant_grid
from podscale.bench.train_report import format_report, write_report
from podscale.config import RunConfig
from podscale.errors import InputError
from podscale.pipelines import presets
from podscale.util import host_info

RESNET50 = (
    "model.name=resnet50",
    "input.image_size=224",
    "train.global_batch=256",
    "train.precision=bf16",
    "train.optimizer.name=lars",
)
"""What is measured where no document is named."""


def run_bench_train(
    document: str | None,
    changes: Sequence[str],
    *,
    sweep: str | None,
    vary: Sequence[str],
    settings: SweepSettings,
    out: Path,
    command: str,
) -> None:
    """Measures the updates of a training; writes train-<device>.md and .json to the folder `out`."""
    if not out.is_dir():
        raise InputError("the folder does not exist", field="--out", got=str(out))
    if sweep is not None and vary:
        raise InputError("a sweep is one or the other", field="--sweep, --vary")
    preset = presets.resolve_preset(document) if document is not None else None
    given = [*(() if document is not None else RESNET50), *changes]

    def base(more: list[str]) -> RunConfig:
        return config.load(preset, [*given, *more])

    real = settings.shard_set is not None
    variants = named_sweep(sweep, real_images=real) if sweep is not None else variant_grid(vary, real_images=real)
    name = f"train-{device_slug()}"
    table = out / f"{name}.md"

    shown = " ".join(shlex.quote(Path(word).name if "/" in word else word) for word in shlex.split(command))

    def measured(row: SweepRow, rows: list[SweepRow]) -> None:
        write_report(table, shown, rows)
        what = f"{row.found['images_per_second']:,.1f} images/s" if row.found else row.reason
        print(f"{row.name}: {what}", file=sys.stderr, flush=True)

    rows = run_sweep(base, variants, settings, out / f"{name}.json", measured)
    print("\n".join(format_report(shown, rows)))


def device_slug() -> str:
    """The first device of this machine as part of a file's name."""
    names = host_info.gpu_names()
    name = names[0].removeprefix("NVIDIA ") if names else "cpu"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
