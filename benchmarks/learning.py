"""Learning: what each technique for large batches does to accuracy, at a size that two cores train.

    python benchmarks/learning.py imagenette224.tar --work FOLDER [--parts a b c d e] [--jobs 2]
    python benchmarks/learning.py digits --work FOLDER [--parts a b]

Trains what has no record in FOLDER yet, each as `podscale train` does, and writes results/learning.md (photographs: an
archive or folder of imagenette) or results/learning-digits.md (the digits that come with Podscale) and the plots from
all records. Stopped at any moment, the same command goes on. A training takes about a minute of one core with
photographs, ten seconds with digits. Without a source the results are written again from the records alone.

A part is never mixed from versions of the code: its records belong to the git tree of podscale/ that it began with, and
where another one is checked out, only --restart begins it anew.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import learning_digits
import learning_photographs
from conditions import head
from learning_parts import Base, Proof, due
from learning_results import write_results
from trials import Record, Records, Runner, Trial, code_version, run_due, short

PROOFS = (learning_photographs.PROOF, learning_digits.PROOF)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", help="archive or folder of imagenette, or the word digits")
    parser.add_argument("--work", type=Path, required=True, help="folder of shards and records, outside the repository")
    parser.add_argument("--parts", nargs="*", help="of the proof on this source; default: all")
    parser.add_argument("--jobs", type=int, default=2, help="trainings side by side, one thread each")
    parser.add_argument("--restart", action="store_true", help="begin these parts anew with the code as it is now")
    arguments = parser.parse_args()
    heads = {proof.file: head(proof.title, ("torch", "torchvision", "numpy")) for proof in PROOFS}
    place = Place(arguments.work.resolve())
    if arguments.source is not None:
        proof = PROOFS[arguments.source == "digits"]
        parts = arguments.parts or list(proof.parts)
        if unknown := set(parts) - set(proof.parts):
            parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(proof.parts)}")
        train(place, proof, arguments.source, parts, jobs=arguments.jobs, restart=arguments.restart)
    for proof in PROOFS:
        if found := place.records_of(proof):
            write_results(heads[proof.file], proof, found)


def train(place: "Place", proof: Proof, source: str, parts: list[str], *, jobs: int, restart: bool) -> None:
    """Trains what these parts still need."""
    commit, code = code_version()
    images = source if source == "digits" else str(Path(source).resolve())
    runner = Runner(place.folder, {proof.base.family: {**proof.base.document, "data.source": images}}, commit, code)
    place.keep(proof.base)
    for part in parts:
        place.begin(proof, part, code, restart=restart)
    runner.shard(proof.base.family)
    asked = [proof.parts[part] for part in parts]
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

    def keep(self, base: Base) -> None:
        """Binds the folder to the document that settings stand on top of; ends the program where it has changed."""
        path = self.folder / f"{base.family}.json"
        text = json.dumps(base.document, indent=1)
        if path.exists() and path.read_text() != text:
            sys.exit(f"{path}: the records here are of another document than the script's; take another --work folder")
        path.write_text(text)

    def begin(self, proof: Proof, part: str, code: str, *, restart: bool) -> None:
        """Lays a part down to a version of the code; ends the program where it began with another one."""
        name = f"{proof.base.family} {part}"
        if not restart and self.parts.get(name, code) != code:
            sys.exit(
                f"part {part} began with podscale/ at git tree {self.parts[name][:12]}, this is {code[:12]}: check out "
                "the former, or begin the part anew with --restart"
            )
        self.parts[name] = code
        self._path.write_text(json.dumps(self.parts, indent=1))

    def records_of(self, proof: Proof) -> dict[str, Records]:
        """Those of each part that has begun."""
        codes = {part: self.parts.get(f"{proof.base.family} {part}") for part in proof.parts}
        return {part: Records(self.records, code) for part, code in codes.items() if code is not None}


if __name__ == "__main__":
    main()
