"""Cost of telemetry and checkpoints in a real training: the digits on two processes, and the state of a ResNet-50.

    OMP_NUM_THREADS=1 python -m benchmarks.telemetry [--parts telemetry abuse checkpoints]

Parts: overhead.py (telemetry), abuse.py, saves.py (checkpoints). A few epochs are timed first, and the lengths of the
measured trainings follow from their step time.
"""

import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from benchmarks.conditions import head
from benchmarks.harness import Options, write_results
from benchmarks.telemetry import abuse, overhead, saves
from benchmarks.telemetry.training import StepPace, measure_pace
from podscale.config import RunConfig
from podscale.stages import local

PACKAGES = ("torch", "numpy", "prometheus-client")
PARTS = {
    "telemetry": ("telemetry.md", "Telemetry"),
    "abuse": ("telemetry-abuse.md", "Abuse of the metrics endpoint"),
    "checkpoints": ("checkpoint.md", "Checkpoints"),
}
"""Page and title of each part."""


def main() -> None:
    parser = Options(__doc__)
    parser.add_size("--pairs", full=200, small=3, type=int, help="blocks of steps with telemetry, and without")
    parser.add_size("--block", full=0.25, small=0.02, type=float, help="approximate seconds of a block")
    parser.add_size("--rounds", full=18, small=2, type=int, help="slots of each kind: quiet, bystander, run")
    parser.add_size("--slot", full=5.0, small=0.2, type=float, help="seconds of a slot")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure")
    options = parser.read()
    with tempfile.TemporaryDirectory() as name:
        workspace = Path(name)
        document = digits(workspace, small=options.small)
        sharded = local.shard(RunConfig.model_validate(document).data, str(workspace))
        assert sharded is not None, "a call without `part` packs the whole shard set"
        pace = None
        for part, (page, title) in PARTS.items():
            if part not in options.parts:
                continue
            lines = head(title, PACKAGES)
            if part == "checkpoints":
                lines += saves.table(document, sharded.location, small=options.small)
            else:
                config = RunConfig.model_validate({**document, "run": {**document["run"], "id": part}})
                pace = pace or measure_pace(config, sharded.location)
                lines += measure(part, config, sharded.location, pace, options)
            write_results(options.results, page, lines)


def measure(part: str, config: RunConfig, shard_set: str, pace: StepPace, options: Namespace) -> list[str]:
    """Return the table of a part, with blocks and slots of at least a few steps."""
    scratch = Path(config.run.workspace, part)
    scratch.mkdir()
    if part == "telemetry":
        block = max(2, round(options.block / pace.step_seconds))
        return overhead.table(config, shard_set, scratch, options.pairs, block, pace)
    slot = max(options.slot, 4 * abuse.STEPS * pace.step_seconds)
    return abuse.table(config, shard_set, scratch, abuse.Schedule(options.rounds, slot), pace, small=options.small)


def digits(workspace: Path, *, small: bool) -> dict[str, Any]:
    """Return the run document of the measured training."""
    return {
        "run": {"id": "telemetry", "workspace": str(workspace)},
        "data": {"source": "digits"},
        "input": {"image_size": 8 if small else 16},
        "model": {"name": "resnet18", "stem": "small", "width": 4 if small else 16},
        "train": {"epochs": 1 if small else 3, "global_batch": 64},
        "evaluate": {"every_epochs": 10_000},
        "checkpoint": {"every_epochs": 10_000},
        "launch": {"processes": 2},
    }


if __name__ == "__main__":
    main()
