"""The chart's policy: its values, and the answers of a real API server compared with those of `podscale submit`."""

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import yaml

from podscale.cli import main
from podscale.kubernetes.job_spec import JobSpec
from podscale.kubernetes.namespace import job_refusals
from podscale.kubernetes.render import render_job, suitable_backends
from podscale.pipelines import presets
from tests.support import api_server, crds, rendering
from tests.support.api_server import ApiServer
from tests.support.cluster_policy import LOCKS, REGISTRY, VALUES, installed, policy_of_chart, policy_values
from tests.support.outcomes import assert_error
from tests.support.polling import until

KINDS = ("PyTorchJob", "JAXJob", "TrainJob", "TrainingRuntime", "JobSet", "LocalQueue")
BACKENDS = ("pytorchjob", "jaxjob", "trainjob", "jobset", "job")
ADMITTED = (
    f"launch.image={REGISTRY}/podscale-base:1",
    "launch.cluster.queue=team-a",
    "launch.time_limit_hours=48.5",
    "launch.processes=1",
)
H100 = ("launch.hardware=nvidia-h100-80gb x8", "launch.processes=8", "train.global_batch=512")
TPU = ("launch.hardware=tpu-v5e-2x2", "train.global_batch=512", "train.engine=jax")
ALL, SEVERAL = BACKENDS, BACKENDS[:4]
CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...], str | None]] = {
    "allowed": ((), ALL, None),
    "another allowed image": (("launch.image=localhost:5000/x/podscale-base@sha256:00",), ALL, None),
    "another allowed queue": (("launch.cluster.queue=shared",), ALL, None),
    "as many GPUs as allowed": ((*H100, "launch.nodes=2"), SEVERAL, None),
    "another registry": (("launch.image=docker.io/podscale-base:1",), ALL, "launch.image"),
    "the beginning of a path": ((f"launch.image={REGISTRY}-two/podscale-base:1",), ALL, "launch.image"),
    "a port of an allowed host": (("launch.image=mirror.example:5000/podscale-base:1",), ALL, "launch.image"),
    "another port": (("launch.image=localhost:50001/podscale-base:1",), ALL, "launch.image"),
    "no queue": (("launch.cluster.queue=null",), ALL, "launch.cluster.queue"),
    "another queue": (("launch.cluster.queue=team-b",), ALL, "launch.cluster.queue"),
    "too many GPUs": ((*H100, "launch.nodes=4"), SEVERAL, "launch.nodes"),
    "too many hours": (("launch.time_limit_hours=48.6",), ALL, "launch.time_limit_hours"),
    # Trainer's own job has no pod template, so its pods are refused.
    "privileged": (("launch.cluster.security=privileged",), tuple(set(ALL) - {"trainjob"}), "launch.cluster.security"),
    "TPUs": (TPU, ("jobset", "job"), "launch.cluster.security"),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """API server with a namespace for each scope and action of the policy, and one without a policy."""
    releases = {
        "team-a": policy_values(),
        "strict": policy_values(scope="namespace"),
        "trial": policy_values(actions=("Warn",)),
        "free": VALUES,
    }
    definitions = [crds.definition(kind) for kind in KINDS]
    with api_server.running(tmp_path_factory.mktemp("api"), definitions) as running:
        for namespace in releases:
            running.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
        running.apply(job("docker.io/old:1", namespace="team-a", name="older", finalizers=["example.org/keep"]))
        for namespace, values in releases.items():
            running.apply(*installed(values, namespace))
        for namespace in ("team-a", "strict"):  # the policies take effect within about a second
            for backend in ALL:
                made = manifest("launch.image=x:1", backend=backend, namespace=namespace)
                until(lambda made=made: bool(running.refusal(made)), 60)
        yield running


def spec(*changes: str, namespace: str = "team-a", **options: Any) -> JobSpec:
    return rendering.spec(*ADMITTED, f"launch.cluster.namespace={namespace}", *changes, **options)


def manifest(*changes: str, backend: str = "pytorchjob", namespace: str = "team-a") -> dict[str, Any]:
    return render_job(spec(*changes, namespace=namespace), backend).job


def job(image: str, namespace: str, name: str = "own", **metadata: Any) -> dict[str, Any]:
    """Return a Job of a run, written by hand; `labels` replaces the labels of the job and its pods."""
    made = copy.deepcopy(manifest(f"launch.image={image}", backend="job", namespace=namespace))
    made["metadata"] |= {"name": name, **metadata}
    if "labels" in metadata:
        made["spec"]["template"]["metadata"]["labels"] = metadata["labels"]
    return made


def pod(template: Mapping[str, Any], namespace: str) -> dict[str, Any]:
    metadata = {"name": "own", "namespace": namespace, **template["metadata"]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def options_in(message: str) -> set[str]:
    """Return the option that the API server's message names; empty if it accepted the object."""
    denied = message.partition("denied request: ")[2]
    assert bool(denied) == bool(message), message
    return set(re.findall(r"^(launch\.[a-z_.]+): ", denied))


@pytest.mark.parametrize("case", CASES)
def test_command_line_and_api_server_refuse_the_same(server: ApiServer, case: str) -> None:
    changes, backends, option = CASES[case]
    made = spec(*changes)
    found = [error.field for error in job_refusals(policy_of_chart(), made)]
    assert found == ([option] if option else [])
    for backend in backends:
        message = server.refusal(render_job(made, backend).job)
        assert options_in(message) == set(found), backend
        assert ("ml@example.org" in message) == bool(found)


def test_both_answer_the_same_for_every_preset(server: ApiServer) -> None:
    """The presets differ in hardware, nodes and engine; a smaller limit refuses a part of them."""
    policy, verdicts = policy_of_chart(), set()
    for preset in presets.preset_names():
        made = rendering.spec("launch.cluster.namespace=team-a", *ADMITTED[:3], preset=preset)
        found = {error.field for error in job_refusals(policy, made)}
        option = options_in(server.refusal(render_job(made, suitable_backends(made)[0]).job))
        assert bool(option) == bool(found), preset
        assert {name.replace("hardware", "nodes") for name in option} <= {
            name.replace("hardware", "nodes") for name in found
        }, preset
        verdicts.add(bool(found))
    assert verdicts == {True, False}


@pytest.mark.parametrize("stage", ["shard", "train", "evaluate", "report"])
def test_allowed_stages_are_accepted_with_their_pods(server: ApiServer, stage: str) -> None:
    made = render_job(spec(stage=stage), "job").job
    assert server.refusal(made) == ""
    template = made["spec"]["template"]
    template["spec"]["serviceAccountName"] = "podscale-trainer"
    assert server.refusal(pod(template, "team-a")) == ""


def change_pod(change: Callable[[dict[str, Any], dict[str, Any]], object]) -> dict[str, Any]:
    """Return an allowed pod of a run after a change of its spec and its container."""
    template = copy.deepcopy(manifest(backend="job")["spec"]["template"])
    template["spec"]["serviceAccountName"] = "podscale-trainer"
    change(template["spec"], template["spec"]["containers"][0])
    return pod(template, "team-a")


@pytest.mark.parametrize(
    ("option", "change"),
    [
        ("launch.cluster.security", lambda spec, _: spec.update(hostNetwork=True)),
        ("launch.cluster.security", lambda spec, _: spec["securityContext"].pop("seccompProfile")),
        ("launch.cluster.security", lambda spec, _: spec["securityContext"].pop("runAsNonRoot")),
        ("launch.cluster.security", lambda spec, _: spec["securityContext"].update(runAsUser=0)),
        ("launch.cluster.security", lambda spec, _: spec["volumes"].append({"name": "h", "hostPath": {"path": "/"}})),
        ("launch.cluster.security", lambda _, main: main["securityContext"].pop("capabilities")),
        ("launch.cluster.security", lambda _, main: main["securityContext"].pop("allowPrivilegeEscalation")),
        ("launch.cluster.security", lambda _, main: main["securityContext"].update(runAsNonRoot=False)),
        ("launch.cluster.security", lambda _, main: main.update(ports=[{"containerPort": 1, "hostPort": 1}])),
        ("launch.image", lambda spec, main: spec.update(initContainers=[{**main, "name": "first", "image": "x:1"}])),
        ("launch.nodes", lambda _, main: main.update(resources={"limits": {"nvidia.com/gpu": 17}})),
    ],
)
def test_pods_are_refused(server: ApiServer, option: str, change: Callable[..., object]) -> None:
    assert options_in(server.refusal(change_pod(change))) == {option}


def test_accelerators_of_all_containers_and_jobs_are_added(server: ApiServer) -> None:
    made = manifest(*H100, "launch.nodes=2", backend="jobset")
    jobs = made["spec"]["replicatedJobs"]
    assert server.refusal(made) == ""
    jobs.append({**copy.deepcopy(jobs[0]), "name": "second"})
    assert options_in(server.refusal(made)) == {"launch.nodes"}
    jobs[1]["template"]["spec"]["parallelism"] = -2
    jobs[0]["template"]["spec"]["parallelism"] = 3
    assert options_in(server.refusal(made)) == {"launch.nodes"}, "a negative number does not make room"


def test_a_job_without_a_time_limit_is_refused(server: ApiServer) -> None:
    made = manifest(backend="job")
    del made["spec"]["activeDeadlineSeconds"]
    assert options_in(server.refusal(made)) == {"launch.time_limit_hours"}


def test_only_jobs_that_a_controller_owns_need_no_queue(server: ApiServer) -> None:
    """A JobSet makes Jobs, and Trainer makes JobSets; the queue admits the object that owns them."""
    owner = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "name": "r", "uid": "1"}
    made = manifest("launch.cluster.queue=null", backend="job")
    made["metadata"]["ownerReferences"] = [owner]
    assert options_in(server.refusal(made)) == {"launch.cluster.queue"}
    made["metadata"]["ownerReferences"] = [{**owner, "controller": True}]
    assert server.refusal(made) == ""


def test_an_older_object_can_be_finalized_but_not_changed(server: ApiServer) -> None:
    patch = ("patch", "job", "older", "--namespace", "team-a", "--type=merge", "--dry-run=server", "--patch")
    assert server.kubectl(*patch, '{"metadata": {"finalizers": null}}').returncode == 0
    changed = server.kubectl(*patch, '{"spec": {"parallelism": 2}}')
    assert options_in(changed.stderr) == {"launch.image"}


def test_an_image_cannot_be_changed_later(server: ApiServer) -> None:
    server.apply(manifest("run.id=patched"))
    path = "/spec/pytorchReplicaSpecs/Worker/template/spec/containers/0/image"
    image = '[{"op": "replace", "path": "' + path + '", "value": "%s"}]'
    patch = ("patch", "pytorchjob", "patched", "--namespace", "team-a", "--type=json", "--dry-run=server", "--patch")
    assert server.kubectl(*patch, image % f"{REGISTRY}/podscale-base:2").returncode == 0
    assert options_in(server.kubectl(*patch, image % "docker.io/podscale-base:2").stderr) == {"launch.image"}


def test_scope_and_actions(server: ApiServer) -> None:
    labelled = {"podscale.dev/run": "r1"}
    bad = {
        name: job("docker.io/x:1", namespace=name, labels=labelled) for name in ("team-a", "strict", "trial", "free")
    }
    bare = {name: job("docker.io/x:1", namespace=name, labels={"app": "own"}) for name in ("team-a", "strict")}
    assert options_in(server.refusal(bad["team-a"])) == options_in(server.refusal(bad["strict"])) == {"launch.image"}
    assert server.refusal(bare["team-a"]) == ""
    assert options_in(server.refusal(bare["strict"])) == {"launch.image"}
    assert server.refusal(bad["free"]) == ""
    answer = server.dry_run(bad["trial"])
    assert answer.refusal == ""
    assert "launch.image: " in answer.warning


def test_pods_with_the_label_are_of_a_run_whatever_their_job_is(server: ApiServer) -> None:
    made = job("docker.io/x:1", namespace="team-a", labels={"podscale.dev/run": "r1"})
    made["metadata"]["labels"] = {}
    assert options_in(server.refusal(made)) == {"launch.image"}


def test_tasks_of_pipelines_are_checked_only_with_the_scope_namespace(server: ApiServer) -> None:
    def task(namespace: str) -> dict[str, Any]:
        template = copy.deepcopy(manifest(backend="job")["spec"]["template"])
        template["spec"]["serviceAccountName"] = "podscale-trainer"
        template["metadata"]["labels"] |= {"workflows.argoproj.io/workflow": "w"}
        argo = {**template["spec"]["containers"][0], "name": "wait", "image": "quay.io/argoproj/argoexec:v4"}
        template["spec"]["containers"].append(argo)
        return pod(template, namespace)

    assert server.refusal(task("team-a")) == ""
    assert options_in(server.refusal(task("strict"))) == {"launch.image"}


WORKSPACE_CLAIM = {
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "metadata": {"name": "podscale-workspace", "namespace": "team-a"},
    "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
}

QUEUE = {
    "apiVersion": "kueue.x-k8s.io/v1beta2",
    "kind": "LocalQueue",
    "metadata": {"name": "team-a", "namespace": "team-a"},
    "spec": {"clusterQueue": "shared"},
}


def test_submit_prints_the_answer_of_the_policy_and_of_the_api_server(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the launcher's account: first the command line refuses, then, without policy.yaml, the API server."""
    server.apply(WORKSPACE_CLAIM, QUEUE)
    monkeypatch.setenv("KUBECONFIG", str(server.account_kubeconfig("team-a", "podscale-launcher")))
    command = ["submit", "digits", "--stage", "train", "--no-wait"]
    options = ["--set", "launch.backend=pytorchjob", "--set", "launch.processes=1"]
    wrong = ["--set", "launch.image=docker.io/podscale-base:1"]
    code = main([*command, *options, *wrong])
    assert_error(code, capsys.readouterr().err, REGISTRY, "docker.io", "ml@example.org", field="launch.image")
    (defaults,) = [item for item in installed(policy_values(), "team-a") if item["kind"] == "ConfigMap"]
    without = {**defaults, "data": {"defaults.yaml": defaults["data"]["defaults.yaml"]}}
    server.apply(without)
    try:
        code = main([*command, *options, *wrong, "--set", "run.id=bad"])
        assert_error(code, capsys.readouterr().err, "launch.image: ", "ml@example.org", field="PyTorchJob bad")
        assert server.kubectl("get", "pytorchjob", "bad", "--namespace", "team-a").returncode != 0
    finally:
        server.apply(defaults)
    assert main([*command, *options, "--set", "run.id=good"]) == 0


@pytest.mark.parametrize("lock", ["images", "queues", "security", "maxAccelerators", "maxHours"])
def test_each_lock_stands_alone(server: ApiServer, lock: str) -> None:
    """Only this lock is in policy.yaml, and the API server compiles the expressions of the others' absence."""
    made = installed(policy_values(**{lock: LOCKS[lock]}), "free")
    (text,) = [item["data"]["policy.yaml"] for item in made if item["kind"] == "ConfigMap"]
    locks = yaml.safe_load(text)
    assert set(locks) - {"contact", "accelerator_resources"} == {
        {"maxAccelerators": "max_accelerators", "maxHours": "max_hours"}.get(lock, lock)
    }
    assert "namespace free" in locks["contact"]
    policies = [item for item in made if item["kind"] == "ValidatingAdmissionPolicy"]
    without = {"security": "trainjob", "queues": "pod", "maxHours": "pod"}.get(lock)
    checked = {item["metadata"]["name"].rpartition("-")[2] for item in policies}
    assert checked == {*BACKENDS, "pod"} - {without}
    assert [server.refusal(item) for item in policies] == [""] * len(policies)
