"""What telemetry and checkpoints cost a real training: the digits on two processes, and a ResNet-50's state.

    OMP_NUM_THREADS=1 python benchmarks/telemetry.py [--epochs 60] [--parts telemetry abuse checkpoints]

Its parts: overhead.py (telemetry), abuse.py, saves.py (checkpoints).
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from abuse import abuse
from conditions import RESULTS, head, publish
from overhead import overhead
from saves import checkpoints

from podscale.config import RunConfig
from podscale.stages.local import shard

PARTS = ("telemetry", "abuse", "checkpoints")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=float, default=60, help="of digits, 22 steps each")
    parser.add_argument("--block", type=int, default=5, help="steps between switches")
    parser.add_argument("--slot", type=float, default=5, help="seconds between quiet and abuse")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure")
    options = parser.parse_args()
    packages = ["torch", "numpy", "prometheus-client"]
    lines = head("Telemetry", packages)
    saves = head("Checkpoints", packages)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        document: dict[str, Any] = {
            "run": {"id": "telemetry", "workspace": name},
            "data": {"source": "digits"},
            "input": {"image_size": 16},
            "model": {"name": "resnet18", "stem": "small", "width": 16},
            "train": {"epochs": options.epochs, "global_batch": 64},
            "evaluate": {"every_epochs": 10_000},
            "checkpoint": {"every_epochs": 10_000},
            "launch": {"processes": 2},
        }
        config = RunConfig.model_validate(document)
        found = shard(config.data, name)
        assert found is not None
        lines.append(
            f"Digits on two gloo processes, {options.epochs:g} epochs; on and off in blocks of {options.block} steps."
        )
        if "telemetry" in options.parts:
            lines += ["", *overhead(config, found.location, scratch, options.block)]
            publish(RESULTS / "telemetry.md", lines)
        if "abuse" in options.parts:
            lines = head("Abuse of the metrics endpoint", packages)
            publish(RESULTS / "telemetry-abuse.md", [*lines, *abuse(config, found.location, scratch, options.slot)])
        if "checkpoints" in options.parts:
            document["train"]["epochs"] = 6
            publish(RESULTS / "checkpoint.md", [*saves, *checkpoints(document, found.location)])


if __name__ == "__main__":
    main()
