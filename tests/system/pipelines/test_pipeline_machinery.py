"""`podscale run` from outside: real kfp, real processes and signals, small stages (see standins/).

A run that gets no signal, and its stages, are forked from processes that have imported what they need
(tests/support/forked_commands.py and task_server.py): six interpreters less. With `direct=True` they start as usual.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from podscale.config import load
from podscale.pipelines.presets import resolve_preset
from tests.support.commands import TIMEOUT_SECONDS, alive
from tests.support.forked_commands import ForkedProcess, ForkServer
from tests.support.task_server import STANDINS, TaskServer

PRESET = load(resolve_preset("digits"))
PODSCALE = """
import os, runpy, sys
sys.executable = os.environ["STANDIN_PYTHON"]
runpy.run_module("podscale", run_name="__main__", alter_sys=True)
"""
IMPORTS = (
    *("podscale.cli", "podscale.api.launch_view", "podscale.api.pipeline", "podscale.stages.known_data"),
    *("podscale.pipelines.local_runner", "podscale.pipelines.training_pipeline", "podscale.pipelines.kfp_fast_import"),
    *("kfp.local.task_dispatcher", "kfp.local.orchestrator.enhanced_dag_orchestrator", "kfp.local.cache"),
    *("podscale.evaluation.evaluation_json", "podscale.export.web_runtime", "typer._adapters"),
)
"""Modules that `podscale run` imports, some of them late."""
Process = subprocess.Popen[str] | ForkedProcess


@pytest.fixture(scope="module")
def fork_server() -> ForkServer:
    """Process with the imports of `podscale run`."""
    return ForkServer(*IMPORTS, PYTHONPATH=str(STANDINS))


@pytest.fixture
def start(tmp_path: Path, task_server: TaskServer, fork_server: ForkServer) -> Iterator[Callable[..., Process]]:
    """Start `podscale run` in an empty folder; other keyword arguments set the behaviour of the stand-ins."""
    started: list[Process] = []

    def begin(*arguments: str, direct: bool = False, **how: str) -> Process:
        environment = {**os.environ, "PYTHONPATH": str(STANDINS), "STANDIN_PIDS": str(tmp_path / "pids")}
        environment.update({f"STANDIN_{name.upper()}": value for name, value in how.items()})
        if not direct:
            environment["STANDIN_PYTHON"] = str(task_server.programs / "python3")
            started.append(fork_server.start(PODSCALE, ["run", *arguments], environment, tmp_path))
            return started[-1]
        process = subprocess.Popen(
            [sys.executable, "-m", "podscale", "run", *arguments],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def finish(process: Process) -> tuple[int | None, str, str]:
    out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    return process.returncode, out, err


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.05)


def test_a_run_writes_all_outputs_and_a_second_one_repeats_no_stage(start, tmp_path):
    code, out, err = finish(start())
    assert code == 0, err
    run = tmp_path / "runs" / "digits"
    assert [name for name in ("shard", "train", "evaluate", "report") if f"{name}:" in err] != []
    assert err.rstrip().endswith(" runs/digits/report.html")
    lines = [json.loads(line) for line in out.splitlines()]  # a pipe: JSON lines and nothing else
    assert lines[-1]["event"] == "ended"
    assert list(lines[-1]["stages"]) == ["shard", "train", "evaluate", "report"]
    assert "pipeline" in err
    assert "KFP" not in out + err
    assert "Executing task" not in out + err
    assert "step" in {line["kind"] for line in lines}, "the step log is shown"
    assert "SUCCEEDED" in (run / "summary.md").read_text()
    outcomes = json.loads((run / "outcome.json").read_text())
    assert {name: entry["exit_code"] for name, entry in outcomes.items()} == dict.fromkeys(outcomes, 0)
    assert list(outcomes) == ["shard", "train", "evaluate", "report"]

    written = {path: path.stat().st_mtime_ns for path in (run / "model" / "model.safetensors", run / "report.html")}
    code, out, err = finish(start())
    assert code == 0, err
    assert err.count("finished before, nothing to do") == 4
    assert written == {path: path.stat().st_mtime_ns for path in written}

    code, out, err = finish(start("--set", "train.epochs=7", "--set", "run.seed=9"))
    assert code == 2
    changed = {line.strip(" -").split(": ")[0]: line for line in err.splitlines() if ": was " in line}
    assert list(changed) == ["run.seed", "train.epochs"]
    assert str(PRESET.train.epochs) in changed["train.epochs"]
    assert "7.0" in changed["train.epochs"]
    assert "--fresh" in err

    code, out, err = finish(start("--set", "train.epochs=7", "--fresh"))
    assert code == 0, err
    assert len(list((tmp_path / "runs").iterdir())) == 2, "the earlier run is kept"
    assert json.loads((run / "outcome.json").read_text())["shard"]["reused"], "shards do not depend on train"
    assert not json.loads((run / "outcome.json").read_text())["train"]["reused"]


@pytest.mark.parametrize(
    ("how", "code", "last"),
    [
        ({"train": "fail:77:rank 1 was lost\nsee its log"}, 77, "rank 1 was lost\nsee its log"),
        ({"shard": "empty"}, 2, "the source is empty\nput one folder per class there"),
        ({"evaluate": "crash"}, 1, "RuntimeError: a bug in the stage"),
    ],
)
def test_a_failed_stage_fails_the_run_with_its_own_error_and_code(start, tmp_path, how, code, last):
    returned, out, err = finish(start(**how))
    assert returned == code
    assert err.rstrip().endswith(last), "the stage's own error is the last thing printed"
    assert "Traceback" not in out + err
    summary = (tmp_path / "runs" / "digits" / "summary.md").read_text()
    assert "FAILED" in summary
    assert last.splitlines()[0] in summary
    assert "not run" in summary


def test_a_stage_that_vanishes_is_reported_with_its_last_output(start, tmp_path):
    """The outcome of an earlier launch must not count as that of this one."""
    assert finish(start())[0] == 0
    (tmp_path / "runs" / "digits" / "evaluation.json").unlink()
    code, _, err = finish(start(evaluate="vanish", direct=True))
    assert code == 1
    assert "evaluate" in err
    assert err.rstrip().endswith("last words")


def test_sigterm_lets_the_stage_save_and_the_next_launch_resumes(start, tmp_path):
    process = start(train="wait", direct=True)
    wait_for((tmp_path / "pids").exists)
    wait_for(lambda: '"step": 2' in (tmp_path / "runs" / "digits" / "metrics.jsonl").read_text())
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 75
    assert err.rstrip().endswith(" step 3")
    assert json.loads((tmp_path / "runs" / "digits" / "outcome.json").read_text())["train"]["exit_code"] == 75
    assert " 75 " in (tmp_path / "runs" / "digits" / "summary.md").read_text()

    code, out, err = finish(start())
    assert code == 0, err
    assert '"event": "resumed", "step": 3' in out
    assert out.count('"kind": "step"') == 2, "steps of the earlier launch are not shown again"


@pytest.mark.parametrize("stage", ["shard", "report"])
def test_sigterm_ends_a_stage_that_has_nothing_to_save(start, tmp_path, stage):
    process = start(**{stage: "wait"}, direct=True)
    wait_for((tmp_path / "pids").exists)
    os.killpg(
        process.pid, signal.SIGTERM
    )  # as `timeout` and a service manager do: to every process, twice to the stage
    code, _, err = finish(process)
    assert code == 75
    assert err.rstrip().endswith(f"podscale in stage {stage}: stopped on request; the same command continues")
    code, _, err = finish(start())
    assert code == 0, err


def test_ctrl_c_is_130_and_leaves_no_process(start, tmp_path):
    process = start(train="wait", direct=True)
    wait_for((tmp_path / "pids").exists)
    wait_for(lambda: '"step": 2' in (tmp_path / "runs" / "digits" / "metrics.jsonl").read_text())
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process
    code, _, err = finish(process)
    assert code == 130
    assert "Traceback" not in err
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    wait_for(lambda: not any(map(alive, pids)))


def test_kill_9_of_the_run_leaves_no_process_and_the_next_launch_resumes(start, tmp_path):
    process = start(train="wait", direct=True)
    wait_for((tmp_path / "pids").exists)
    wait_for(lambda: '"step": 2' in (tmp_path / "runs" / "digits" / "metrics.jsonl").read_text())
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert all(map(alive, pids))
    process.kill()
    wait_for(lambda: not any(map(alive, pids)))
    code, out, err = finish(start())
    assert code == 0, err
    assert '"event": "resumed"' in out


def test_outputs_of_the_tasks_are_typed_artifacts(start, tmp_path):
    code, _, err = finish(start(direct=True))
    assert code == 0, err
    tasks = next((tmp_path / "runs" / "digits" / "pipeline").iterdir())

    def artifact(task: str, name: str) -> dict:
        output = json.loads((tasks / task / "executor_output.json").read_text())
        return output["artifacts"][name]["artifacts"][0]

    shard_set = json.loads((tasks / "shard" / "shard_set").read_text())
    assert shard_set["counts"] == {"train": 100, "validation": 20}
    assert Path(tmp_path, shard_set["location"], "manifest.json").exists()
    assert (tasks / "shard" / "shard_set").stat().st_size < 10_000, "the artifact is a small manifest"
    assert artifact("shard", "shard_set")["metadata"]["train_images"] == 100
    assert (tasks / "train" / "model" / "model.safetensors").exists()
    assert artifact("evaluate", "metrics")["metadata"]["top1"] == 0.75
    matrix = artifact("evaluate", "confusion")["metadata"]["confusionMatrix"]
    assert [row["row"] for row in matrix["rows"]] == [[9, 1], [4, 6]]
    assert (tasks / "report" / "page").read_text().startswith("<html>")
    assert (tasks / "report" / "card").exists()
    assert "SUCCEEDED" in (tasks / "summary" / "page").read_text()


def test_the_page_with_the_model_is_an_artifact_of_the_export(start, tmp_path, monkeypatch):
    pytest.importorskip("onnxscript")
    (tmp_path / "runtime.tgz").touch()
    monkeypatch.setenv("PODSCALE_WEB_RUNTIME", str(tmp_path / "runtime.tgz"))
    code, _, err = finish(start("--set", "export.formats=[onnx, html-int8, html]"))
    assert code == 0, err
    assert "[5/5] export" in err
    assert "\nexport " in err, "the stage has a row in the table"
    run = tmp_path / "runs" / "digits"
    task = next((run / "pipeline").iterdir()) / "export"
    outputs = json.loads((task / "executor_output.json").read_text())["artifacts"]
    (page,) = outputs["page"]["artifacts"]
    assert page["metadata"]["file"] == "demo.html"
    assert (task / "page").read_bytes() == (run / "export" / "demo.html").read_bytes()
    assert {path.name for path in (task / "exported").iterdir()} >= {"model.onnx", "demo.html", "demo.int8.html"}

    code, _, err = finish(start("--set", "export.formats=[onnx]"))
    assert code == 0, err
    task = next((run / "pipeline").iterdir()) / "export"
    assert list(json.loads((task / "executor_output.json").read_text())["artifacts"]) == ["exported"]
    assert not (task / "page").exists()
