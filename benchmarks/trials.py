"""One training of the learning proof: its settings, its run through `podscale train`, and the record it leaves.

A trial is known by its settings, so parts of the proof that need the same training share it. Its record is one JSON
file, written when the training has ended; a trial with a record is never run again, and a training that was stopped
continues from where it was saved.
"""

import hashlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from podscale.evaluate.history import History, number, read_history

ROOT = Path(__file__).resolve().parents[1]
Settings = dict[str, Any]
"""Options of a run document by their dotted names."""


@dataclass(frozen=True)
class Trial:
    """Settings of one training on top of its family's document; `seed` is run.seed."""

    family: str
    settings: Settings
    seed: int

    @property
    def key(self) -> str:
        """Equal for equal settings, whatever their order; a valid run.id."""
        text = json.dumps([self.family, self.settings, self.seed], sort_keys=True)
        return f"{self.family}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


@dataclass(frozen=True)
class Record:
    """How a trial ended.

    code: git tree of podscale/ that it ran; commit: where that tree stands. exit_code: of `podscale train`; with any
    but 0 there is an `error` and no accuracy. curve: (epoch, top-1) pairs. training_loss: mean over the last epoch, in
    nats, label smoothing included. cpu_seconds: user and system, of all processes of the training; 0 where it took more
    than one launch.
    """

    family: str
    settings: Settings
    seed: int
    commit: str
    code: str
    exit_code: int
    error: str = ""
    top1: float | None = None
    loss: float | None = None
    training_loss: float | None = None
    updates: int = 0
    masked: int = 0
    curve: list[tuple[float, float]] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    date: str = ""


Get = Callable[[Trial], Record | None]
"""The record of a trial, where there is one."""


class Records:
    """The records in a folder, of one version of the code, by the keys of their trials."""

    def __init__(self, folder: Path, code: str) -> None:
        self._folder, self.code = folder / code[:12], code
        self._folder.mkdir(parents=True, exist_ok=True)
        self._found = {path.stem: read_record(path) for path in sorted(self._folder.glob("*.json"))}

    def get(self, trial: Trial) -> Record | None:
        return self._found.get(trial.key)

    def add(self, trial: Trial, record: Record) -> None:
        """Keeps the record, whole or not at all."""
        path = self._folder / f"{trial.key}.json"
        scratch = path.with_suffix(".part")
        scratch.write_text(json.dumps(asdict(record), indent=1))
        scratch.replace(path)
        self._found[trial.key] = record


def read_record(path: Path) -> Record:
    """A record from its file; fields of another version are left out."""
    found = json.loads(path.read_text())
    known = {entry.name for entry in fields(Record)}
    record = Record(**{name: value for name, value in found.items() if name in known})
    record.curve[:] = [(epoch, top1) for epoch, top1 in record.curve]
    return record


def run_due(due: Callable[[Get], Iterable[Trial]], records: Records, run: Callable[[Trial], Record], jobs: int) -> None:
    """Runs what is due, `jobs` at a time, until nothing is: `due` is asked again whenever a record has come."""
    running: dict[Future[Record], Trial] = {}
    with ThreadPoolExecutor(jobs) as pool:
        while True:
            busy = {trial.key for trial in running.values()}
            for trial in due(records.get):
                if len(running) < jobs and records.get(trial) is None and trial.key not in busy:
                    running[pool.submit(run, trial)] = trial
                    busy.add(trial.key)
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                records.add(running.pop(future), future.result())


DIVERGED = "had a loss or gradient that is not finite"
"""What `podscale train` says of a training whose weights or loss left the numbers; anything else is an accident."""


@dataclass(frozen=True)
class Runner:
    """Trains in a workspace with the code beside this file; one process with one thread a trial."""

    workspace: Path
    documents: dict[str, Settings]
    commit: str
    code: str

    def shard(self, family: str) -> None:
        """Makes the shard set of a family, or finds it there."""
        ended, _ = self._podscale("shard", Trial(family, {}, 0))
        if ended.returncode:
            sys.exit(ended.stderr)

    def train(self, trial: Trial) -> Record:
        """One training; ends the program where it stopped for anything but divergence, which alone is a result."""
        run = self.workspace / "runs" / trial.key
        started, begun_before = time.monotonic(), run.exists()
        ended, cpu_seconds = self._podscale("train", trial)
        if ended.returncode and DIVERGED not in ended.stderr:
            sys.exit(
                f"{short(trial.settings)}, seed {trial.seed}: exit code {ended.returncode}\n{ended.stderr[-2000:]}"
            )
        record = Record(
            family=trial.family,
            settings=trial.settings,
            seed=trial.seed,
            commit=self.commit,
            code=self.code,
            exit_code=ended.returncode,
            error=ended.stderr.strip()[-500:] if ended.returncode else "",
            seconds=time.monotonic() - started,
            cpu_seconds=0.0 if begun_before else cpu_seconds,
            date=time.strftime("%Y-%m-%d %H:%M"),
            **measured(read_history(run / "metrics.jsonl"), whole=ended.returncode == 0),
        )
        shutil.rmtree(run)
        return record

    def _podscale(self, command: str, trial: Trial) -> tuple[subprocess.CompletedProcess[str], float]:
        """The ended command and the CPU seconds of it and its children."""
        path = self.workspace / "documents" / f"{trial.key}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        place = {"run.id": trial.key, "run.workspace": str(self.workspace), "run.seed": trial.seed}
        path.write_text(json.dumps(document({**self.documents[trial.family], **trial.settings, **place}), indent=1))
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        arguments = [sys.executable, "-c", MEASURING, sys.executable, "-m", "podscale", command, str(path)]
        ended = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True)
        text, _, cpu_seconds = ended.stderr.rstrip().rpartition("\n")
        return subprocess.CompletedProcess(arguments, ended.returncode, ended.stdout, text), float(cpu_seconds)


def document(settings: Settings) -> Settings:
    """The run document of dotted names, which JSON writes as YAML reads."""
    nested: Settings = {}
    for name, value in settings.items():
        *sections, last = name.split(".")
        inner = nested
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = value
    return nested


MEASURING = """import resource, subprocess, sys
code = subprocess.run(sys.argv[1:]).returncode
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(f"\\n{used.ru_utime + used.ru_stime}", file=sys.stderr)
sys.exit(code)"""
"""Runs a command; the last line on standard error is the CPU seconds of it and of the children it waited for."""


def measured(history: History, *, whole: bool) -> dict[str, Any]:
    """What metrics.jsonl tells of a training, as fields of a Record; no accuracy of one that did not end well."""
    evaluations = [(float(line["epoch"]), float(line["top1"])) for line in history.evaluations]
    last = history.evaluations[-1] if history.evaluations else {}
    found: dict[str, Any] = {"curve": evaluations, "updates": int(history.steps[-1]["step"]) if history.steps else 0}
    done = history.newest("done")
    if not whole or done is None:
        return found
    losses = [
        loss
        for line in history.steps
        if line["epoch"] > history.steps[-1]["epoch"] - 1 and (loss := number(line["loss"])) is not None
    ]
    return found | {
        "top1": number(last.get("top1")),
        "loss": number(last.get("loss")),
        "training_loss": statistics.fmean(losses) if losses else None,
        "masked": int(done["skipped_updates"]),
    }


def code_version() -> tuple[str, str]:
    """(commit, git tree of podscale/) of the code beside this file; ends the program where podscale/ was changed."""
    changed = _git("status", "--porcelain", "--", "podscale")
    if changed:
        sys.exit(f"podscale/ has changes that no commit holds, so no record could name its code:\n{changed}")
    return _git("rev-parse", "HEAD"), _git("rev-parse", "HEAD:podscale")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def short(settings: Settings) -> str:
    """Settings for people: the last part of each name and its value."""
    return ", ".join(f"{re.sub(r'.*[.]', '', name)} {value}" for name, value in settings.items())
