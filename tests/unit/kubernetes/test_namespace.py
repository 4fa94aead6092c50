"""Namespace of the jobs: which options its policy refuses, and that commands check it before they create anything."""

import io
import json
from pathlib import Path

import pytest
import yaml

from podscale.cli import main
from podscale.errors import InputErrors
from podscale.kubernetes.client import connect_cluster
from podscale.kubernetes.namespace import ClusterPolicy, check_stages, job_refusals
from podscale.kubernetes.run_stage import LinePrinter, submit_stage
from podscale.kubernetes.transport import NamedCluster
from tests.support import rendering
from tests.support.fake_cluster import FakeCluster
from tests.support.kfp_api import kfp_api
from tests.support.outcomes import assert_error
from tests.support.refusals import refused

GPUS = ("launch.hardware=nvidia-h100-80gb x8", "launch.nodes=4", "launch.processes=8", "train.global_batch=512")
TPUS = ("launch.hardware=tpu-v5e-4x4", "launch.processes=1", "train.global_batch=512", "train.engine=jax")
COUNTED = ("nvidia.com/gpu", "google.com/tpu")
SET = [
    *("--set", "run.id=r1", "--set", "run.workspace=/work", "--set", "launch.cluster.workspace_claim=w"),
    *("--set", "launch.nodes=2"),
]
LOCKS = {"contact": "ml@example.org", "images": ["allowed.example/team"], "max_hours": 24}
ALLOWED = [
    *("--set", "launch.image=allowed.example/team/podscale-base:1"),
    *("--set", "launch.launcher_image=allowed.example/team/podscale-tools:1"),
    *("--set", "launch.time_limit_hours=24"),
]


@pytest.fixture(autouse=True)
def _claim(request: pytest.FixtureRequest) -> None:
    """Claim that the documents below name."""
    if "cluster" in request.fixturenames:
        claim = {"metadata": {"name": "w"}, "spec": {"accessModes": ["ReadWriteMany"]}}
        request.getfixturevalue("cluster").put("persistentvolumeclaims", claim)


def fields(policy: ClusterPolicy, *changes: str, stage: str = "train") -> list[str]:
    return [error.field for error in job_refusals(policy, rendering.spec(*changes, stage=stage))]


@pytest.mark.parametrize(
    ("image", "allowed"),
    [
        ("registry.example/team/podscale-base:1", True),
        ("registry.example/team/deep/er@sha256:00", True),
        ("registry.example/team:1", True),
        ("registry.example/team", True),
        ("registry.example/team@sha256:00", True),
        ("registry.example/team-two/podscale-base:1", False),
        ("registry.example/podscale-base:1", False),
        ("registry.example/team:5000/podscale-base", False),
        ("localhost:5000/podscale-base:1", True),
        ("localhost:5001/podscale-base:1", False),
        ("localhost/podscale-base:1", False),
        ("mirror.example/registry.example/team/podscale-base:1", False),
    ],
)
def test_an_allowed_image_is_a_whole_part_of_the_path(image: str, allowed: bool) -> None:
    policy = ClusterPolicy(images=("registry.example/team", "localhost:5000"))
    assert policy.allows_image(image) is allowed


def test_a_policy_without_locks_allows_everything() -> None:
    assert fields(ClusterPolicy(), *GPUS) == fields(ClusterPolicy(), *TPUS) == []


def test_queues_are_required_of_training_and_evaluation_only() -> None:
    policy = ClusterPolicy(queues=("a", "b"))
    assert fields(policy) == fields(policy, stage="evaluate") == ["launch.cluster.queue"]
    assert fields(policy, "launch.cluster.queue=other") == ["launch.cluster.queue"]
    assert (
        fields(policy, "launch.cluster.queue=b")
        == fields(policy, stage="shard")
        == fields(policy, stage="report")
        == []
    )


def test_accelerators_of_all_pods_are_counted() -> None:
    policy = ClusterPolicy(max_accelerators=16, accelerator_resources=COUNTED)
    (error,) = job_refusals(policy, rendering.spec(*GPUS))
    assert (error.field, error.got) == ("launch.nodes", 4)
    assert "4 x 8" in str(error)
    assert fields(policy, *GPUS, "launch.nodes=2") == fields(policy, *GPUS, stage="shard") == []
    assert fields(ClusterPolicy(max_accelerators=15, accelerator_resources=COUNTED), *TPUS) == ["launch.hardware"]
    assert fields(policy, *TPUS) == []
    assert fields(ClusterPolicy(max_accelerators=1, accelerator_resources=("google.com/tpu",)), *GPUS) == []


def test_hardware_that_needs_privileges_is_refused() -> None:
    policy = ClusterPolicy(security="restricted")
    assert fields(policy, *TPUS) == fields(policy, "launch.cluster.security=privileged") == ["launch.cluster.security"]
    assert fields(policy, *GPUS) == []


def test_the_time_limit_may_equal_the_longest() -> None:
    policy = ClusterPolicy(max_hours=24)
    assert fields(policy) == ["launch.time_limit_hours"]
    assert fields(policy, "launch.time_limit_hours=24") == []


def put_policy(cluster: FakeCluster, **locks: object) -> None:
    text = yaml.safe_dump(locks or LOCKS)
    cluster.put("configmaps", {"metadata": {"name": "podscale-defaults"}, "data": {"policy.yaml": text}})


def test_a_submission_is_refused_before_its_first_stage(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sharding would be allowed: only training and evaluation need a queue."""
    put_policy(cluster, queues=["a"], contact="ml@example.org")
    code = main(["submit", *SET])
    assert_error(code, capsys.readouterr().err, "ml@example.org", "Allowed: a.", field="launch.cluster.queue")
    assert main(["submit", *SET, "--dry-run"]) == 2
    assert cluster.all("pytorchjobs") == cluster.all("jobs") == cluster.all("networkpolicies") == []


def test_the_policy_holds_without_the_defaults_of_the_cluster(
    cluster: FakeCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_policy(cluster)
    defaults = tmp_path / "defaults.yaml"
    defaults.write_text("launch: {image: elsewhere.example/podscale-base:1, time_limit_hours: 1}")
    code = main(["submit", *SET, "--defaults", str(defaults), "--stage", "train", "--no-wait"])
    assert_error(code, capsys.readouterr().err, "allowed.example/team", "elsewhere.example", field="launch.image")
    assert main(["submit", *SET, *ALLOWED, "--stage", "train", "--no-wait"]) == 0


def test_every_refusal_is_listed_once(cluster: FakeCluster) -> None:
    put_policy(cluster)
    api = connect_cluster(NamedCluster())
    with refused("namespace train", kind=InputErrors) as refusal:
        check_stages(api, rendering.document("digits"), ("shard", "train", "evaluate", "report"))
    assert [error.field for error in refusal.error.errors] == ["launch.image", "launch.time_limit_hours"]


def test_a_running_job_is_adopted_although_the_policy_changed(cluster: FakeCluster) -> None:
    """A launcher that restarts must come back to its job, which the API server has admitted."""
    config = rendering.document("digits", "launch.nodes=2")
    api, printer = connect_cluster(NamedCluster()), LinePrinter(io.StringIO())
    assert submit_stage(api, config, "train", None, printer).action == "created"
    put_policy(cluster)
    assert submit_stage(api, config, "train", None, printer).action == "adopted"
    with refused(kind=InputErrors):
        submit_stage(api, rendering.document("digits", "run.id=r2"), "train", None, printer)


def test_pipelines_are_checked_with_the_defaults_of_the_cluster(
    cluster: FakeCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_policy(cluster)
    package = tmp_path / "p.yaml"
    shared = ["--defaults", "cluster", "--set", "launch.backend=auto"]
    compiled = ["compile", "digits", *SET, *shared, "-o", str(package)]
    other_launcher = [*ALLOWED, "--set", "launch.launcher_image=elsewhere.example/podscale-tools:1"]
    assert_error(main([*compiled, *other_launcher]), capsys.readouterr().err, field="launch.launcher_image")
    assert not package.exists()
    assert main([*compiled, *ALLOWED]) == 0
    with kfp_api() as api:
        backend = [*SET, *shared, "--host", api.url]
        for command in (["run", "digits"], ["upload", "digits"], ["schedule", "digits", "--cron", "0 2 * * *"]):
            assert main(["pipeline", *command, *backend, *other_launcher]) == 2
        assert json.dumps(api.store.packages) in ("[]", "{}")
        assert main(["pipeline", "run", "digits", *backend, *ALLOWED]) == 0


def test_rendered_jobs_and_studies_are_checked_with_the_defaults_of_the_cluster(
    cluster: FakeCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    defaults = yaml.safe_dump({"run": {"workspace": "/work"}, "launch": {"cluster": {"workspace_claim": "theirs"}}})
    content = {"policy.yaml": yaml.safe_dump({**LOCKS, "max_hours": 24}), "defaults.yaml": defaults}
    cluster.put("configmaps", {"metadata": {"name": "podscale-defaults"}, "data": content})
    package, shared = tmp_path / "p.yaml", ["--defaults", "cluster"]
    studied = ["study", "digits-nlcg", "--backend", "kfp", "-o", str(package)]
    for command in (["render", "digits"], studied):
        code = main([*command, *shared, *ALLOWED, "--set", "launch.image=elsewhere.example/podscale-base:1"])
        assert_error(code, capsys.readouterr().err, "elsewhere.example", field="launch.image")
        assert main([*command, *shared, *ALLOWED]) == 0
    assert "theirs" in package.read_text(), "the defaults are in the package"
    assert main(["render", "digits"]) == 0, "without the defaults of the cluster, nothing is read"


def test_a_policy_that_this_version_does_not_know_stops_submissions(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    put_policy(cluster, max_dollars=100)
    code = main(["submit", *SET, "--stage", "train", "--no-wait"])
    field = "policy.yaml of ConfigMap podscale-defaults of namespace train:1: max_dollars"
    assert_error(code, capsys.readouterr().err, field=field)


def test_doctor_reports_what_the_policy_refuses(cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    def policy_line(*options: str) -> str | None:
        main(["doctor", "--no-pull", "--cluster", *SET, *options, "--json"])
        found = {line["subject"]: line["verdict"] for line in json.loads(capsys.readouterr().out)}
        return found.get("policy")

    assert policy_line() is None
    put_policy(cluster)
    assert policy_line() == "missing"
    assert policy_line(*ALLOWED) == "ok"
