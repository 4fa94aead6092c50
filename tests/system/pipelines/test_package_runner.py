"""The compiled package, run task by task as KFP does, with small real stages in processes of this machine.

Tested without a cluster: the graph of the package, the values between its tasks, retries, loops, the exit task, the
launcher and the exit handler. tests/cluster does the same with pods. The tasks are forked from one process that has
imported what they need (tests/support/task_server.py), except in `test_the_whole_pipeline` without a cluster.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from podscale.components import steps
from podscale.components.run_parameters import PipelineJob, RunParameters
from podscale.config import load
from podscale.errors import ExitCode
from podscale.kubernetes.job_spec import job_identity
from podscale.pipelines import presets
from podscale.pipelines.package import compile_to_yaml
from podscale.pipelines.task_placement import UNRETRIED_ROLES
from podscale.pipelines.training_pipeline import PipelineOptions, training_pipeline
from podscale.runs import Lease, StageOutcome, dataset_directory, read_outcomes, write_outcome
from podscale.util import env
from tests.support.cluster_objects import condition, job, stored
from tests.support.commands import TIMEOUT_SECONDS
from tests.support.fake_cluster import FakeCluster
from tests.support.package_pod import MARK, OUTPUT_FILE
from tests.support.package_runner import PackageRunner, PodEnd, in_background
from tests.support.task_server import STANDINS, TaskServer

TASKS = ("configure", "shard", "train", "evaluate", "report", "summary")


class Processes:
    """Host whose pods are processes of this machine, with the artifact volume in a folder."""

    def __init__(self, folder: Path, programs: Path, variables: dict[str, str]) -> None:
        """Use the `python3` of the folder `programs`."""
        self._folder, self._programs, self._variables = folder, programs, variables
        self._running: dict[str, subprocess.Popen[str]] = {}

    def run(self, manifest: dict[str, Any]) -> PodEnd:
        container = manifest["spec"]["containers"][0]
        name = manifest["metadata"]["name"]
        command = [self._here(name, part) for part in container["command"]]
        environment = {**os.environ, **self._variables, **{v["name"]: v["value"] for v in container["env"]}}
        process = subprocess.Popen(
            command,
            env={
                **environment,
                "PYTHONPATH": str(STANDINS),
                "PATH": f"{self._programs}:{os.environ['PATH']}",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._running[name] = process
        log, _ = process.communicate(timeout=TIMEOUT_SECONDS)
        return PodEnd(None if process.returncode < 0 else process.returncode, log)

    def kill(self, name: str) -> None:
        os.killpg(self._running[name].pid, signal.SIGKILL)

    def _here(self, name: str, text: str) -> str:
        """Return the text of a pod with the paths of this machine; kfp itself turns `minio://` into a path."""
        text = text.replace(OUTPUT_FILE, str(self._folder / name / "output.json"))
        return text.replace("minio://", f"{self._folder}/").replace("/minio", str(self._folder))


Start = Callable[..., PackageRunner]


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    """Cluster that the exit handler connects to."""
    with FakeCluster().running() as running:
        yield running


@pytest.fixture
def start(tmp_path: Path, cluster: FakeCluster, task_server: TaskServer) -> Start:
    """Return start(changes, parts=, **how) -> runner; other keyword arguments set the behaviour of the stand-ins."""
    kubeconfig = cluster.kubeconfig(tmp_path / "kubeconfig")

    def begin(
        *changes: str,
        parts: int = 1,
        retries: int = 0,
        scheduled: str = "",
        termination: bool = False,
        fresh: bool = False,
        **how: str,
    ) -> PackageRunner:
        config = load(presets.resolve_preset(None), [f"run.workspace={tmp_path}/ws", "launch.retries=0", *changes])

        def place(task: Any, role: str) -> None:
            if retries and role not in UNRETRIED_ROLES:
                task.set_retry(retries)
            if termination:
                task.set_env_variable(env.TERMINATION_LOG, str(tmp_path / "termination-log"))

        package = compile_to_yaml(training_pipeline(config, PipelineOptions(place, parts)))
        variables = {f"STANDIN_{name.upper()}": value for name, value in how.items()}
        variables |= {"STANDIN_PIDS": str(tmp_path / "pids"), "KUBECONFIG": str(kubeconfig)}
        programs = Path(sys.executable).parent if fresh else task_server.programs
        host = Processes(tmp_path / "artifacts", programs, variables)
        return PackageRunner(
            package, host, artifacts_claim="a", service_account="s", retry_seconds=0, scheduled=scheduled
        )

    return begin


def states(runner: PackageRunner) -> dict[str, str]:
    return {name: run.state for name, run in runner.tasks.items()}


def summary(tmp_path: Path, runner: PackageRunner) -> str:
    uri = runner.tasks["summary"].outputs["page"]["uri"]
    return (tmp_path / "artifacts" / uri.removeprefix("minio://")).read_text()


def result_of(page: str) -> tuple[str, str]:
    """Return the run id and the state in the title of a summary."""
    run_id, state = page.splitlines()[0].removeprefix("# Run ").split(": ")
    return run_id, state


def stage_rows(page: str) -> dict[str, str]:
    """Return the result of each stage in the table of a summary."""
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return {name: ended for name, ended, *_ in rows[1:]}


NO_DEVICE = "rank 0: no such device"
"""Error that a test gives to a stand-in."""
EMPTY = "the source is empty"
"""Error of the stand-in of the shard stage."""


@pytest.mark.parametrize("backend", ["local", "pytorchjob"])
def test_the_whole_pipeline(start, tmp_path, backend):
    runner = start(f"launch.backend={backend}", fresh=backend == "local")
    assert runner.run() == "SUCCEEDED", runner.tasks
    assert states(runner) == dict.fromkeys(TASKS, "SUCCEEDED")
    shard_set = runner.tasks["shard"].outputs["shard_set"]
    assert shard_set["metadata"]["train_images"] == 100
    model = runner.tasks["train"].outputs["model"]
    assert model["metadata"]["framework"] == "pytorch"
    assert (tmp_path / "artifacts" / model["uri"].removeprefix("minio://") / "model.safetensors").exists()
    assert runner.tasks["evaluate"].outputs["metrics"]["metadata"] == {"top1": 0.75}
    assert ("[cluster] PyTorchJob" in runner.tasks["train"].log) == (backend == "pytorchjob")
    assert result_of(summary(tmp_path, runner)) == ("digits", "SUCCEEDED")
    assert MARK not in runner.tasks["train"].log


def test_the_page_with_the_model_is_an_output_of_the_export(start, tmp_path, monkeypatch):
    pytest.importorskip("onnxscript")
    (tmp_path / "runtime.tgz").touch()
    monkeypatch.setenv(env.WEB_RUNTIME, str(tmp_path / "runtime.tgz"))
    runner = start("export.formats=[onnx, html]")
    assert runner.run() == "SUCCEEDED", runner.tasks
    page = runner.tasks["export"].outputs["page"]
    assert page["type"]["schemaTitle"] == "system.HTML"
    content = (tmp_path / "artifacts" / page["uri"].removeprefix("minio://")).read_text()
    assert content == (tmp_path / "ws/runs/digits/export/demo.html").read_text()
    assert stage_rows(summary(tmp_path, runner))["export"] == "done"


def test_the_formats_of_a_package_are_no_parameter_of_a_run(start, tmp_path):
    runner = start("export.formats=[onnx]")
    assert runner.run({"overrides": ["export.formats=[html]"]}) == "FAILED"
    error = runner.tasks["summary"].parameters["errors"]
    assert "export.formats: " in error
    assert "podscale compile RUN --set 'export.formats=[html]'" in error
    assert states(runner)["export"] == "SKIPPED"


def test_a_training_that_is_finished_needs_no_job(start):
    assert start("launch.backend=pytorchjob").run() == "SUCCEEDED"
    again = start("launch.backend=pytorchjob", job="refuse:no job may be made now")
    assert again.run() == "SUCCEEDED", again.tasks["train"].log
    assert again.tasks["train"].outputs["model"]["metadata"]["reused"] is True


def test_the_parameter_run_id_names_the_run(start, tmp_path):
    runner = start()
    assert runner.run({"run_id": "other"}) == "SUCCEEDED"
    assert [path.name for path in (tmp_path / "ws" / "runs").iterdir()] == ["other"]


def test_a_scheduled_run_has_the_same_name_in_every_task_and_retry(start, tmp_path):
    """The macro of recurring runs stays literal in a pinned version; placeholders are filled in."""
    when = "2026-11-24T02:00:00Z"
    runner = start("launch.backend=pytorchjob", retries=1, scheduled=when, train=f"fail:1:{NO_DEVICE}")
    assert runner.run({"run_id": "nightly-{time}"}) == "FAILED"
    assert len(runner.tasks["train"].pods) == 2
    run_id = f"nightly-202611240200-{runner.id[:4]}"
    assert [path.name for path in (tmp_path / "ws" / "runs").iterdir()] == [run_id]
    assert result_of(summary(tmp_path, runner)) == (run_id, "FAILED")
    assert NO_DEVICE in summary(tmp_path, runner)


def test_the_macro_that_recurring_runs_leave_unexpanded_is_refused_at_once(start, tmp_path):
    runner = start()
    assert runner.run({"run_id": "nightly-[[ScheduledTime]]"}) == "FAILED"
    assert states(runner) == {**dict.fromkeys(TASKS, "SKIPPED"), "configure": "FAILED", "summary": "SUCCEEDED"}
    assert "run.id: " in summary(tmp_path, runner)


def test_the_parameters_reach_every_task(start, tmp_path):
    runner = start("launch.backend=pytorchjob")
    parameters = {
        "epochs": 3.0,
        "global_batch": 32,
        "learning_rate": 0.25,
        "overrides": ["train.optimizer.momentum=0.8", "data.seed=5"],
        "image": "registry/ours:2",
        "launcher_image": "registry/tools:2",
    }
    assert runner.run(parameters) == "SUCCEEDED", runner.tasks
    config = load(tmp_path / "ws/runs/digits/config.yaml")
    assert (config.train.epochs, config.train.global_batch, config.data.seed) == (3.0, 32, 5)
    assert (config.train.schedule.learning_rate, config.train.optimizer.momentum) == (0.25, 0.8)
    assert (config.launch.image, config.launch.launcher_image) == ("registry/ours:2", "registry/tools:2")
    images = {name: task.image for name, task in runner.tasks.items()}
    assert images == {
        **dict.fromkeys(("configure", "train", "summary"), "registry/tools:2"),
        **dict.fromkeys(("shard", "evaluate", "report"), "registry/ours:2"),
    }
    assert result_of(summary(tmp_path, runner)) == ("digits", "SUCCEEDED")


def test_the_shards_depend_on_the_data_section_alone(start):
    """KFP's cache key has the values of the inputs."""

    def inputs(**parameters: Any) -> dict[str, Any]:
        runner = start()
        assert runner.run({"run_id": "r{time}", **parameters}) == "SUCCEEDED", runner.tasks
        return runner.tasks["shard"].inputs

    plain = inputs()
    assert inputs(learning_rate=0.01, epochs=12.0, overrides=["run.seed=7"]) == plain
    assert inputs(overrides=["data.seed=7"]) != plain


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"run_id": "No Name"}, "run.id"),
        ({"epochs": -1.0}, "train.epochs"),
        ({"overrides": ["train.momentun=1"]}, "train.momentun"),
        ({"overrides": ["launch.nodes=3"]}, "launch.nodes"),
        ({"source": "photos/here"}, "data.source"),
    ],
)
def test_an_invalid_parameter_ends_the_run_in_its_first_task(start, tmp_path, parameters, field):
    runner = start(retries=2)
    assert runner.run(parameters) == "FAILED"
    first = runner.tasks["configure"]
    assert (first.state, len(first.pods), first.exit_code) == ("FAILED", 1, ExitCode.BAD_INPUT)
    assert f"{field}: " in first.log
    assert "Traceback" not in first.log
    assert "images.tag" not in first.log, "it is no matter of versions"
    assert states(runner)["shard"] == "SKIPPED"
    assert states(runner)["summary"] == "SUCCEEDED"
    assert f"{field}: " in runner.tasks["summary"].parameters["errors"]


def test_the_error_of_a_task_is_its_termination_message(start, tmp_path):
    runner = start(train=f"fail:1:{NO_DEVICE}", termination=True)
    assert runner.run() == "FAILED"
    assert (tmp_path / "termination-log").read_text() == f"podscale train: {NO_DEVICE}"
    assert runner.tasks["summary"].parameters["errors"] == f"train: {NO_DEVICE}"


def test_what_tasks_write_is_not_writable_for_everyone(start, tmp_path):
    """KFP's launcher clears the umask."""
    umask = os.umask(0)
    try:
        assert start().run() == "SUCCEEDED"
    finally:
        os.umask(umask)
    files = [path for path in (tmp_path / "ws").rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"summary.md", "predictions.safetensors"}
    assert [path for path in files if path.stat().st_mode & 0o022] == []


def test_the_model_has_its_card(start, tmp_path):
    runner = start()
    assert runner.run() == "SUCCEEDED"
    model = tmp_path / "artifacts" / runner.tasks["train"].outputs["model"]["uri"].removeprefix("minio://")
    assert (model / "README.md").exists()


def test_the_error_of_an_image_of_another_version_names_field_and_tag(capsys):
    document = json.loads(load(presets.resolve_preset(None)).model_dump_json())
    document["input"]["of_tomorrow"] = 1
    with pytest.raises(SystemExit) as ended:
        steps.train(json.dumps(document), None, None)
    error = capsys.readouterr().err
    assert ended.value.code == ExitCode.BAD_INPUT
    assert "input.of_tomorrow: " in error
    assert "images.tag" in error


def test_several_pods_pack_and_the_shard_stage_completes(start):
    runner = start(parts=3)
    assert runner.run() == "SUCCEEDED", runner.tasks
    assert [f"pack.{index}" in runner.tasks for index in range(3)] == [True] * 3


def test_a_part_that_fails_is_in_the_summary(start, tmp_path):
    runner = start("launch.shard_pods=2", parts=2, shard="empty")
    assert runner.run() == "FAILED"
    assert states(runner) | {"summary": "SUCCEEDED"} == states(runner)
    assert "shard" not in runner.tasks or runner.tasks["shard"].state == "SKIPPED"
    text = summary(tmp_path, runner)
    assert stage_rows(text)["shard"].split()[-1] == str(int(ExitCode.BAD_INPUT))
    assert EMPTY in text


def test_a_stage_is_retried_and_its_error_reaches_the_summary(start, tmp_path):
    runner = start(retries=2, train=f"fail:1:{NO_DEVICE}")
    assert runner.run() == "FAILED"
    assert len(runner.tasks["train"].pods) == 3
    assert states(runner)["evaluate"] == "SKIPPED"
    text = summary(tmp_path, runner)
    assert result_of(text) == ("digits", "FAILED")
    assert NO_DEVICE in text


def test_a_job_that_never_starts_leaves_its_error(start, tmp_path):
    error = "this cluster has no PyTorchJob: install it"
    runner = start("launch.backend=pytorchjob", job=f"refuse:{error}")
    assert runner.run() == "FAILED"
    assert f"podscale train: {error}" in runner.tasks["train"].log
    assert error in summary(tmp_path, runner)
    outcome = read_outcomes(tmp_path / "ws/runs/digits/outcome.json")["train"]
    assert (outcome.exit_code, outcome.error) == (2, error)


def test_the_error_that_the_job_recorded_is_kept(start, tmp_path):
    error = "rank 3 was lost in step 7"
    runner = start("launch.backend=pytorchjob", train=f"fail:77:{error}")
    assert runner.run() == "FAILED"
    assert runner.tasks["summary"].parameters["errors"] == f"train: {error}", "and not of its pods"
    assert error in summary(tmp_path, runner)


def test_the_summary_of_a_job_without_an_outcome_has_the_error_of_its_pods(start, tmp_path):
    runner = start("launch.backend=pytorchjob", job="lost:1:OOMKilled: raise launch.resources.memory_gib")
    assert runner.run() == "FAILED"
    assert "OOMKilled: raise launch.resources.memory_gib" in summary(tmp_path, runner)


def test_a_pod_that_is_still_ending_does_not_hide_why_its_job_failed(start, tmp_path):
    """The restarted pod removed the record of the failure and is stopped while the launcher reports it."""
    run = tmp_path / "ws/runs/digits"
    run.mkdir(parents=True)
    error = "rank 0: the loss is not finite"
    runner = start("launch.backend=pytorchjob", job=f"lost:1:{error}")
    with Lease.acquire(run / ".lease"):
        thread = in_background(runner.run)
        runner.wait_for("train")
        time.sleep(8)
        write_outcome(run / "outcome.json", StageOutcome("train", 75, "stopped on request"))
    thread.join(60)
    outcome = read_outcomes(run / "outcome.json")["train"]
    assert (outcome.exit_code, outcome.error) == (1, error)
    assert error in summary(tmp_path, runner)


def test_a_finished_job_without_outputs_in_this_workspace_is_an_error(start, tmp_path):
    runner = start("launch.backend=pytorchjob", job="lost:0:")
    assert runner.run() == "FAILED"
    assert "launch.cluster.workspace_claim" in runner.tasks["train"].log


def cancelled(runner: PackageRunner, tmp_path: Path, task: str = "train") -> None:
    """Terminate the run while the job of a task is running."""
    thread = in_background(runner.run)
    runner.wait_for(task)
    while not (tmp_path / "pids").exists():
        time.sleep(0.02)
    runner.terminate()
    thread.join(60)


def trained_by(tmp_path: Path, name: str = "digits", *, stage: str = "train", **changes: Any) -> dict[str, Any]:
    """Return a job of the run `digits` on the cluster, with changes of its document."""
    options = [f"run.workspace={tmp_path}/ws", "launch.backend=pytorchjob"]
    config = load(presets.resolve_preset(None), [*options, *(f"{key}={value}" for key, value in changes.items())])
    shard_set = dataset_directory(config.run.workspace, config.data)
    labels = {"podscale.dev/run": "digits", "podscale.dev/stage": stage}
    return stored(job("PyTorchJob", name, job_identity(config, "train", shard_set), labels=labels))


def test_a_cancelled_run_has_its_job_stopped_and_its_summary(start, tmp_path, cluster):
    cluster.put("pytorchjobs", trained_by(tmp_path))
    cluster.put("pytorchjobs", stored(job("PyTorchJob", "other"), "u2"))
    cluster.put("pytorchjobs", trained_by(tmp_path, "digits-shard", stage="shard"))
    runner = start("launch.backend=pytorchjob", job="wait")
    cancelled(runner, tmp_path)
    assert states(runner) == {
        "configure": "SUCCEEDED",
        "shard": "SUCCEEDED",
        "train": "RUNNING",
        "evaluate": "SKIPPED",
        "report": "SKIPPED",
        "summary": "SUCCEEDED",
    }
    text = summary(tmp_path, runner)
    assert result_of(text) == ("digits", "RUNNING")
    assert "PyTorchJob digits " in text
    assert cluster.get("pytorchjobs", "digits") is None
    assert cluster.get("pytorchjobs", "other") is not None
    assert cluster.get("pytorchjobs", "digits-shard") is not None


def test_a_job_that_succeeded_and_whose_outputs_are_missing_runs_again(start, tmp_path, cluster):
    finished = {"conditions": [condition("Succeeded")]}
    cluster.put("pytorchjobs", {**trained_by(tmp_path), "status": finished})
    runner = start("launch.backend=pytorchjob", job="succeeded")
    assert runner.run() == "SUCCEEDED", runner.tasks["train"].log
    assert cluster.get("pytorchjobs", "digits") is None  # the stand-in submits no job


def test_the_healthy_job_of_another_document_under_the_same_run_id_is_left_alone(start, tmp_path, cluster):
    cluster.put("pytorchjobs", trained_by(tmp_path, **{"run.seed": 77}))
    runner = start("launch.backend=pytorchjob", job="refuse:the job of another document")
    assert runner.run() == "FAILED"
    assert cluster.get("pytorchjobs", "digits") is not None
    assert "PyTorchJob digits " in summary(tmp_path, runner)


SLICE = ("launch.backend=jobset", "launch.hardware=tpu-v5e-4x4", "launch.processes=1", "train.global_batch=96")


def evaluated_by(tmp_path: Path) -> dict[str, Any]:
    """Return the evaluation job of a run on a TPU slice of several machines."""
    config = load(presets.resolve_preset(None), [f"run.workspace={tmp_path}/ws", *SLICE, "train.engine=jax"])
    identity = job_identity(config, "evaluate", dataset_directory(config.run.workspace, config.data))
    labels = {"podscale.dev/run": "digits", "podscale.dev/stage": "evaluate"}
    return stored(job("JobSet", "digits-evaluate", identity, labels=labels))


def test_on_a_slice_of_several_machines_the_evaluation_is_a_job(start, tmp_path):
    runner = start(*SLICE, "train.engine=jax", "launch.image=podscale-tpu:1")
    assert runner.run() == "SUCCEEDED", summary(tmp_path, runner)
    assert "[cluster] " in runner.tasks["evaluate"].log
    assert runner.tasks["evaluate"].image == "podscale-tools:latest"
    assert runner.tasks["evaluate"].outputs["metrics"]["metadata"] == {"top1": 0.75}
    outcomes = read_outcomes(tmp_path / "ws/runs/digits/outcome.json")
    assert {name: outcome.exit_code for name, outcome in outcomes.items()} == dict.fromkeys(TASKS[1:5], 0)


def test_the_evaluation_job_of_a_cancelled_run_is_stopped(start, tmp_path, cluster):
    cluster.put("jobsets", evaluated_by(tmp_path))
    runner = start(*SLICE, "train.engine=jax", "launch.image=podscale-tpu:1", job="wait evaluate")
    cancelled(runner, tmp_path, "evaluate")
    assert states(runner)["evaluate"] == "RUNNING"
    assert states(runner)["summary"] == "SUCCEEDED"
    assert cluster.get("jobsets", "digits-evaluate") is None
    assert "JobSet digits-evaluate " in summary(tmp_path, runner)


def test_the_error_of_an_evaluation_job_reaches_the_summary(start, tmp_path):
    runner = start(*SLICE, "train.engine=jax", "launch.image=podscale-tpu:1", evaluate="fail:1:no such device")
    assert runner.run() == "FAILED"
    assert states(runner)["train"] == "SUCCEEDED"
    assert runner.tasks["summary"].parameters["errors"] == "evaluate: no such device"


@pytest.mark.parametrize("how", ["succeeded", "not ours"])
def test_jobs_that_have_ended_or_are_not_ours_are_left_alone(start, tmp_path, cluster, how):
    jobs = trained_by(tmp_path)
    if how == "succeeded":
        jobs["status"] = {"conditions": [condition("Succeeded")]}
    else:
        jobs["metadata"]["labels"] = {}
    cluster.put("pytorchjobs", jobs)
    runner = start("launch.backend=pytorchjob", job="wait")
    cancelled(runner, tmp_path)
    assert cluster.get("pytorchjobs", "digits") is not None
    assert "PyTorchJob" not in summary(tmp_path, runner), "none was stopped"


@pytest.mark.parametrize(
    ("denied", "message"), [("list", " list pytorchjobs.kubeflow.org"), ("delete", "podscale stop digits")]
)
def test_a_job_that_may_not_be_listed_or_deleted_is_reported_beside_the_error(
    start, tmp_path, cluster, denied, message
):
    cluster.put("pytorchjobs", trained_by(tmp_path))
    cluster.denied.add((denied, "pytorchjobs"))
    error = "no step for 300 s"
    runner = start("launch.backend=pytorchjob", job=f"lost:76:{error}")
    assert runner.run() == "FAILED"
    assert states(runner)["summary"] == "SUCCEEDED", "a failed task would lose its page in KFP"
    text = summary(tmp_path, runner)
    assert message in runner.tasks["summary"].parameters["errors"]
    assert error in text
    assert "podscale stop digits" in text
    assert message in text


def test_a_local_run_sends_no_request_to_a_cluster(start, tmp_path, cluster):
    runner = start(train="fail:1:an error")
    assert runner.run() == "FAILED"
    assert states(runner)["summary"] == "SUCCEEDED"
    assert not cluster.seen


@pytest.mark.parametrize(("state", "title"), [("COMPLETE", "SUCCEEDED"), ("RUNNING", "RUNNING")])
def test_success_has_one_name_whatever_the_backend_calls_it(tmp_path, state, title):
    config = load(presets.resolve_preset(None), [f"run.workspace={tmp_path}", "launch.backend=pytorchjob"])
    page = SimpleNamespace(path=str(tmp_path / "page.md"))
    if state in steps.SUCCEEDED_STATES:  # no cluster is asked
        parameters = RunParameters("digits", "digits", 16, 64, 0.1, [], config.launch.image, "")
        status = SimpleNamespace(state=state)
        assert steps.summarize(config.model_dump_json(), parameters, PipelineJob(), status, page) == steps.NO_ERRORS
        assert result_of((tmp_path / "page.md").read_text()) == ("digits", title)
    assert result_of(steps.summary_markdown(config, state, {}, {})) == ("digits", title)
