"""Watching a job: reports, and every way in which it may end. The tests act as operator and kubelet."""

import io
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from podscale import config
from podscale.errors import ExitCode
from podscale.kubernetes import informer, job_watcher, logs, retry
from podscale.kubernetes.client import ClusterClient
from podscale.kubernetes.job_watcher import JobReplaced, JobVanished, NamespaceGone, WaitLimits
from podscale.kubernetes.retry import RetryPolicy
from podscale.kubernetes.run_stage import JobResult, run_stage
from podscale.runs import RunDirectory
from podscale.runs.job_start import read_job_start
from podscale.util.processes import SigtermReceived, raise_on_sigterm
from tests.support.cluster_objects import condition, event, job, pod, terminated, unschedulable, waiting
from tests.support.fake_cluster import FakeCluster
from tests.support.fake_state import now
from tests.support.polling import until

LIMITS = WaitLimits(max_poll_seconds=0.1, min_poll_seconds=0.01, permanent_seconds=0.5, log_seconds=5.0)
DOCUMENT = (
    "run.id=r1",
    "run.workspace=/work",
    "launch.backend=pytorchjob",
    "launch.nodes=2",
    "launch.cluster.workspace_claim=w",
)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(informer, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(job_watcher, "DETAILS_SECONDS", 0.1)
    monkeypatch.setattr(retry, "UNATTENDED", RetryPolicy(20.0, first_pause=0.05))


class Waiting:
    """A launcher in a thread: its output and its result."""

    def __init__(self, *changes: str, limits: WaitLimits = LIMITS) -> None:
        self.out = io.StringIO()
        self.result: JobResult | BaseException | None = None
        self._changes, self._limits = (*DOCUMENT, *changes), limits
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = run_stage(config.load(None, self._changes), "train", out=self.out, limits=self._limits)
        except BaseException as error:
            self.result = error

    @property
    def text(self) -> str:
        return self.out.getvalue()

    def sees(self, *words: str) -> None:
        until(lambda: all(word in self.text for word in words) or self.result is not None)
        assert all(word in self.text for word in words), f"{self.text}\n{self.result!r}"

    def end(self) -> Any:
        self._thread.join(20)
        assert self.result is not None, self.text
        return self.result


@pytest.fixture
def operator(cluster: FakeCluster) -> "Operator":
    return Operator(cluster)


class Operator:
    """Stand-in for the training operator and the kubelets."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster

    def job(self) -> dict[str, Any]:
        until(lambda: self.cluster.get("pytorchjobs", "r1") is not None)
        made = self.cluster.get("pytorchjobs", "r1")
        assert made is not None
        return made

    def condition(self, kind: str) -> None:
        self.cluster.put("pytorchjobs", {**self.job(), "status": {"conditions": [condition(kind)]}})

    def pods(self, *pods: dict[str, Any]) -> None:
        self.job()
        for made in pods:
            del made["metadata"]["creationTimestamp"]  # the server sets one after the job's
            self.cluster.put("pods", made)

    def succeed(self) -> None:
        for index in range(2):
            self.cluster.hang_up(f"r1-worker-{index}")
        self.pods(*(pod(index, state=terminated(0, "", "Completed"), phase="Succeeded") for index in range(2)))
        self.condition("Succeeded")


def test_a_job_is_reported_from_submission_to_its_end_with_its_log(operator: Operator, cluster: FakeCluster) -> None:
    launcher = Waiting()
    launcher.sees("PyTorchJob r1 in namespace train: submitted", "pending")
    operator.pods(unschedulable(0, "0/1 nodes are available: 1 Insufficient cpu."))
    launcher.sees("unschedulable: 0/1 nodes are available")
    operator.pods(pod(0), pod(1))
    cluster.say("r1-worker-0", "epoch 1")
    launcher.sees("running, 2 of 2 pods", "epoch 1")
    cluster.say("r1-worker-0", "epoch 2")
    operator.succeed()
    assert launcher.end() == JobResult("train", 0)
    assert launcher.text.count("epoch 1") == launcher.text.count("epoch 2") == 1


def test_a_job_that_succeeded_before_is_not_run_again(operator: Operator, cluster: FakeCluster) -> None:
    first = Waiting()
    operator.pods(pod(0), pod(1))
    operator.succeed()
    first.end()
    again = Waiting()
    assert again.end() == JobResult("train", 0, reused=True)
    assert "`podscale stop r1 --delete`" in again.text


@pytest.mark.parametrize("pipeline", [False, True])
def test_the_job_of_a_pipeline_says_so(operator: Operator, cluster: FakeCluster, pipeline: bool) -> None:
    document = config.load(None, DOCUMENT)
    options: dict[str, Any] = {"out": io.StringIO(), "pipeline": pipeline, "limits": LIMITS}
    threading.Thread(target=run_stage, args=(document, "train"), kwargs=options, daemon=True).start()
    annotations = operator.job()["metadata"]["annotations"]
    assert ("podscale.dev/launcher" in annotations) is pipeline
    operator.pods(pod(0), pod(1))
    operator.succeed()
    until(lambda: "succeeded" in options["out"].getvalue())


@pytest.mark.parametrize("pipeline", [False, True])
def test_the_start_of_the_pods_is_reported_once_and_left_for_rank_0_by_a_pipeline(
    operator: Operator, cluster: FakeCluster, tmp_path: Path, pipeline: bool
) -> None:
    document = config.load(None, (*DOCUMENT, f"run.workspace={tmp_path}"))
    options: dict[str, Any] = {"out": io.StringIO(), "pipeline": pipeline, "limits": LIMITS}
    threading.Thread(target=run_stage, args=(document, "train"), kwargs=options, daemon=True).start()
    operator.job()
    scheduled = {"conditions": [{**condition("PodScheduled"), "lastTransitionTime": now()}]}
    operator.pods(pod(0, status=scheduled), pod(1, status=scheduled))
    until(lambda: "2 pods started" in options["out"].getvalue())
    operator.pods(pod(0, status=scheduled), pod(1, status=scheduled, restarts=1))
    operator.succeed()
    until(lambda: "succeeded" in options["out"].getvalue())
    assert options["out"].getvalue().count("2 pods started") == 1
    start = read_job_start(RunDirectory.for_config(document), 0.0)
    assert (start is not None) is pipeline
    assert start is None or start.pods == 2
    patched = [seen for seen in cluster.seen if seen.method == "PATCH" and "/pods/" in seen.path]
    assert bool(patched) is not pipeline, "rank 0 reads the annotation of its pod"
    for seen in patched:
        text = seen.body["metadata"]["annotations"]["podscale.dev/start"]
        assert (seen.path.rpartition("/")[2], json.loads(text)["pods"]) == ("r1-worker-0", 2)


def test_a_launcher_that_comes_again_adopts(operator: Operator) -> None:
    first = Waiting()
    operator.pods(pod(0), pod(1))
    first.sees("running")
    second = Waiting()
    second.sees("continues as it was submitted", "running")
    operator.succeed()
    assert first.end() == second.end() == JobResult("train", 0)


def test_bad_input_ends_the_job_although_its_operator_would_restart_it(
    operator: Operator, cluster: FakeCluster
) -> None:
    launcher = Waiting()
    operator.pods(
        pod(1, last=terminated(2, "data.source: no such folder"), restarts=1, state=waiting("CrashLoopBackOff"))
    )
    assert launcher.end() == JobResult("train", int(ExitCode.BAD_INPUT), "data.source: no such folder")
    assert cluster.all("pytorchjobs") == []
    assert "PyTorchJob r1" in launcher.text


@pytest.mark.parametrize(("code", "expected"), [(1, 1), (75, 75), (76, 76), (77, 77), (137, 1)])
def test_a_failed_job_gives_the_exit_code_of_its_stage(operator: Operator, code: int, expected: int) -> None:
    launcher = Waiting()
    operator.pods(pod(0, state=terminated(code, "why it failed"), phase="Failed"), pod(1))
    operator.condition("Failed")
    assert launcher.end() == JobResult("train", expected, "why it failed")


def test_an_image_that_is_missing_is_given_up_with_its_name(operator: Operator, cluster: FakeCluster) -> None:
    launcher = Waiting()
    operator.pods(pod(0, state=waiting("ImagePullBackOff", "not found"), phase="Pending"))
    result = launcher.end()
    assert result.exit_code == ExitCode.BAD_INPUT
    assert "registry.example/podscale:1" in result.error
    assert cluster.all("pytorchjobs") == []


def test_an_image_that_is_missing_is_reported_once_for_all_pods(operator: Operator, cluster: FakeCluster) -> None:
    launcher = Waiting(limits=replace(LIMITS, permanent_seconds=60.0))
    operator.job()
    for reason in ("ErrImagePull", "ImagePullBackOff", "ErrImagePull"):
        for index in range(2):
            operator.pods(pod(index, state=waiting(reason, f"attempt of {index}"), phase="Pending"))
            launcher.sees("registry.example/podscale:1")
            time.sleep(0.05)
    assert launcher.text.count("registry.example/podscale:1") == 1, launcher.text
    operator.pods(pod(0), pod(1))
    operator.succeed()
    assert launcher.end().is_done


def test_a_quota_that_refuses_pods_is_reported_once(operator: Operator, cluster: FakeCluster) -> None:
    launcher = Waiting()
    operator.job()
    for used in range(4):
        refused = f'pods "r1-worker-{used % 2}" is forbidden: exceeded quota: few, used: pods={used}, limited: pods=9'
        cluster.put("events", event("r1", "FailedCreatePod", f"Error creating: {refused}"))
        launcher.sees("exceeded quota: few", "launch.resources.cpus")
        time.sleep(0.25)
    assert launcher.text.count("exceeded quota: few") == 1, launcher.text
    operator.pods(pod(0), pod(1))
    launcher.sees("running, 2 of 2 pods")
    cluster.remove("pods", "r1-worker-1")
    until(lambda: launcher.text.count("exceeded quota: few") == 2)  # a problem after the pods have run is a new one
    operator.pods(pod(1))
    operator.succeed()
    assert launcher.end() == JobResult("train", 0)


def test_the_newest_of_many_events_counts(api: ClusterClient, cluster: FakeCluster) -> None:
    """The API server lists events in no order of time, in pages."""
    made = cluster.put("pytorchjobs", job())
    for minute in range(300):
        about = event("r1", "FailedCreatePod", f"refusal {minute}")
        about["metadata"]["name"] = f"r1.{minute}"
        about["lastTimestamp"] = f"2999-01-01T{minute // 60:02}:{minute % 60:02}:00Z"
        cluster.put("events", about)
    events = job_watcher.read_details(api, made, ()).events
    assert len(events) == job_watcher.MAX_EVENTS
    assert events[0]["message"] == "refusal 299"


def details_requests(cluster: FakeCluster) -> list[str]:
    """Return the plurals of the requests for events and Workloads so far."""
    plurals = [seen.path.rpartition("/")[2] for seen in cluster.seen]
    return [plural for plural in plurals if plural in ("events", "workloads")]


def test_events_are_requested_less_and_less_often_while_nothing_changes(
    operator: Operator, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_watcher, "MAX_DETAILS_SECONDS", 0.5)
    launcher = Waiting()
    operator.job()
    time.sleep(1.25)
    assert 3 <= len(details_requests(cluster)) <= 6  # pauses of 0.1, 0.2, 0.4, 0.5 s; without them about 12
    operator.pods(pod(0), pod(1))
    operator.succeed()
    assert launcher.end() == JobResult("train", 0)


def test_no_events_are_requested_if_the_pods_have_the_reason(api: ClusterClient, cluster: FakeCluster) -> None:
    """The API server reads all events of the namespace for each request."""
    made = cluster.put("pytorchjobs", job())
    waits = cluster.put("pods", unschedulable(0, "0/1 nodes are available: 1 Insufficient cpu."))
    assert job_watcher.read_details(api, made, [waits]) == job_watcher.JobDetails()
    assert details_requests(cluster) == []
    job_watcher.read_details(api, made, ())
    assert details_requests(cluster) == ["events"]


def test_only_the_workload_of_a_queued_job_is_requested(api: ClusterClient, cluster: FakeCluster) -> None:
    made = job(suspend=True, labels={"kueue.x-k8s.io/queue-name": "q"})
    job_watcher.read_details(api, cluster.put("pytorchjobs", made), ())
    assert details_requests(cluster) == ["workloads"]


def test_a_job_that_has_trained_is_not_given_up_for_a_replacement_that_cannot_start(
    operator: Operator, cluster: FakeCluster
) -> None:
    launcher = Waiting()
    operator.pods(pod(0), pod(1))
    launcher.sees("running, 2 of 2 pods")
    cluster.remove("pods", "r1-worker-0")
    cluster.remove("pods", "r1-worker-1")  # no remaining pod has run
    for index in range(2):
        operator.pods(pod(index, uid=f"new-{index}", state=waiting("ErrImagePull", "registry down"), phase="Pending"))
    launcher.sees("ErrImagePull")
    time.sleep(1.5 * LIMITS.permanent_seconds)
    assert launcher.result is None, launcher.text
    operator.pods(pod(0, uid="new-0"), pod(1, uid="new-1"))
    operator.succeed()
    assert launcher.end() == JobResult("train", 0)


def test_refused_pods_are_reported_from_the_events_of_the_job(operator: Operator, cluster: FakeCluster) -> None:
    launcher = Waiting()
    operator.job()
    cluster.put("events", event("r1", "FailedCreatePod", 'Error creating: violates PodSecurity "restricted"'))
    assert "Pod Security" in launcher.end().error


def test_a_queued_job_is_reported_with_kueues_message(operator: Operator, cluster: FakeCluster) -> None:
    launcher = Waiting("launch.cluster.queue=lq")
    made = operator.job()
    made["spec"]["runPolicy"]["suspend"] = True
    cluster.put("pytorchjobs", made)
    message = "couldn't assign flavors: insufficient unused quota for cpu, 1 more needed"
    workload = {
        "metadata": {"name": "w", "labels": {"kueue.x-k8s.io/job-uid": made["metadata"]["uid"]}},
        "status": {"conditions": [condition("QuotaReserved", "False", "Pending", message)]},
    }
    cluster.put("workloads", workload)
    launcher.sees("queued: ", "couldn't assign flavors", "queue lq")
    del made["spec"]["runPolicy"]["suspend"]
    cluster.put("pytorchjobs", made)
    operator.pods(pod(0), pod(1))
    operator.succeed()
    assert launcher.end().is_done


def test_a_deleted_job_is_one_message(operator: Operator, cluster: FakeCluster) -> None:
    launcher = Waiting()
    operator.pods(pod(0), pod(1))
    launcher.sees("running")
    cluster.remove("pytorchjobs", "r1")
    result = launcher.end()
    assert type(result) is JobVanished
    assert result.field == "PyTorchJob r1"
    assert cluster.all("pytorchjobs") == []


def test_a_deleted_namespace_is_one_message(operator: Operator, cluster: FakeCluster) -> None:
    launcher = Waiting()
    operator.pods(pod(0), pod(1))
    launcher.sees("running")
    cluster.put("namespaces", {"metadata": {"name": "train"}, "status": {"phase": "Terminating"}})
    cluster.remove("pytorchjobs", "r1")
    result = launcher.end()
    assert isinstance(result, NamespaceGone)
    assert result.field == "namespace train"


def test_a_replaced_job_is_not_taken_for_ours(operator: Operator, cluster: FakeCluster) -> None:
    launcher = Waiting()
    made = operator.job()
    launcher.sees("pending")
    cluster.cut()
    cluster.remove("pytorchjobs", "r1")
    made["metadata"]["uid"] = "another"
    cluster.put("pytorchjobs", made)
    assert isinstance(launcher.end(), JobReplaced)


def test_an_outage_and_forgotten_history_lose_nothing(
    operator: Operator, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "NOTICE_AFTER_SECONDS", 0.1)
    launcher = Waiting()
    operator.pods(pod(0), pod(1))
    cluster.say("r1-worker-0", "epoch 1")
    launcher.sees("running", "epoch 1")
    cluster.down()
    cluster.say("r1-worker-0", "epoch 2")
    launcher.sees("does not answer")
    cluster.forget_history()
    cluster.up()
    launcher.sees("answers again", "epoch 2")
    operator.succeed()
    assert launcher.end() == JobResult("train", 0)
    assert (
        launcher.text.count("does not answer") == launcher.text.count("epoch 1") == launcher.text.count("epoch 2") == 1
    )
    assert len([seen for seen in cluster.seen if seen.method == "POST" and "dryRun" not in seen.query]) == 2  # + policy


@pytest.fixture
def sigterm() -> Iterator[Callable[[], None]]:
    before = raise_on_sigterm()
    yield lambda: signal.raise_signal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("stop", [False, True])
def test_a_signal_leaves_the_job_or_stops_it(
    operator: Operator, cluster: FakeCluster, sigterm: Callable[[], None], stop: bool
) -> None:
    """The job is awaited in the main thread, because only that one handles signals."""
    out = io.StringIO()
    threading.Thread(target=lambda: (until(lambda: "pending" in out.getvalue()), sigterm()), daemon=True).start()
    with pytest.raises(SigtermReceived):
        run_stage(config.load(None, DOCUMENT), "train", out=out, stop_on_signal=stop, limits=LIMITS)
    assert (cluster.all("pytorchjobs") == []) is stop
    assert ("is deleted" if stop else "podscale stop r1") in out.getvalue()
