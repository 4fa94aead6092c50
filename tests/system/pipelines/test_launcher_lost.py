"""Training jobs whose pipeline ends, in each of the ways in which KFP and its users end it.

The launcher is the pipeline task's own processes, the pod is `podscale train` as the rendered manifest starts it. One
test has a small real training on two ranks; the others train a counter (programs/counting_rank.py), which starts in a
fraction of the time. The API server and the operator are test doubles; tests/cluster has the real ones.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from numpy.typing import NDArray

from podscale.components import steps
from podscale.config import RunConfig, load
from podscale.errors import ExitCode
from podscale.runs import RunDirectory, dataset_directory, read_outcomes
from podscale.runs.launcher_heartbeat import LauncherSilence, is_abandoned
from podscale.telemetry.events import read_records
from podscale.util import processes
from podscale.util.files import write_json
from tests.support.commands import TIMEOUT_SECONDS, alive, copy_workspace, different, result
from tests.support.fake_cluster import FakeCluster
from tests.support.local_operator import LocalOperator, operating
from tests.system.programs import counting_rank

pytestmark = pytest.mark.timeout(900)
LAUNCHER = """
import sys
from podscale.components.stage_process import stage_process
from podscale.config import load
from podscale.runs import dataset_directory
from podscale.stages.launcher_process import launch_in_child

config = load("launched.yaml")
with stage_process("train"):
    launch_in_child(config, "train", dataset_directory(config.run.workspace, config.data))
"""
FAULT_INJECTION = Path(__file__).parents[1] / "fault_injection"
PROGRAMS = Path(__file__).parents[1] / "programs"
WORKFLOW_POD = "wf-x7k2p-system-container-impl-123"
WORKFLOW = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": "wf-x7k2p", "uid": "workflow-1"}


class Scene:
    """One run `launched` in a copy of the digits' workspace, its launcher, and its job on the fake cluster.

    Args:
        expected: Weights and losses of an undisturbed training.
    """

    def __init__(
        self, folder: Path, cluster: FakeCluster, operator: LocalOperator, expected: dict[str, NDArray[Any]]
    ) -> None:
        self.folder, self.cluster, self.operator, self.expected = folder, cluster, operator, expected
        self.launchers: list[subprocess.Popen[str]] = []

    @property
    def config(self) -> RunConfig:
        return load(self.folder / "launched.yaml")

    @property
    def run(self) -> RunDirectory:
        return RunDirectory.for_config(self.config)

    def launch(self, **variables: str) -> "subprocess.Popen[str]":
        environment = {"KUBECONFIG": str(self.folder / "kubeconfig"), "KFP_POD_NAME": WORKFLOW_POD, **variables}
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER],
            cwd=self.folder,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.launchers.append(process)
        return process

    def child_of(self, launcher: "subprocess.Popen[str]") -> int:
        """Return the process that works, the only child of the launcher."""
        children: list[int] = []

        def found() -> bool:
            pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
            children[:] = [pid for pid in pids if processes.parent_of(pid) == launcher.pid and alive(pid)]
            return bool(children)

        self.wait_for("a child of the launcher", found)
        return children[0]

    def end(self, launcher: "subprocess.Popen[str]") -> tuple[int, str]:
        """Return exit code and log of a launcher, whose training is slow no more."""
        (self.folder.parent / "slow").unlink(missing_ok=True)
        log, _ = launcher.communicate(timeout=TIMEOUT_SECONDS)
        return launcher.returncode, log

    def launch_for_steps(self, number: int) -> "subprocess.Popen[str]":
        """Return a new launcher after its training has done a number of steps."""
        launcher = self.launch()
        self.wait_for_steps(number)
        return launcher

    def succeed(self, launcher: "subprocess.Popen[str]") -> None:
        code, log = self.end(launcher)
        assert code == 0, log

    def kill(self, launcher: "subprocess.Popen[str]") -> None:
        """Kill all processes of a launcher's pod, as KFP does when a run is terminated."""
        os.killpg(launcher.pid, signal.SIGKILL)
        launcher.communicate()

    def wait_for(self, what: str, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"no {what}: {[pod.logs() for pod in self.operator.pods]}"
            time.sleep(0.05)

    def wait_for_steps(self, number: int) -> None:
        self.wait_for(f"{number} steps", lambda: len(self.steps()) >= number)

    def steps(self) -> list[int]:
        return [line["step"] for line in read_records(self.run.metrics) if line["kind"] == "step"]

    def events(self) -> list[str]:
        return [line["event"] for line in read_records(self.run.metrics) if line["kind"] == "event"]

    def job(self) -> dict[str, Any] | None:
        return self.cluster.get("pytorchjobs", "launched")

    def assert_same_bits(self) -> None:
        assert different(result(self.run.path), self.expected) == []

    def close(self) -> None:
        for launcher in self.launchers:
            if launcher.poll() is None:
                self.kill(launcher)


Start = Callable[..., Scene]


@pytest.fixture
def start(calm: Path, tmp_path: Path) -> Iterator[Start]:
    """Return start(grace=minutes, real=False), which prepares the workspace; everything is killed at the end."""
    slow = tmp_path / "slow"  # while it exists, a training takes 13 s
    slow.touch()
    with ExitStack() as stack:
        cluster = stack.enter_context(FakeCluster().running())

        def begin(grace: float, *, real: bool = False) -> Scene:
            processes = 2 if real else 1
            fault = {
                "PYTHONPATH": f"{FAULT_INJECTION}:{PROGRAMS}",
                "INJECTED_FAULT": f"{'rest' if real else 'count'}:{slow}",
            }
            operator = stack.enter_context(operating(cluster, tmp_path / "pods", processes, fault))
            folder = tmp_path / "workspace"
            copy_workspace(calm, folder)
            changes = f"""
run: {{id: launched, workspace: {folder}, seed: 1}}
telemetry: {{log_every: 1, enabled: false}}
launch:
  backend: pytorchjob
  hardware: cpu
  processes: {processes}
  threads: 1
  grace_seconds: 60
  timeout_seconds: 120
  cluster: {{workspace_claim: workspace, launcher_grace_minutes: {grace}}}
"""
            kept = [
                line
                for line in (folder / "run.yaml").read_text().splitlines()
                if not line.startswith(("run:", "telemetry:", "launch:"))
            ]
            (folder / "launched.yaml").write_text("\n".join(kept) + changes)
            cluster.kubeconfig(folder / "kubeconfig")
            claim = {"metadata": {"name": "workspace"}, "spec": {"accessModes": ["ReadWriteMany"]}}
            cluster.put("persistentvolumeclaims", claim)
            expected = result(folder / "runs" / "calm") if real else counting_rank.undisturbed()
            scene = Scene(folder, cluster, operator, expected)
            stack.callback(scene.close)
            return scene

        yield begin


@pytest.mark.slow
def test_a_terminated_run_whose_exit_handler_does_not_run_stops_its_job(start: Start) -> None:
    """As under KFP 2.17's default retry strategy: the launcher is killed, and nothing else happens."""
    scene = start(grace=0.05, real=True)
    launcher = scene.launch_for_steps(6)
    scene.kill(launcher)
    scene.wait_for("end of the pod", lambda: scene.operator.pods[0].exit_codes[-1:] == [0])
    (pod,) = scene.operator.pods
    assert pod.exit_codes == [ExitCode.PREEMPTED, ExitCode.DONE], "it saves and stops, and the restarted pod ends"
    steps = scene.steps()
    assert len(steps) < 67
    assert "launcher_lost" in scene.events()
    outcome = read_outcomes(scene.run.outcome)["train"]
    assert outcome.exit_code == ExitCode.PREEMPTED
    assert "launch.cluster.launcher_grace_minutes" in outcome.error
    assert json.loads(pod.message)["exit_code"] == ExitCode.PREEMPTED
    assert is_abandoned(scene.run, "train")

    scene.succeed(scene.launch(KFP_POD_NAME="wf-other-system-container-impl-9"))  # a later run of the pipeline
    assert len(scene.operator.pods) == 2, "the abandoned job is replaced, not adopted"
    assert not is_abandoned(scene.run, "train")
    assert scene.steps()[len(steps)] == steps[-1] + 1, "no step is lost, because the job saved"
    scene.assert_same_bits()


def test_an_abandoned_job_whose_pods_still_save_is_not_adopted(start: Start) -> None:
    scene = start(grace=20)
    launcher = scene.launch_for_steps(5)
    scene.kill(launcher)
    silence = LauncherSilence("train", scene.run.launcher_heartbeat.read_text(), 1200.0, is_abandoned=True)
    write_json(scene.run.launcher_silence, asdict(silence))
    launcher = scene.launch()
    scene.wait_for("another job", lambda: len(scene.operator.pods) == 2)
    scene.succeed(launcher)
    first, second = scene.operator.pods
    assert first.exit_codes[0] == ExitCode.PREEMPTED
    restarted = {ExitCode.DONE, ExitCode.PREEMPTED, -signal.SIGTERM}  # it saw the mark, or its job was deleted
    assert set(first.exit_codes[1:]) <= restarted
    assert second.exit_codes == [ExitCode.DONE]
    scene.assert_same_bits()


def test_a_job_that_outlives_its_pipeline_is_resumed_by_submit(start: Start) -> None:
    scene = start(grace=0.05)
    launcher = scene.launch_for_steps(6)
    scene.kill(launcher)
    scene.wait_for("end of the pod", lambda: scene.operator.pods[0].exit_codes[-1:] == [0])
    shard_set = dataset_directory(scene.config.run.workspace, scene.config.data)
    (scene.folder.parent / "slow").unlink()
    options = ["launched.yaml", "--stage", "train", "--shard-set", shard_set, "--wait"]
    ended = subprocess.run(
        [sys.executable, "-m", "podscale", "submit", *options],
        cwd=scene.folder,
        env={**os.environ, "KUBECONFIG": str(scene.folder / "kubeconfig")},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert scene.operator.pods[1].exit_codes == [0], "without a launcher, and it is not stopped"
    scene.assert_same_bits()


def test_a_launcher_that_is_killed_alone_starts_again_and_adopts_its_job(start: Start) -> None:
    scene = start(grace=2)
    launcher = scene.launch_for_steps(5)
    first = scene.child_of(launcher)
    os.kill(first, signal.SIGKILL)  # as the out-of-memory killer does
    scene.wait_for("another child", lambda: scene.child_of(launcher) != first)
    scene.succeed(launcher)
    (pod,) = scene.operator.pods
    assert pod.exit_codes == [0], "training goes on undisturbed"
    assert "launcher_lost" not in scene.events()
    scene.assert_same_bits()


def test_a_job_outlives_the_restart_of_its_launchers_pod(start: Start) -> None:
    scene = start(grace=2)
    launcher = scene.launch_for_steps(5)
    scene.kill(launcher)
    scene.succeed(scene.launch())
    (pod,) = scene.operator.pods
    assert pod.exit_codes == [0]
    scene.assert_same_bits()


def test_an_outage_of_the_api_server_stops_nothing_while_the_launcher_runs(start: Start) -> None:
    scene = start(grace=0.1)
    launcher = scene.launch_for_steps(3)
    scene.cluster.down()
    time.sleep(9)  # longer than the grace time
    assert scene.operator.pods[0].exit_codes == []
    scene.cluster.up()
    scene.succeed(launcher)
    (pod,) = scene.operator.pods
    assert pod.exit_codes == [0]
    scene.assert_same_bits()


def test_a_launcher_that_is_lost_during_an_outage_costs_no_step(start: Start) -> None:
    """Nothing can start a launcher while the API server is down; the job saves, and is replaced afterwards."""
    scene = start(grace=0.05)
    launcher = scene.launch_for_steps(5)
    scene.cluster.down()
    scene.kill(launcher)
    scene.wait_for("end of the pod", lambda: scene.operator.pods[0].exit_codes[-1:] == [0])
    steps = scene.steps()
    scene.cluster.up()
    scene.succeed(scene.launch())
    assert [pod.exit_codes for pod in scene.operator.pods] == [[75, 0], [0]]
    assert scene.steps()[len(steps)] == steps[-1] + 1
    scene.assert_same_bits()


def test_the_deletion_of_the_pipelines_run_deletes_its_job_which_saves(start: Start) -> None:
    scene = start(grace=20)
    scene.cluster.put(
        "pods", {"metadata": {"name": WORKFLOW_POD, "ownerReferences": [{**WORKFLOW, "controller": True}]}}
    )
    launcher = scene.launch_for_steps(5)
    job = scene.job()
    assert job is not None
    assert job["metadata"]["ownerReferences"] == [WORKFLOW], "no controller, which would hide it from `podscale list`"
    scene.kill(launcher)
    scene.cluster.remove("pytorchjobs", "launched")  # by the garbage collector, for want of its owner
    scene.wait_for("end of the pod", lambda: scene.operator.pods[0].exit_codes)
    assert scene.operator.pods[0].exit_codes == [ExitCode.PREEMPTED]
    steps = scene.steps()
    scene.succeed(scene.launch())
    assert scene.steps()[len(steps)] == steps[-1] + 1
    scene.assert_same_bits()


@pytest.mark.parametrize("denied", [("get", "pods"), None], ids=["no right to read pods", "no pod of a workflow"])
def test_a_launcher_without_a_workflow_owns_no_job(start: Start, denied: tuple[str, str] | None) -> None:
    scene = start(grace=20)
    if denied is not None:
        scene.cluster.denied.add(denied)
    scene.launch()
    scene.wait_for("job", scene.job)
    job = scene.job()
    assert job is not None
    assert "ownerReferences" not in job["metadata"]


@pytest.mark.slow
def test_a_job_that_vanishes_is_submitted_again_as_often_as_documented(start: Start) -> None:
    """Also if KFP starts the launcher again after it gave up: both count the same retries."""
    scene = start(grace=20)
    launcher = scene.launch()
    for number in range(3):  # the first, and launch.retries=2
        scene.wait_for(f"pod {number}", lambda number=number: len(scene.operator.pods) == number + 1)
        scene.wait_for("step", lambda number=number: len(scene.steps()) > 3 * number)
        scene.cluster.remove("pytorchjobs", "launched")
        scene.wait_for("end of the pod", lambda: scene.operator.pods[-1].exit_codes)
    log, _ = launcher.communicate(timeout=TIMEOUT_SECONDS)
    assert launcher.returncode == 1, log
    code, log = scene.end(scene.launch(KFP_POD_NAME=WORKFLOW_POD.replace("123", "456")))
    assert code == 1, log
    assert len(scene.operator.pods) == 3, "KFP's own retry submits no fourth job"
    scene.succeed(scene.launch(KFP_POD_NAME="wf-next-system-container-impl-1"))
    scene.assert_same_bits()


@pytest.mark.parametrize("grace", [20, 0])
def test_the_exit_handler_leaves_the_healthy_job_of_a_killed_launcher(
    start: Start, monkeypatch: pytest.MonkeyPatch, grace: int
) -> None:
    scene = start(grace=grace)
    launcher = scene.launch_for_steps(3)
    scene.kill(launcher)
    monkeypatch.setenv("KUBECONFIG", str(scene.folder / "kubeconfig"))
    text = steps._stop_jobs(scene.config, "FAILED")
    assert scene.job() is not None
    assert "podscale stop launched" in text
    assert ("launcher_grace_minutes" in text) == (grace == 0)
    text = steps._stop_jobs(scene.config, "RUNNING")  # terminated by its user
    assert scene.job() is None
    scene.wait_for("end of the pod", lambda: scene.operator.pods[0].exit_codes)
    assert scene.operator.pods[0].exit_codes == [ExitCode.PREEMPTED]
