"""Signals that arrive while a finished trial is recorded, and the stages of a trial with an ensemble."""

import json
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from podscale.config import RunConfig
from podscale.errors import ExitCode
from podscale.evaluation.history import parse_history
from podscale.study import StudyDocument, trial
from podscale.study.grid import TrialGrid
from podscale.study.records import RecordStore
from podscale.study.runner import defer_signals
from podscale.util.processes import Preempted, preempt_on_sigterm


def test_a_signal_waits_for_the_body_even_if_another_thread_receives_it() -> None:
    done, release = [], threading.Event()
    other = threading.Thread(target=release.wait)
    other.start()
    try:
        with pytest.raises(Preempted), preempt_on_sigterm():  # noqa: PT012, SIM117 - the order is the test
            with defer_signals():
                os.kill(os.getpid(), signal.SIGTERM)
                done.append("recorded")
    finally:
        release.set()
        other.join()
    assert done == ["recorded"]


def test_no_signal_leaves_the_handlers_as_they_were() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with defer_signals():
        pass
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_outside_the_main_thread_signals_are_not_touched() -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []

    def body() -> None:
        with defer_signals():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [before]


def test_a_trial_with_an_ensemble_trains_its_members_and_evaluates_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensemble = {"cycles": [4, 3], "collapse": {"epochs": 1.5}}
    run = {"run": {"workspace": str(tmp_path), "id": "r"}, "train": {"epochs": 7}, "ensemble": ensemble}
    config = RunConfig.model_validate(StudyDocument(name="s", run=run).config({}).model_dump())
    path = tmp_path / "document.json"
    path.write_text(config.model_dump_json())
    done: list[tuple[str, str]] = []
    for stage in ("train", "evaluate"):
        monkeypatch.setattr(trial.local, stage, lambda one, shards, stage=stage: done.append((stage, one.run.id)))
    monkeypatch.setattr(trial.processes, "exit_with_process", lambda parent: None)
    assert trial.run_trial([str(path), "shards", "1"]) == ExitCode.DONE
    assert done == [("train", "r"), ("train", "r-c0"), ("train", "r-c1"), ("evaluate", "r")]
    assert [directory.name for directory in trial.trial_directories(config)] == ["r", "r-c0", "r-c1"]


def test_an_ensembles_record_has_the_score_of_the_members_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = {"run": {"workspace": str(tmp_path)}, "train": {"epochs": 7}, "ensemble": {"cycles": [4, 3]}}
    due = TrialGrid(StudyDocument(name="s", run=run, seeds=(1,))).due_trials(lambda key: None)
    lines = (
        {"kind": "step", "step": 3, "epoch": 7.0, "loss": 1.1, "time": 3.0},
        {"kind": "evaluation", "step": 3, "epoch": 7.0, "top1": 0.6, "top5": 0.9, "loss": 1.0, "time": 4.0},
    )
    history = parse_history([json.dumps(line).encode() for line in lines])
    members = [SimpleNamespace(answered=SimpleNamespace(top1=value)) for value in (0.61, 0.62)]
    evaluation = SimpleNamespace(scores=SimpleNamespace(top1=0.65, loss=0.9), ensemble=SimpleNamespace(members=members))
    monkeypatch.setattr(trial, "read_evaluation", lambda path: evaluation)
    record = trial.build_record(due[0], "done", "", history, images=100)
    assert (record.top1, record.loss, record.members) == (0.65, 0.9, (0.61, 0.62))
    assert record.curve[-1].top1 == 0.6, "the curve is that of the run in cycles"
    store = RecordStore(str(tmp_path))
    store.add(record)
    assert RecordStore(str(tmp_path)).get(record.cell) == record
