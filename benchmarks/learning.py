"""Learning on real photographs: what each technique for large batches does to accuracy, at a size that two cores train.

    python benchmarks/learning.py imagenette224.tar --work FOLDER [--parts a b c d e] [--jobs 2]

Trains what has no record in FOLDER yet, each as `podscale train` does, and writes results/learning.md and its plots
from all records. Stopped at any moment, the same command goes on. About a minute of one core a training. Without
images the results are written again from the records alone.

A part is never mixed from versions of the code: its records belong to the git tree of podscale/ that it began with, and
where another one is checked out, only --restart begins it anew.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

from conditions import head
from learning_parts import DOCUMENTS, PARTS, due
from learning_results import write_results
from trials import Record, Records, Runner, Settings, Trial, code_version, run_due, short


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path, nargs="?", help="archive or folder of imagenette")
    parser.add_argument("--work", type=Path, required=True, help="folder of shards and records, outside the repository")
    parser.add_argument("--parts", nargs="*", choices=sorted(PARTS), default=sorted(PARTS))
    parser.add_argument("--jobs", type=int, default=2, help="trainings side by side, one thread each")
    parser.add_argument("--restart", action="store_true", help="begin these parts anew with the code as it is now")
    arguments = parser.parse_args()
    first = head("Learning", ("torch", "torchvision", "numpy"))
    place = Place(arguments.work.resolve())
    if arguments.images is not None:
        train(place, arguments.images.resolve(), arguments.parts, jobs=arguments.jobs, restart=arguments.restart)
    write_results(first, {name: place.records_of(name) for name in PARTS if name in place.parts})


def train(place: "Place", images: Path, parts: list[str], *, jobs: int, restart: bool) -> None:
    """Trains what these parts still need."""
    commit, code = code_version()
    documents = {**DOCUMENTS, "photographs": {**DOCUMENTS["photographs"], "data.source": str(images)}}
    runner = Runner(place.folder, documents, commit, code)
    place.keep(DOCUMENTS)
    asked = [PARTS[name] for name in parts]
    for name in parts:
        place.begin(name, code, restart=restart)
    for family in sorted({family for part in asked for family in part.families}):
        runner.shard(family)
    run_due(partial(due, asked), Records(place.records, code), partial(told, runner), jobs)


def told(runner: Runner, trial: Trial) -> Record:
    """Trains, and says how it ended."""
    record = runner.train(trial)
    ended = record.error if record.top1 is None else f"{record.top1:.2%}"
    settings = short(trial.settings) or "the document as it is"
    print(f"{settings}, seed {trial.seed}: {ended} in {record.cpu_seconds:.0f} CPU seconds", flush=True)
    return record


class Place:
    """The work folder: shards, records, and which version of the code each part belongs to."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.records, self._path = folder, folder / "records", folder / "parts.json"
        self.parts: dict[str, str] = json.loads(self._path.read_text()) if self._path.exists() else {}

    def keep(self, documents: dict[str, Settings]) -> None:
        """Binds the folder to the documents that settings stand on top of; ends the program where they have changed."""
        path, text = self.folder / "documents.json", json.dumps(documents, indent=1)
        if path.exists() and path.read_text() != text:
            sys.exit(f"{path}: the records here are of other documents than the script's; take another --work folder")
        path.write_text(text)

    def begin(self, part: str, code: str, *, restart: bool) -> None:
        """Lays a part down to a version of the code; ends the program where it began with another one."""
        if not restart and self.parts.get(part, code) != code:
            sys.exit(
                f"part {part} began with podscale/ at git tree {self.parts[part][:12]}, this is {code[:12]}: check out "
                "the former, or begin the part anew with --restart"
            )
        self.parts[part] = code
        self._path.write_text(json.dumps(self.parts, indent=1))

    def records_of(self, part: str) -> Records:
        return Records(self.records, self.parts[part])


if __name__ == "__main__":
    main()
