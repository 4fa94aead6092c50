"""Each kind of job: rendezvous, restarts and end of its pods, as its operator implements them."""

import re
from typing import Any

import pytest

from podscale.config import RunConfig, loads
from podscale.errors import ExitCode, InputError
from podscale.kubernetes.job_spec import build_job_spec
from podscale.kubernetes.render import RENDERERS_BY_KIND, choose_backend, render_job
from podscale.kubernetes.render.common import MONITORING_NAMESPACES
from podscale.kubernetes.resources import JOB_KINDS, STAGE_CONTAINERS, annotations_of
from podscale.launch.rendezvous import Rendezvous
from tests.support.pods import pods_of
from tests.support.refusals import refused
from tests.support.rendering import TWO, document, pods, rendered, spec

TRAINING = ("pytorchjob", "jaxjob", "trainjob", "jobset")
TPUS = ("launch.hardware=tpu-v5e-4x4", "launch.processes=1", "train.global_batch=512")


def read_rendezvous(environment: dict[str, Any], fields: dict[str, str]) -> Rendezvous | None:
    """Return the rendezvous of a pod, with the values that Kubernetes substitutes for field references."""
    return Rendezvous.read({name: fields.get(value, value) for name, value in environment.items()})


@pytest.mark.parametrize("backend", RENDERERS_BY_KIND)
def test_a_job_is_of_its_kind(backend: str) -> None:
    job = rendered(backend).job
    assert (job["apiVersion"], job["kind"]) == (JOB_KINDS[backend].api_version, JOB_KINDS[backend].kind)
    assert job["metadata"]["name"] == "digits"
    assert job["metadata"]["labels"]["podscale.dev/run"] == "digits"
    assert set(job["metadata"]["annotations"]) == {"podscale.dev/identity", "podscale.dev/version"}
    assert pods(backend).container["name"] == STAGE_CONTAINERS[backend]


def test_pods_of_a_pytorchjob_rendezvous_without_a_master() -> None:
    """The operator sets PET_NNODES and PET_NPROC_PER_NODE; they are copied here from its envvar.go."""
    pod = pods("pytorchjob", *TWO)
    operators = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PYTHONUNBUFFERED": "1"}
    for rank in range(2):
        fields = {"metadata.labels['training.kubeflow.org/replica-index']": str(rank)}
        assert read_rendezvous({**pod.environment, **operators}, fields) == Rendezvous(
            2, rank, "digits-worker-0", 23456
        )
    assert {"name": "pytorchjob-port", "containerPort": 23456, "protocol": "TCP"} in pod.container["ports"]
    assert set(rendered("pytorchjob", *TWO).job["spec"]["pytorchReplicaSpecs"]) == {"Worker"}


def test_pods_of_a_jaxjob_use_the_rendezvous_variables_of_its_operator() -> None:
    pod = pods("jaxjob", *TWO)
    operators = {"COORDINATOR_ADDRESS": "digits-worker-0", "COORDINATOR_PORT": "6666", "NUM_PROCESSES": "2"}
    assert read_rendezvous({**pod.environment, **operators, "PROCESS_ID": "1"}, {}) == Rendezvous(
        2, 1, "digits-worker-0", 6666
    )
    assert {"name": "jaxjob-port", "containerPort": 6666, "protocol": "TCP"} in pod.container["ports"]


def test_pods_of_a_jobset_rendezvous() -> None:
    pod = pods("jobset", *TWO)
    fields = {"metadata.annotations['batch.kubernetes.io/job-completion-index']": "1"}
    assert read_rendezvous(pod.environment, fields) == Rendezvous(2, 1, "digits-node-0-0.digits", 29500)


def test_pods_of_several_slices_have_different_ranks() -> None:
    pod = pods("jobset", *TPUS, "launch.cluster.slices=2")
    ranks = set()
    for slice_ in range(2):
        for host in range(4):
            fields = {
                "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(host),
                "metadata.labels['jobset.sigs.k8s.io/job-index']": str(slice_),
            }
            rendezvous = read_rendezvous(pod.environment, fields)
            assert rendezvous is not None
            assert rendezvous.nodes == 8
            ranks.add(rendezvous.node_rank)
    assert ranks == set(range(8))


def test_a_stage_of_one_pod_needs_no_rendezvous_whatever_the_training_has() -> None:
    assert read_rendezvous(pods("job", *TWO, stage="evaluate").environment, {}) == Rendezvous(1, 0)
    assert loads(spec(*TWO, stage="evaluate").document).launch.nodes == 2


def test_a_trainjob_sets_no_variable_of_torchrun() -> None:
    """Trainer's webhook refuses a TrainJob that sets one of torchrun's variables."""
    assert not [name for name in pods("trainjob", *TWO).environment if name.startswith("PET_")]
    spec_ = rendered("trainjob", *TWO).job["spec"]
    assert (spec_["trainer"]["numNodes"], spec_["trainer"]["numProcPerNode"]) == (2, 1)


def test_placement_is_in_the_trainjob_and_the_rest_of_the_pods_in_its_runtime() -> None:
    made = rendered("trainjob", "launch.hardware=nvidia-l4", "launch.processes=1", "launch.cluster.service_account=sa")
    (patch,) = made.job["spec"]["runtimePatches"]
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    fields = replicated["template"]["spec"]["template"]["spec"]
    assert fields["nodeSelector"] == {"cloud.google.com/gke-accelerator": "nvidia-l4"}
    assert set(fields) <= {"serviceAccountName", "imagePullSecrets", "nodeSelector", "tolerations"}
    runtime = made.owned_objects[-1]
    assert runtime["kind"] == "TrainingRuntime"
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert job["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert not set(fields) & set(job["template"]["spec"]["template"]["spec"])


def test_elastic_jobs_are_the_training_operators() -> None:
    elastic = (*TWO, "launch.cluster.min_nodes=1")
    body = rendered("pytorchjob", *elastic).job["spec"]
    assert (body["elasticPolicy"]["minReplicas"], body["elasticPolicy"]["maxReplicas"]) == (1, 2)
    assert "metrics" not in body["elasticPolicy"], "the operator would scale the job, and its SDK could not read it"
    operators = {"PET_NNODES": "1:2", "PET_RDZV_ENDPOINT": "digits-worker-0:23456"}
    rendezvous = read_rendezvous({**pods("pytorchjob", *elastic).environment, **operators}, {})
    assert rendezvous is not None
    assert rendezvous.node_rank is None
    for backend in ("jaxjob", "trainjob", "jobset"):
        with refused(JOB_KINDS[backend].kind, field="launch.cluster.min_nodes", got=1):
            rendered(backend, *elastic)


@pytest.mark.parametrize("backend", ["pytorchjob", "jaxjob"])
def test_the_training_operator_counts_the_restarts_of_all_pods(backend: str) -> None:
    """`failed` is the operator's own formula, PastBackoffLimit of pkg/core/job.go (1.9.4)."""

    def failed(counts: tuple[int, int], restarts: int) -> bool:
        policy = rendered(backend, *TWO, f"launch.cluster.restarts={restarts}").job["spec"]["runPolicy"]
        limit = policy["backoffLimit"]
        return sum(counts) > 0 if limit == 0 else sum(counts) >= limit

    assert [failed((count, count), 3) for count in (0, 1, 2, 3, 4)] == [False, False, False, False, True]
    assert failed((4, 3), 3), "the first pod of the fourth restart"
    assert [failed(counts, 0) for counts in ((0, 0), (1, 0))] == [False, True]


@pytest.mark.parametrize("backend", ["pytorchjob", "jaxjob"])
def test_the_training_operator_restarts_containers_in_their_pods(backend: str) -> None:
    assert rendered(backend, *TWO).job["spec"]["runPolicy"]["cleanPodPolicy"] == "Running"
    (worker,) = next(value for name, value in rendered(backend, *TWO).job["spec"].items() if "Replica" in name).values()
    assert worker["restartPolicy"] == "OnFailure"
    assert "restartPolicy" not in worker["template"]["spec"]


@pytest.mark.parametrize("backend", ["jobset", "trainjob"])
def test_a_jobset_fails_by_bad_input_and_does_not_count_preemptions(backend: str) -> None:
    made = rendered(backend, *TWO, "launch.cluster.restarts=3")
    sets = made.job["spec"] if backend == "jobset" else made.owned_objects[-1]["spec"]["template"]["spec"]
    (replicated,) = sets["replicatedJobs"]
    job = replicated["template"]["spec"]
    first, second, third = job["podFailurePolicy"]["rules"]
    assert first["onExitCodes"]["values"] == [int(ExitCode.BAD_INPUT)]
    assert first["onExitCodes"]["containerName"] == STAGE_CONTAINERS[backend]
    assert second["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert third["onExitCodes"]["values"] == [int(ExitCode.PREEMPTED)]
    assert job["template"]["spec"]["restartPolicy"] == "Never", "a podFailurePolicy needs it"
    assert job["backoffLimit"] == 0
    late, bad, taken = sets["failurePolicy"]["rules"]
    for rule in (late, bad, taken):  # JobSet's webhook (jobset_webhook.go, v0.12.0) allows no other fields
        assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"])
    assert (bad["action"], taken["action"]) == ("FailJobSet", "RestartJobSetAndIgnoreMaxRestarts")
    assert sets["failurePolicy"]["maxRestarts"] == 3


@pytest.mark.parametrize("backend", ["jobset", "trainjob"])
def test_a_jobset_over_its_time_limit_is_not_restarted(backend: str) -> None:
    """`answer` is JobSet's logic, failure_policy.go (v0.12.0): the first rule that matches, else a restart."""
    made = rendered(backend)
    sets = made.job["spec"] if backend == "jobset" else made.owned_objects[-1]["spec"]["template"]["spec"]

    def answer(reason: str, message: str) -> str:
        for rule in sets["failurePolicy"]["rules"]:
            patterns = rule.get("onJobFailureMessagePatterns", [".*"])
            matches = any(re.search(pattern, message) for pattern in patterns)
            if matches and reason in rule["onJobFailureReasons"]:
                return str(rule["action"])
        return "RestartJobSet"

    assert answer("DeadlineExceeded", "Job was active longer than specified deadline") == "FailJobSet"
    assert answer("BackoffLimitExceeded", "Job has reached the specified backoff limit") == "RestartJobSet"


def test_a_jobsets_rule_matches_the_message_of_the_job_controller() -> None:
    """The message is that of the job controller (pkg/controller/job, v1.35)."""
    (pattern,) = rendered("jobset").job["spec"]["failurePolicy"]["rules"][1]["onJobFailureMessagePatterns"]
    message = "Container podscale for pod default/x-0 failed with exit code {} matching FailJob rule at index {}"
    assert re.search(pattern, message.format(2, 0))
    assert not re.search(pattern, message.format(75, 2))


def test_a_plain_job_does_not_count_preemptions() -> None:
    body = rendered("job", stage="evaluate").job["spec"]
    assert [rule["action"] for rule in body["podFailurePolicy"]["rules"]] == ["FailJob", "Ignore", "Ignore"]
    with refused(field="launch.backend", got="job"):
        rendered("job", *TWO)


def test_shards_are_made_by_pods_with_numbers() -> None:
    body = rendered("job", "launch.shard_pods=3", stage="shard").job["spec"]
    assert (body["completionMode"], body["completions"], body["parallelism"]) == ("Indexed", 3, 3)
    command = pods("job", "launch.shard_pods=3", stage="shard").container["command"]
    assert command == ["podscale", "shard", "--index", "$(JOB_COMPLETION_INDEX)", "--of", "3"]


def test_stages_and_their_kinds() -> None:
    assert choose_backend(spec(), "trainjob") == "trainjob"
    assert {choose_backend(spec(stage=stage), "trainjob") for stage in ("shard", "evaluate", "report")} == {"job"}
    assert choose_backend(spec("launch.shard_pods=2", stage="shard"), "jobset") == "job"
    assert choose_backend(spec(*TPUS, stage="evaluate"), "jobset") == "jobset", "a slice is one whole"
    with refused("pytorchjob", field="launch.backend", got="kfjob"):
        render_job(spec(), "kfjob")


@pytest.mark.parametrize("backend", ["jaxjob", "trainjob"])
def test_slices_are_for_jobsets(backend: str) -> None:
    with refused("launch.backend=jobset", kind=InputError):
        rendered(backend, *TPUS, "launch.cluster.slices=2")
    if backend == "trainjob":
        assert pods(backend, *TPUS).count == 4


def test_a_slice_is_a_node_pool_of_its_own() -> None:
    key = "alpha.jobset.sigs.k8s.io/exclusive-topology"
    assert rendered("jobset", *TPUS).job["metadata"]["annotations"][key] == "cloud.google.com/gke-nodepool"
    assert key not in rendered("jobset", *TWO).job["metadata"]["annotations"]


@pytest.mark.parametrize("backend", TRAINING)
def test_time_limits(backend: str) -> None:
    made = rendered(backend, "launch.time_limit_hours=2", "launch.cluster.keep_hours=1")
    text = str(made.all_objects)
    assert "'activeDeadlineSeconds': 7200" in text
    assert ("'ttlSecondsAfterFinished': 3600" in text) == (backend != "trainjob"), "a TrainJob has no such field"
    assert "ttlSecondsAfterFinished" not in str(rendered(backend, "launch.cluster.keep_hours=null").all_objects)


@pytest.mark.parametrize("backend", RENDERERS_BY_KIND)
def test_only_the_pods_of_a_job_reach_each_other(backend: str) -> None:
    made = rendered(backend)
    (policy,) = (one for one in made.owned_objects if one["kind"] == "NetworkPolicy")
    selector = policy["spec"]["podSelector"]["matchLabels"]
    labels = pods(backend).metadata["labels"]
    assert selector.items() <= labels.items()
    among, scraped = policy["spec"]["ingress"]
    assert among == {"from": [{"podSelector": {"matchLabels": selector}}]}
    assert scraped["ports"] == [{"port": 9464, "protocol": "TCP"}]
    (peer,) = scraped["from"]
    (named,) = peer.pop("namespaceSelector")["matchExpressions"]
    assert named == {"key": "kubernetes.io/metadata.name", "operator": "In", "values": [*MONITORING_NAMESPACES]}
    assert peer == {}, "any user can set labels of pods"
    other = pods(backend, stage="evaluate").metadata["labels"] if backend == "job" else {"podscale.dev/run": "other"}
    assert not selector.items() <= other.items()


@pytest.mark.parametrize("backend", ["pytorchjob", "jaxjob", "trainjob", "jobset", "job"])
def test_pods_of_a_pipelines_job_know_the_grace_time_of_its_launcher(backend: str) -> None:
    config = document("digits", "launch.cluster.launcher_grace_minutes=2")

    def grace(config: RunConfig, *, pipeline: bool) -> tuple[str | None, str | None]:
        manifests = render_job(build_job_spec(config, "train", pipeline=pipeline), backend)
        environment = pods_of(manifests).environment
        return environment.get("PODSCALE_LAUNCHER_GRACE"), annotations_of(manifests.job).get("podscale.dev/launcher")

    assert grace(config, pipeline=True) == ("120", "pipeline")
    assert grace(config, pipeline=False) == (None, None)
    never = document("digits", "launch.cluster.launcher_grace_minutes=0")
    assert grace(never, pipeline=True) == (None, "pipeline")
