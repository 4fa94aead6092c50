"""manifests/jobs/: the files equal the output of the code, and the real CRDs accept every object in them."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from podscale.cli.documents import SERVE
from podscale.util.libyaml import SafeLoader
from tests.support import crds
from tests.support.pod_security import violations
from tests.support.pods import Pods, pods_of
from tools.job_manifests import TARGET as JOBS
from tools.job_manifests import Case, cases

CASES = cases()
JOB_CASES = [case for case in CASES if case.stage != SERVE]
KUBERNETES = "1.33"


def objects_of(path: Path) -> list[dict[str, Any]]:
    return list(yaml.load_all(path.read_text(encoding="utf-8"), Loader=SafeLoader))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.file)
def test_the_file_equals_the_output_of_render(case: Case) -> None:
    """`python tools/job_manifests.py` regenerates the files."""
    assert (JOBS / case.file).read_text(encoding="utf-8") == case.render()


def test_there_are_no_other_files() -> None:
    assert {str(path.relative_to(JOBS)) for path in JOBS.rglob("*.yaml")} == {case.file for case in CASES}


def test_the_command_at_the_top_prints_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    from podscale.cli import main

    case = next(case for case in CASES if case.file.startswith("hardware/"))
    first, _, rest = (JOBS / case.file).read_text(encoding="utf-8").partition("\n")
    program, *arguments = shlex.split(first.removeprefix("# "))
    assert program == "podscale"
    assert main(arguments) == 0
    assert capsys.readouterr().out == rest


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.file)
def test_every_object_is_valid(case: Case) -> None:
    import kubernetes_validate

    for manifest in objects_of(JOBS / case.file):
        if manifest["kind"] in crds.DEFINITIONS:
            crds.validate(manifest)
        else:
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def test_validation_sees_unknown_fields_and_wrong_types() -> None:
    for kind, spoil in [
        ("digits.pytorchjob.yaml", lambda spec: spec["runPolicy"].update(cleanPods="All")),
        ("digits.jaxjob.yaml", lambda spec: spec["runPolicy"].update(backoffLimit="10")),
        ("digits.trainjob.yaml", lambda spec: spec["trainer"].update(nodes=2)),
        (
            "digits.jobset.yaml",
            lambda spec: spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"].update(hostnet=True),
        ),
    ]:
        job = objects_of(JOBS / kind)[-1]
        crds.validate(job)
        spoil(job["spec"])
        with pytest.raises(AssertionError):
            crds.validate(job)


@pytest.mark.parametrize("case", JOB_CASES, ids=lambda case: case.file)
def test_pods_of_cpus_and_gpus_are_admitted_where_security_is_restricted(case: Case) -> None:
    from podscale.kubernetes.render import JobManifests

    *owned, job = objects_of(JOBS / case.file)
    found: Pods = pods_of(JobManifests(job, tuple(owned)))
    needs_more = any(kind in case.file for kind in ("tpu-", "v3-1024", "tcpx", "rdma"))
    assert bool(violations(found.spec)) == needs_more


@pytest.mark.parametrize(
    ("file", "model"),
    [("digits.pytorchjob", "PyTorchJob"), ("digits.elastic", "PyTorchJob"), ("digits.jaxjob", "JAXJob")],
)
def test_kubeflows_own_sdk_reads_and_writes_the_jobs(file: str, model: str) -> None:
    """The SDK's models refuse more than the operator does; users who read our jobs with the SDK must not get errors."""
    import json

    from kubeflow.training.api_client import ApiClient

    class Answer:
        def __init__(self, body: Any) -> None:
            self.data = json.dumps(body)

    job = objects_of(JOBS / f"{file}.yaml")[-1]
    client = ApiClient()
    read = client.deserialize(Answer(job), f"KubeflowOrgV1{model}")
    assert type(read).__name__ == f"KubeflowOrgV1{model}"
    assert client.sanitize_for_serialization(read) == job
