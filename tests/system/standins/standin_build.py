"""Stand-in for the packer: it writes only a manifest of 100 training and 20 validation images."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from podscale.config.identity import data_fingerprint
from podscale.data.manifest import MANIFEST_FILE, Shard, ShardSetManifest, SplitSummary, classes_sha256
from podscale.errors import InputError
from podscale.util.files import write_json
from podscale.util.progress_reports import ProgressUpdate


@dataclass
class BuildResult:
    complete_manifest: ShardSetManifest
    reused: bool
    messages: tuple[str, ...] = ()


def build_shard_set(data, directory, part, *, workers, verify=False, progress=None, observer=None):
    if os.environ.get("STANDIN_SHARD") == "empty":
        raise InputError("the source is empty\nput one folder per class there")
    if (directory / MANIFEST_FILE).exists():
        return BuildResult(ShardSetManifest.parse((directory / MANIFEST_FILE).read_text(), "manifest"), True)
    directory.mkdir(parents=True, exist_ok=True)
    if os.environ.get("STANDIN_SHARD") == "wait":
        Path(os.environ["STANDIN_PIDS"]).write_text(str(os.getpid()))
        time.sleep(600)
    for done in range(0, 121, 40):
        if progress is not None:
            progress(ProgressUpdate("pack", done, 120))
    splits = {
        name: SplitSummary(count, count * 300, (count // 2, count // 2), "0" * 64, (Shard("s", count, 1, "0" * 64),))
        for name, count in (("train", 100), ("validation", 20))
    }
    manifest = ShardSetManifest(
        1, data_fingerprint(data), "plan", data.model_dump(mode="json"), classes_sha256(["a", "b"]), splits
    )
    write_json(directory / "classes.json", ["a", "b"])
    manifest.write(directory)
    return BuildResult(manifest, False)
