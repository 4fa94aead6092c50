"""A stage counts as finished while its inputs are unchanged, and does not run again."""

import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from podscale.config import RunConfig
from podscale.errors import ExitCode, InputError, Preempted
from podscale.runs import (
    LeaseTaken,
    RunDirectory,
    StageOutcome,
    check_not_taken,
    is_held,
    read_outcomes,
    record_stage,
    stage_outcomes,
    write_outcome,
)
from podscale.runs.lease import LeaseLost
from podscale.util.processes import SigtermReceived, preempt_on_sigterm


def model(directory: Path, **description: Any) -> Path:
    """Model directory of a training, with a running average of the weights."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "model.json").write_text(json.dumps({"classes": ["a", "b"], **description}))
    (directory / "model.safetensors").write_bytes(b"weights")
    (directory / "ema.safetensors").write_bytes(b"average")
    return directory


def document(workspace: Path, **evaluate: Any) -> RunConfig:
    return RunConfig.model_validate({"run": {"workspace": str(workspace)}, "evaluate": evaluate})


def finish(config: RunConfig) -> None:
    """Write the files of a finished evaluation."""
    run = RunDirectory.for_config(config).create()
    run.evaluation.write_text("{}")
    run.predictions.write_bytes(b"")
    write_outcome(run.outcome, StageOutcome("evaluate", ExitCode.DONE))
    stage_outcomes.record_finished(config, "evaluate", str(config.run.workspace))


def finished(config: RunConfig) -> bool:
    return stage_outcomes.finished_outcome(config, "evaluate", str(config.run.workspace)) is not None


@pytest.fixture(params=["a run of its own", "several models", "several and one beside"])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[RunConfig, Path]:
    """Document whose evaluation is finished, and the directory of a model that the evaluation read."""
    if request.param == "a run of its own":
        config = document(tmp_path)
        made = model(RunDirectory.for_config(config).model)
    else:
        models = [str(model(tmp_path / name / "model")) for name in ("one", "two", "three")]
        beside = {"baseline": models[2]} if request.param == "several and one beside" else {}
        config = document(tmp_path, models=models[:2], **beside)
        made = Path(models[2 if beside else 1])
    finish(config)
    assert finished(config)
    return config, made


@pytest.mark.parametrize("name", ["model.json", "model.safetensors", "ema.safetensors"])
def test_a_changed_file_of_a_model_is_evaluated_again(case: tuple[RunConfig, Path], name: str) -> None:
    config, made = case
    (made / name).write_bytes(b"another one, such as other classes or another preprocessing")
    assert not finished(config)


def test_a_file_of_the_same_length_and_a_lost_one_are_noticed(case: tuple[RunConfig, Path]) -> None:
    config, made = case
    description = made / "model.json"
    before = description.stat()
    os.utime(description, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert not finished(config)
    os.utime(description, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert finished(config)
    (made / "ema.safetensors").unlink()
    assert not finished(config)


def finish_all(config: RunConfig) -> Path:
    """Record every stage as finished; return the file of their inputs."""
    run = RunDirectory.for_config(config).create()
    model(run.model)
    for path in (run.evaluation, run.predictions, run.report):
        path.write_bytes(b"")
    for stage in stage_outcomes.STAGES:
        write_outcome(run.outcome, StageOutcome(stage, ExitCode.DONE))
        stage_outcomes.record_finished(config, stage, str(config.run.workspace))
    return run.stage_inputs


def finished_stages(config: RunConfig) -> list[str]:
    outcomes = {
        stage: stage_outcomes.finished_outcome(config, stage, config.run.workspace) for stage in stage_outcomes.STAGES
    }
    return [stage for stage, outcome in outcomes.items() if outcome is not None]


def without(recorded: Any, *options: str) -> Any:
    """Return recorded inputs as a version without these options writes them."""
    if isinstance(recorded, dict):
        return {name: without(value, *options) for name, value in recorded.items() if name not in options}
    return [without(value, *options) for value in recorded] if isinstance(recorded, list) else recorded


def test_stages_that_an_older_version_finished_are_finished(tmp_path: Path) -> None:
    """It had neither these options, of classes result, placement and display, nor that of a phase."""
    config = RunConfig.model_validate(
        {"run": {"workspace": str(tmp_path)}, "train": {"phases": [{"start": 3, "momentum": 0.5}]}}
    )
    recorded = finish_all(config)
    assert finished_stages(config) == list(stage_outcomes.STAGES)
    older = without(
        json.loads(recorded.read_text()),
        "input.interpolation",
        "launch.grace_seconds",
        "claim.top1",
        "batch_norm_momentum",
    )
    assert older != json.loads(recorded.read_text())
    recorded.write_text(json.dumps(older))
    assert finished_stages(config) == list(stage_outcomes.STAGES)


@pytest.mark.parametrize(
    ("change", "unfinished"),
    [
        ({"input": {"interpolation": "bicubic"}}, {*stage_outcomes.STAGES}),
        ({"launch": {"grace_seconds": 7}}, {"report"}),
        ({"claim": {"top1": 0.5}}, {"report"}),
    ],
)
def test_an_option_that_came_later_and_is_set_is_a_change(
    tmp_path: Path, change: dict[str, Any], unfinished: set[str]
) -> None:
    recorded = finish_all(document(tmp_path))
    older = without(json.loads(recorded.read_text()), "input.interpolation", "launch.grace_seconds", "claim.top1")
    recorded.write_text(json.dumps(older))
    changed = RunConfig.model_validate({"run": {"workspace": str(tmp_path)}, **change})
    assert set(finished_stages(changed)) == {*stage_outcomes.STAGES} - unfinished


@pytest.mark.parametrize("entry", ["4c9bb8270e03cbff", {}, {"options": []}, {"options": {"result": []}}])
def test_a_damaged_entry_is_not_finished(tmp_path: Path, entry: Any) -> None:
    config = document(tmp_path)
    recorded = finish_all(config)
    recorded.write_text(json.dumps({"train": entry}))
    assert finished_stages(config) == []


def test_what_belongs_to_no_answer_changes_nothing(case: tuple[RunConfig, Path]) -> None:
    config, made = case
    (made / "README.md").write_text("a card, which the report writes")
    assert finished(config)


def test_a_stage_is_done_once(tmp_path: Path) -> None:
    config = document(tmp_path)
    run = RunDirectory.for_config(config)
    with stage_outcomes.stage_once(config, "evaluate", str(tmp_path)) as entered:
        assert entered.finished is None
        assert is_held(run.lease)
        run.evaluation.write_text("{}")
        run.predictions.write_bytes(b"")
    assert not is_held(run.lease)
    assert (entered.outcome.is_done, entered.outcome.reused) == (True, False)
    with stage_outcomes.stage_once(config, "evaluate", str(tmp_path)) as entered:
        assert entered.finished is not None
    assert entered.outcome.reused
    assert finished(config)


def test_the_outcome_of_an_earlier_run_is_dropped_before_the_work(tmp_path: Path) -> None:
    config = document(tmp_path)
    write_outcome(RunDirectory.for_config(config).create().outcome, StageOutcome("report", ExitCode.DONE))
    with stage_outcomes.stage_once(config, "evaluate", str(tmp_path)):
        assert read_outcomes(RunDirectory.for_config(config).outcome) == {}


def test_a_full_disk_is_recorded_as_bad_input(tmp_path: Path) -> None:
    config = document(tmp_path)
    with pytest.raises(InputError), stage_outcomes.stage_once(config, "evaluate", str(tmp_path)):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    outcome = read_outcomes(RunDirectory.for_config(config).outcome)["evaluate"]
    assert outcome.exit_code == ExitCode.BAD_INPUT
    assert not finished(config)


def test_a_directory_in_use_is_not_entered(tmp_path: Path) -> None:
    config = document(tmp_path)
    with stage_outcomes.stage_once(config, "report", str(tmp_path)) as entered:
        with pytest.raises(LeaseTaken):
            check_not_taken(entered.run.lease)
        entered.run.report.write_text("")


def stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    signal.sigpending()  # back in Python, where handlers run


def test_a_stop_passes_every_except_exception_and_ends_as_preempted() -> None:
    before = signal.getsignal(signal.SIGTERM)
    cleaned = []

    def work() -> None:
        try:
            try:
                stop()
            except Exception:
                pytest.fail("a broad handler took the request for its own")
        finally:
            stop()  # a second request does not interrupt the cleanup
            cleaned.append(True)

    with pytest.raises(Preempted), preempt_on_sigterm():
        work()
    assert cleaned
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_stopped_stage_is_recorded_as_preempted(tmp_path: Path) -> None:
    path = tmp_path / "outcome.json"
    with pytest.raises(Preempted), preempt_on_sigterm(), record_stage(path, "report"):
        stop()
    assert read_outcomes(path)["report"].exit_code == 75


def test_who_lost_the_lease_records_nothing(tmp_path: Path) -> None:
    path = tmp_path / "outcome.json"

    def lost() -> None:
        raise LeaseLost("another launch")

    with pytest.raises(LeaseLost), record_stage(path, "train", lost):
        pass
    with pytest.raises(ZeroDivisionError), record_stage(path, "train", lost):
        raise ZeroDivisionError
    with pytest.raises(SigtermReceived), record_stage(path, "train", lost):
        raise SigtermReceived
    assert read_outcomes(path) == {}
    with record_stage(path, "train"):
        pass
    assert isinstance(read_outcomes(path)["train"], StageOutcome)
