"""The plan of `podscale run --dry-run`."""

import re
from pathlib import Path

from podscale.cli.dry_run import describe_run
from podscale.config import load
from podscale.runs import RunDirectory


def test_a_training_continues_from_its_newest_checkpoint_whatever_lies_beside_it(tmp_path: Path) -> None:
    config = load(None, [f"run.workspace={tmp_path}"])
    for name in ("step-40", "step-120", "step-200.old"):
        (RunDirectory.for_config(config).checkpoints / name).mkdir(parents=True)
    assert re.search("^train .* step 120$", describe_run(config), re.MULTILINE)
