"""Job of a prediction: its pods, its options, and what is refused before it is submitted."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from podscale.cli import main
from podscale.errors import ABSENT, InputErrors
from podscale.kubernetes.job_spec import JobSpec
from podscale.kubernetes.namespace import ClusterPolicy, job_refusals
from podscale.kubernetes.predict_job import PredictionJob, build_predict_spec
from podscale.kubernetes.render import render_job
from tests.support import rendering
from tests.support.fake_cluster import FakeCluster
from tests.support.outcomes import assert_error
from tests.support.pods import pods_of
from tests.support.refusals import refused

SET = ["--set", "run.id=r1", "--set", "run.workspace=/work", "--set", "launch.cluster.workspace_claim=w"]
PREDICT = ["--stage", "predict", "--images", "/work/photos", "--parts", "8"]
GPU = ("launch.hardware=nvidia-l4", "launch.processes=1")


def spec(*changes: str, **options: Any) -> JobSpec:
    options = {"images": ["/workspace/photos"], "parts": 8, **options}
    return build_predict_spec(rendering.document("digits", *changes), PredictionJob(**options))


@pytest.fixture(autouse=True)
def _claim(request: pytest.FixtureRequest) -> None:
    """Claim that the documents below name."""
    if "cluster" in request.fixturenames:
        claim = {"metadata": {"name": "w"}, "spec": {"accessModes": ["ReadWriteMany"]}}
        request.getfixturevalue("cluster").put("persistentvolumeclaims", claim)


def test_each_part_is_an_index_with_failures_of_its_own() -> None:
    job = render_job(spec(parallel=3), "job").job
    fields = ("completionMode", "completions", "parallelism", "backoffLimitPerIndex")
    assert tuple(job["spec"][name] for name in fields) == ("Indexed", 8, 3, 10)
    assert "backoffLimit" not in job["spec"]
    assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never"
    assert render_job(spec(), "job").job["spec"]["parallelism"] == 8
    assert render_job(spec(parallel=99), "job").job["spec"]["parallelism"] == 8


def test_pods_predict_their_part_and_join_the_last() -> None:
    container = pods_of(render_job(spec(convert=True, calibrate=False, top=3), "job")).container
    words = container["command"]
    rows = words[words.index("--merge") + 1]
    assert rows.startswith("/workspace/runs/digits/predicted/")
    assert words[words.index("--out") + 1] == rows.removesuffix(".jsonl")
    assert words[words.index("--part") + 1] == "$(JOB_COMPLETION_INDEX)/8"
    assert words[-4:] == ["--top", "3", "--convert", "--plain-softmax"]
    assert "ports" not in container


def test_pods_have_the_hardware_of_the_run_and_no_ranks() -> None:
    pod = pods_of(render_job(spec(*GPU), "job"))
    assert pod.container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert not any(name.startswith(("PET_", "NCCL_", "JAX_")) for name in pod.environment)
    assert (
        pods_of(render_job(spec("launch.nodes=4"), "job")).container["resources"]
        == pods_of(render_job(spec(), "job")).container["resources"]
    )


def test_pods_have_no_disk_for_the_cache_of_shards() -> None:
    with_cache = pods_of(render_job(spec("launch.cluster.local_ssd=true"), "job"))
    assert with_cache.container["resources"] == pods_of(render_job(spec(), "job")).container["resources"]


def test_another_prediction_is_another_job_with_other_files() -> None:
    base = spec()
    for other in (spec(top=2), spec(images=["/workspace/more"]), spec(parts=4), spec(convert=True), spec(batch=7)):
        assert other.identity != base.identity
        assert other.command[other.command.index("--out") + 1] != base.command[base.command.index("--out") + 1]
    assert spec(parallel=2).identity == spec().identity  # how many pods run at a time changes no row


@pytest.mark.parametrize(
    ("options", "field", "got"),
    [
        ({"images": []}, "--images", ABSENT),
        ({"images": ["/elsewhere/photos"]}, "--images", "/elsewhere/photos"),
        ({"images": ["photos"]}, "--images", "photos"),
        ({"images": ["/workspace/$(HOME)"]}, "--images", "/workspace/$(HOME)"),
        ({"images": ["-"]}, "--images", "-"),
        ({"parts": 0}, "--parts", 0),
        ({"parts": 10_001}, "--parts", 10_001),
        ({"parallel": -1}, "--parallel", -1),
        ({"top": 0}, "--top", 0),
        ({"batch": 0}, "--batch", 0),
    ],
)
def test_what_cannot_run_is_refused(options: dict[str, Any], field: str, got: object) -> None:
    with refused(field=field, got=got):
        spec(**options)


def test_several_problems_are_named_together() -> None:
    with pytest.raises(InputErrors) as caught:
        spec(parts=0, images=["/elsewhere"])
    assert {error.field for error in caught.value.errors} == {"--images", "--parts"}


def test_tpus_are_refused_and_urls_are_not() -> None:
    tpu = ("launch.hardware=tpu-v5e-2x2", "launch.processes=1", "train.engine=jax")
    with refused(field="launch.hardware"):
        spec(*tpu)
    assert "gs://bucket/photos" in spec(images=["gs://bucket/photos"]).command


def test_a_policy_counts_the_pods_at_the_same_time() -> None:
    policy = ClusterPolicy.model_validate(
        {"contact": "ml@example.org", "max_accelerators": 4, "accelerator_resources": ["nvidia.com/gpu"]}
    )
    (error,) = job_refusals(policy, spec(*GPU, parallel=5))
    assert (error.field, error.got) == ("--parallel", 5)
    assert not list(job_refusals(policy, spec(*GPU, parallel=4)))


def test_render_prints_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", "digits", *SET, *PREDICT, "--parallel", "2"]) == 0
    policy, job = yaml.safe_load_all(capsys.readouterr().out)
    assert (policy["kind"], job["kind"], job["metadata"]["name"]) == ("NetworkPolicy", "Job", "r1-predict")
    assert job["spec"]["parallelism"] == 2


def test_options_of_a_prediction_belong_to_its_stage(capsys: pytest.CaptureFixture[str]) -> None:
    for option in (["--images", "/work/x"], ["--parts", "2"], ["--plain-softmax"], ["--convert"]):
        assert_error(main(["render", "digits", *SET, *option]), capsys.readouterr().err, field=option[0])


def test_zero_is_refused_and_not_taken_for_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--parts", "--top", "--batch"):
        assert_error(main(["render", "digits", *SET, *PREDICT, option, "0"]), capsys.readouterr().err, field=option)


def test_submit_creates_one_job_which_status_and_stop_find(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", *SET, *PREDICT, "--dry-run"]) == 0
    assert cluster.all("jobs") == []
    for _ in range(2):
        assert main(["submit", *SET, *PREDICT, "--no-wait"]) == 0
        assert "Job r1-predict " in capsys.readouterr().out
    assert len(cluster.all("jobs")) == 1
    other = [*PREDICT[:-1], "4"]
    assert_error(
        main(["submit", *SET, *other, "--no-wait"]), capsys.readouterr().err, "stop r1 --stage predict --delete"
    )
    assert main(["status", "r1", "--stage", "predict"]) == 0
    assert "Job r1-predict" in capsys.readouterr().out
    assert main(["stop", "r1", "--stage", "predict", "--no-wait"]) == 0
    assert cluster.all("jobs") == []


def test_submit_follows_the_job_and_prints_the_place_of_the_rows(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    done = {"type": "Complete", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    assert main(["submit", *SET, *PREDICT, "--no-wait"]) == 0
    (job,) = cluster.all("jobs")
    cluster.put("jobs", {**job, "status": {"conditions": [done]}})
    assert main(["submit", *SET, *PREDICT]) == 0
    out = capsys.readouterr().out
    words = shlex.split(" ".join(job["spec"]["template"]["spec"]["containers"][0]["command"]))
    assert f" {words[words.index('--merge') + 1]} " in out


def test_a_missing_claim_is_found_before_anything_is_created(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.remove("persistentvolumeclaims", "w")
    code = main(["submit", *SET, *PREDICT])
    assert_error(code, capsys.readouterr().err, field="launch.cluster.workspace_claim")
    assert cluster.all("jobs") == cluster.all("networkpolicies") == []


def test_the_command_of_the_job_is_one_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The parser takes every option of the pods; the run is missing here."""
    words = [
        word.replace("$(JOB_COMPLETION_INDEX)", "0").replace("/workspace", str(tmp_path)) for word in spec().command
    ]
    (tmp_path / "runs" / "digits" / "predicted").mkdir(parents=True)
    assert_error(main(words[1:]), capsys.readouterr().err, field=tmp_path / "runs" / "digits")
