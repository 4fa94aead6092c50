"""Commands for jobs through the command line, against the cluster double."""

import json
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from podscale.cli import main
from podscale.config import load
from podscale.kubernetes import client, logs
from podscale.kubernetes.client import ClusterClient
from podscale.kubernetes.job_spec import build_job_spec
from podscale.kubernetes.job_watcher import JobObserver
from podscale.kubernetes.resources import JOB_KINDS
from podscale.kubernetes.retry import RetryPolicy
from podscale.kubernetes.run_stage import choose_job_kind
from tests.support.cluster_objects import condition, job, pod, terminated, unschedulable
from tests.support.fake_cluster import FakeCluster
from tests.support.fake_state import Answer
from tests.support.kfp_api import kfp_api
from tests.support.outcomes import assert_error
from tests.support.polling import until
from tests.support.refusals import refused

SET = [
    *("--set", "run.id=r1", "--set", "run.workspace=/work", "--set", "launch.cluster.workspace_claim=w"),
    *("--set", "launch.nodes=2"),
]
TPU_SLICE = ("launch.hardware=tpu-v5e-4x4", "launch.nodes=1", "launch.processes=1", "train.global_batch=512")
COUNTED_TPUS = (
    *("launch.resources.accelerator=google.com/tpu", "launch.resources.accelerators=4"),
    *("launch.nodes=1", "launch.processes=1"),
)
DEFAULTS = "run: {workspace: /work}\nlaunch: {image: cluster/image:1, cluster: {workspace_claim: w, queue: lq}}\n"


@pytest.fixture(autouse=True)
def _named_objects(cluster: FakeCluster) -> None:
    """Objects that the documents below name."""
    cluster.put("persistentvolumeclaims", {"metadata": {"name": "w"}, "spec": {"accessModes": ["ReadWriteMany"]}})
    for name in ("lq", "mine"):
        cluster.put("localqueues", {"metadata": {"name": name}, "spec": {"clusterQueue": "cq"}})


def put_defaults(cluster: FakeCluster) -> None:
    cluster.put("configmaps", {"metadata": {"name": "podscale-defaults"}, "data": {"defaults.yaml": DEFAULTS}})


def containers(cluster: FakeCluster) -> list[str]:
    (made,) = cluster.all("pytorchjobs")
    template = made["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    return [container["image"] for container in template["spec"]["containers"]]


def test_submit_without_waiting_creates_the_job_and_returns(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", *SET, "--stage", "train", "--no-wait"]) == 0
    assert "PyTorchJob r1 " in capsys.readouterr().out
    assert len(cluster.all("pytorchjobs")) == 1


def test_a_dry_run_checks_every_stage_and_creates_nothing(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", *SET, "--dry-run"]) == 0
    assert capsys.readouterr().out.count("accepted by the API server") == 4
    assert cluster.all("pytorchjobs") == cluster.all("jobs") == cluster.all("networkpolicies") == []


def test_a_missing_claim_is_found_before_the_first_stage(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.remove("persistentvolumeclaims", "w")
    assert_error(main(["submit", *SET]), capsys.readouterr().err, field="launch.cluster.workspace_claim")
    assert cluster.all("jobs") == cluster.all("networkpolicies") == []


def test_all_stages_need_waiting(cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert_error(main(["submit", *SET, "--no-wait"]), capsys.readouterr().err, "--stage shard", field="--no-wait")


def test_the_document_overrides_the_cluster_s_defaults(cluster: FakeCluster) -> None:
    put_defaults(cluster)
    options = ["--set", "run.id=r1", "--set", "launch.cluster.queue=mine", "--stage", "train", "--no-wait"]
    assert main(["submit", *options]) == 0
    assert containers(cluster) == ["cluster/image:1"]
    assert cluster.all("pytorchjobs")[0]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "mine"


def test_a_defaults_file_replaces_the_defaults_of_the_cluster(cluster: FakeCluster, tmp_path: Path) -> None:
    put_defaults(cluster)
    file = tmp_path / "defaults.yaml"
    file.write_text("launch: {image: file/image:2}")
    assert main(["submit", *SET, "--defaults", str(file), "--stage", "train", "--no-wait"]) == 0
    assert containers(cluster) == ["file/image:2"]


def test_hardware_without_an_engine_is_refused_before_anything_is_created(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    tpu = ["--set", "launch.hardware=tpu-v5e-2x2", "--set", "launch.processes=1", "--set", "launch.nodes=1"]
    counted = [word for option in COUNTED_TPUS for word in ("--set", option)]
    for hardware in (tpu, counted):
        code = main(["submit", *SET, *hardware, "--stage", "train", "--no-wait"])
        assert_error(code, capsys.readouterr().err, "train.engine=jax", field="launch.hardware")
        assert main(["doctor", "--no-pull", "--cluster", *SET, *hardware]) == 2
        assert "launch.hardware: " in capsys.readouterr().out
    assert cluster.all("jobsets") == cluster.all("networkpolicies") == []


def test_every_command_takes_the_cluster_s_defaults(
    cluster: FakeCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_defaults(cluster)
    package = tmp_path / "p.yaml"
    assert main(["render", "digits", "--defaults", "cluster"]) == 0
    assert "image: cluster/image:1" in capsys.readouterr().out
    assert main(["compile", "digits", "--defaults", "cluster", "-o", str(package)]) == 0
    assert "cluster/image:1" in package.read_text()
    assert "note: run.workspace" not in capsys.readouterr().err
    with kfp_api() as api:
        assert main(["pipeline", "upload", "digits", "--defaults", "cluster", "--host", api.url]) == 0
        assert "cluster/image:1" in json.dumps(api.store.packages)
    assert main(["submit", "digits", "--defaults", "cluster", "--stage", "train", "--no-wait"]) == 0
    assert containers(cluster) == ["cluster/image:1"]


def test_jobs_are_looked_up_in_the_namespace_of_the_defaults(
    cluster: FakeCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = {"defaults.yaml": DEFAULTS.replace("cluster: {", "cluster: {namespace: elsewhere, ")}
    cluster.put("configmaps", {"metadata": {"name": "podscale-defaults"}, "data": elsewhere})
    document = tmp_path / "run.yaml"
    document.write_text("run: {id: r1}")
    assert main(["status", str(document)]) == 1
    assert "namespace elsewhere" in capsys.readouterr().out


def test_the_error_of_an_unknown_default_names_configmap_and_line(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    content = {"defaults.yaml": "launch: {imaeg: x}"}
    cluster.put("configmaps", {"metadata": {"name": "podscale-defaults"}, "data": content})
    code = main(["submit", *SET, "--stage", "train", "--no-wait"])
    field = "ConfigMap podscale-defaults of namespace train:1: launch.imaeg"
    assert_error(code, capsys.readouterr().err, "launch.image", field=field)


def test_defaults_that_may_not_be_read_are_ignored(cluster: FakeCluster) -> None:
    cluster.denied.add(("get", "configmaps"))
    assert main(["submit", *SET, "--stage", "train", "--no-wait"]) == 0


OPEN_COMMANDS = (
    ["submit", "digits"],
    ["submit", "goyal2017-8k", "--dry-run"],
    ["render", "digits", "--defaults", "cluster"],
    ["compile", "digits", "--defaults", "cluster", "-o", "/nowhere/pipeline.yaml"],
)
"""Commands with documents that leave the workspace to the defaults of the namespace."""


@pytest.mark.parametrize("command", OPEN_COMMANDS, ids=" ".join)
def test_defaults_that_a_document_needs_and_the_namespace_lacks_are_named(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    for content in (None, {"other.yaml": "x"}):
        if content is not None:
            cluster.put("configmaps", {"metadata": {"name": "podscale-defaults"}, "data": content})
        field = "ConfigMap podscale-defaults"
        assert_error(main(command), capsys.readouterr().err, "namespace train", "--namespace", field=field)


@pytest.mark.parametrize("command", OPEN_COMMANDS, ids=" ".join)
def test_defaults_that_may_not_be_read_are_named_if_they_are_needed(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    cluster.denied |= {("get", "configmaps"), ("get", "namespaces")}
    code, output = main(command), capsys.readouterr().err
    assert_error(code, output, "namespace train", "RBAC", "launcher role", field="ConfigMap podscale-defaults")


@pytest.mark.parametrize("command", [*OPEN_COMMANDS, ["submit", *SET]], ids=" ".join)
def test_a_namespace_that_does_not_exist_is_named(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    code, output = main([*command, "--namespace", "nowhere"]), capsys.readouterr().err
    assert_error(code, output, "'nowhere'", "kubectl create namespace nowhere", field="launch.cluster.namespace")


def test_a_run_is_found_without_the_defaults_of_the_namespace(cluster: FakeCluster) -> None:
    cluster.put("pytorchjobs", job(name="digits", labels={"podscale.dev/run": "digits"}))
    assert main(["status", "digits"]) == 0


def test_the_namespace_of_the_defaults_is_an_option(
    cluster: FakeCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of `compile` and `render`, as of `submit`; of `pipeline`, whose option is also KFP's namespace."""
    cluster.put("namespaces", {"metadata": {"name": "team"}})
    content = {"defaults.yaml": DEFAULTS.replace("cluster/image:1", "team/image:1")}
    cluster.put("configmaps", {"metadata": {"name": "podscale-defaults"}, "data": content}, "team")
    package, options = tmp_path / "p.yaml", ("--defaults", "cluster", "--namespace", "team")
    assert main(["render", "digits", *options]) == 0
    assert "namespace: team" in (text := capsys.readouterr().out)
    assert "image: team/image:1" in text
    assert main(["compile", "digits", "-o", str(package), *options]) == 0
    assert "team/image:1" in package.read_text()
    with kfp_api() as api:
        api.store.multi_user = True
        for command in ("upload", "run"):
            assert main(["pipeline", command, "digits", *options, "--host", api.url]) == 0
        assert "team/image:1" in json.dumps(api.store.packages)


@pytest.mark.parametrize(
    ("options", "kinds", "expected"),
    [
        ((), {"pytorchjobs", "trainjobs", "jobsets"}, "pytorchjob"),
        ((), {"trainjobs", "jobsets"}, "trainjob"),
        ((), {"jobsets"}, "jobset"),
        (("train.engine=jax",), {"pytorchjobs", "jaxjobs", "trainjobs", "jobsets"}, "jaxjob"),
        (("train.engine=jax",), {"pytorchjobs", "trainjobs", "jobsets"}, "jobset"),
        ((*TPU_SLICE, "train.engine=jax"), {"jaxjobs", "jobsets", "trainjobs"}, "jobset"),
        (("launch.nodes=1",), set(), "job"),
        (("launch.backend=jobset",), {"pytorchjobs"}, "jobset"),
        (TPU_SLICE, {"pytorchjobs", "jobsets", "trainjobs"}, "jobset"),
        (TPU_SLICE, {"pytorchjobs", "trainjobs"}, "trainjob"),
        (COUNTED_TPUS, {"pytorchjobs", "jobsets", "trainjobs"}, "jobset"),
        (COUNTED_TPUS, {"pytorchjobs"}, "job"),
        (("launch.nodes=2", "launch.cluster.min_nodes=1"), {"pytorchjobs", "jobsets", "trainjobs"}, "pytorchjob"),
    ],
)
def test_the_kind_of_job_follows_the_cluster_and_the_hardware(
    api: ClusterClient, cluster: FakeCluster, options: tuple[str, ...], kinds: set[str], expected: str
) -> None:
    for name in JOB_KINDS:
        resource = JOB_KINDS[name]
        if name != "job" and resource.plural not in kinds:
            cluster.kinds[resource.api_version].discard(resource.plural)
    config = load(None, ("launch.backend=auto", "launch.nodes=4", *options))
    assert choose_job_kind(api, build_job_spec(config, "train", mounted=False), config.launch.backend) == expected


def test_several_nodes_without_an_operator_are_refused_with_what_to_install(
    api: ClusterClient, cluster: FakeCluster
) -> None:
    for version in ("kubeflow.org/v1", "trainer.kubeflow.org/v1alpha1", "jobset.x-k8s.io/v1alpha2"):
        cluster.kinds[version].clear()
    with refused("PyTorchJob, TrainJob, JobSet", "Kubeflow Training Operator", field="launch.backend", got="local"):
        choose_job_kind(api, build_job_spec(load(None, ("launch.nodes=4",)), "train", mounted=False), "local")


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ((*TPU_SLICE, "launch.cluster.slices=2"), "JobSet"),
        (("launch.cluster.min_nodes=1",), "PyTorchJob"),
    ],
)
def test_a_plain_job_replaces_neither_slices_nor_an_elastic_job(
    api: ClusterClient, cluster: FakeCluster, options: tuple[str, ...], kind: str
) -> None:
    for version in ("kubeflow.org/v1", "trainer.kubeflow.org/v1alpha1", "jobset.x-k8s.io/v1alpha2"):
        cluster.kinds[version].clear()
    with refused(f"one of {kind}, and", field="launch.backend", got="auto"):
        choose_job_kind(api, build_job_spec(load(None, options), "train", mounted=False), "auto")


def test_status_reports_job_and_pods(cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.put("pytorchjobs", job())
    cluster.put("pods", pod(0, last=terminated(77, "rank 1 is lost"), restarts=1))
    cluster.put("pods", unschedulable(1, "0/1 nodes are available"))
    assert main(["status", "r1"]) == 0
    output = capsys.readouterr().out
    (line, *pods) = output.splitlines()
    for part in ("PyTorchJob r1", "restarting", "1 of 2 pods", "1 restart", "r1-worker-1", "0/1 nodes are available"):
        assert part in line
    (lost,) = (pod for pod in pods if "r1-worker-0" in pod)
    for part in ("node-1", "1 restart", "77", "rank 1 is lost"):
        assert part in lost


def test_status_as_json_has_what_a_program_needs(cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.put("pytorchjobs", job(status={"conditions": [condition("Failed")]}))
    cluster.put("pods", pod(0, state=terminated(2, "no such folder"), phase="Failed"))
    assert main(["status", "r1", "--json"]) == 0
    (output,) = json.loads(capsys.readouterr().out)
    assert (output["phase"], output["exit_code"], output["error"]) == ("failed", 2, "no such folder")
    assert [one["name"] for one in output["pods"]] == ["r1-worker-0"]


def test_an_unknown_run_is_one_readable_error(cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "r9"]) == 1
    assert main(["logs", "r9"]) == 2
    assert main(["stop", "r9"]) == 0
    assert "run r9" in capsys.readouterr().out


def test_list_shows_the_jobs_of_podscale_and_not_those_that_operators_create(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    made = cluster.put("jobsets", job("JobSet", name="r2", labels={"podscale.dev/run": "r2"}))
    child = job("Job", name="r2-slice-0", labels={"podscale.dev/run": "r2"})
    child["metadata"]["ownerReferences"] = [{"uid": made["metadata"]["uid"], "controller": True}]
    cluster.put("jobs", child)
    launched = job()
    launched["metadata"]["ownerReferences"] = [{"kind": "Workflow", "uid": "w"}]  # it does not control the job
    cluster.put("pytorchjobs", launched)
    foreign = job("Job", name="other")
    foreign["metadata"]["labels"] = {}
    cluster.put("jobs", foreign)
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert sorted(line.split()[0] for line in lines) == ["r1", "r2"]


def test_logs_prints_rank_0_to_the_end(cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.put("pytorchjobs", job(status={"conditions": [condition("Succeeded")]}))
    assert_error(main(["logs", "r1"]), capsys.readouterr().err, "rank 0", "none yet", field="run r1")
    cluster.put("pods", pod(0, state=terminated(0), phase="Succeeded"))
    cluster.say("r1-worker-0", "epoch 1")
    cluster.hang_up("r1-worker-0")
    for options in ((), ("--follow",), ("--pod", "r1-worker-0")):
        assert main(["logs", "r1", *options]) == 0
        assert capsys.readouterr().out == "epoch 1\n"
    assert main(["logs", "r1", "--pod", "absent"]) == 2


def test_a_named_pod_is_followed_through_silence_and_restarts(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "LOG_SILENCE_SECONDS", 0.3)
    monkeypatch.setattr(logs, "POLL_SECONDS", 0.02)
    cluster.put("pytorchjobs", job())
    cluster.put("pods", pod(0))
    cluster.put("pods", pod(1))
    cluster.say("r1-worker-0", "of rank 0")
    cluster.say("r1-worker-1", "epoch 1")

    def go_on() -> None:
        time.sleep(1.0)  # longer than the silence of a stream may last
        cluster.restart("r1-worker-1")
        cluster.put("pods", pod(1, restarts=1, last=terminated(1)))
        cluster.say("r1-worker-1", "epoch 2")
        cluster.hang_up("r1-worker-1")
        cluster.put("pods", pod(1, restarts=1, state=terminated(0), phase="Succeeded"))
        cluster.put("pytorchjobs", job(status={"conditions": [condition("Succeeded")]}))

    threading.Thread(target=go_on, daemon=True).start()
    assert main(["logs", "r1", "--pod", "r1-worker-1", "--follow"]) == 0
    assert capsys.readouterr().out == "epoch 1\nepoch 2\n"


def examined(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, str]]:
    assert main(["doctor", "--no-pull", "--cluster", *SET, "--json"]) == 2
    return {result["subject"]: result for result in json.loads(capsys.readouterr().out)}


def test_doctor_finds_an_api_server_that_is_down(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "podscale.kubernetes.client.connect_cluster.__kwdefaults__", {"policy": RetryPolicy(0.2), "notify": None}
    )
    cluster.down()
    results = examined(capsys)
    assert [result["verdict"] for result in results.values()] == ["missing"]
    assert set(results) == {"API server"}


def test_doctor_finds_defaults_that_cannot_be_used(cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    content = {"defaults.yaml": "launch: {imaeg: x}"}
    cluster.put("configmaps", {"metadata": {"name": "podscale-defaults"}, "data": content})
    results = examined(capsys)
    assert "launch.imaeg" in results["defaults"]["found"]
    assert results["API server"]["verdict"] == "ok"


def test_doctor_names_the_defaults_that_a_namespace_lacks(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--no-pull", "--cluster", "digits", "--json"]) == 2
    results = {result["subject"]: result for result in json.loads(capsys.readouterr().out)}
    assert "podscale-defaults" in results["defaults"]["found"]
    assert "document" not in results, "the workspace of the chart is assumed"
    assert results["claim podscale-workspace"]["verdict"] == "missing"
    assert main(["doctor", "--no-pull", "--cluster", "digits", "--json", "-n", "nowhere"]) == 2
    results = {result["subject"]: result for result in json.loads(capsys.readouterr().out)}
    assert results["namespace nowhere"]["verdict"] == "missing"


def test_stop_keeps_finished_jobs_unless_asked(cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.put("pytorchjobs", job(status={"conditions": [condition("Succeeded")]}))
    evaluation = job("Job", name="r1-evaluate", labels={"podscale.dev/stage": "evaluate"})
    cluster.put("jobs", evaluation)
    assert main(["stop", "r1"]) == 0
    assert (len(cluster.all("pytorchjobs")), len(cluster.all("jobs"))) == (1, 0)
    assert main(["stop", "r1", "--delete"]) == 0
    assert cluster.all("pytorchjobs") == []
    assert "Job r1-evaluate" in capsys.readouterr().out


def test_stopping_a_job_of_a_pipeline_warns_about_kubeflow_pipelines(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    for launcher, expected in (("pipeline", True), ("", False)):
        made = job()
        made["metadata"]["annotations"]["podscale.dev/launcher"] = launcher
        cluster.put("pytorchjobs", made)
        assert main(["stop", "r1"]) == 0
        assert ("docs/how-to/kfp.md" in capsys.readouterr().out) is expected


def test_jobs_that_may_not_be_listed_are_not_reported_as_absent(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.denied.add(("list", "pytorchjobs"))
    for command in (["list"], ["status", "r1"], ["stop", "r1"], ["logs", "r1"]):
        assert_error(main(command), capsys.readouterr().err, " list pytorchjobs.kubeflow.org")
    cluster.kinds["kubeflow.org/v1"].discard("pytorchjobs")  # nothing can be hidden of what is not there
    assert main(["list"]) == 0
    cluster.put("jobs", job("Job"))
    assert main(["stop", "r1"]) == 0


def test_a_run_may_be_named_by_its_document(cluster: FakeCluster, tmp_path: Path) -> None:
    document = tmp_path / "run.yaml"
    document.write_text("run: {id: r1}")
    cluster.put("pytorchjobs", job())
    assert main(["stop", str(document)]) == 0
    assert cluster.all("pytorchjobs") == []


def test_no_cluster_is_one_line_for_every_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    for command in (["submit", *SET], ["status", "r1"], ["logs", "r1"], ["stop", "r1"], ["list"]):
        code, output = main(command), capsys.readouterr().err
        assert_error(code, output, "KUBECONFIG", "launch.backend=local")
        assert output.count("\n") == 1
    assert main(["doctor", "--no-pull", "--cluster"]) == 2


def test_watching_a_large_job_takes_few_requests_and_little_memory_a_pod(
    api: ClusterClient, cluster: FakeCluster
) -> None:
    made = cluster.put("pytorchjobs", job())
    for number in range(256):
        one = pod(number)
        one["spec"]["containers"] = [{"name": "pytorch", "env": [{"name": "X", "value": "x" * 2000}]}]
        cluster.put("pods", one)
    with closing(JobObserver(api, made)) as observer:
        until(lambda: observer.state().phase == "running")
        before = api.requests
        for number in range(256):
            cluster.put("pods", pod(number, restarts=1))
        until(lambda: min(one["status"]["containerStatuses"][0]["restartCount"] for one in observer.pods()) == 1)
        assert api.requests - before <= 4
        assert max(len(json.dumps(one)) for one in observer.pods()) < 1000


def test_a_webhooks_refusal_is_printed_without_a_traceback(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.admission.append(lambda *_: Answer(403, "Forbidden", 'admission webhook "w" denied the request: no'))
    code = main(["submit", *SET, "--stage", "train"])
    assert_error(code, capsys.readouterr().err, 'admission webhook "w" denied the request: no')
