"""Cron expressions of recurring runs as KFP's controller reads them, and the ids of the runs."""

import pytest

from podscale.components.run_parameters import PipelineJob, expand_run_id
from podscale.config import load
from podscale.pipelines.presets import resolve_preset
from podscale.pipelines.schedules import kfp_cron, scheduled_run_id
from podscale.runs.ensemble_members import ensemble_members
from tests.support.refusals import refused

JOB = PipelineJob(id="3FA9b2c1-0000-4000-8000-123456789abc", created="2026-11-24T02:00:07Z")


@pytest.mark.parametrize(
    ("cron", "expected"),
    [
        ("0 2 * * *", "0 0 2 * * *"),
        ("30 0 2 * * *", "30 0 2 * * *"),
        ("*/15 8-18/2 1,15 JAN-mar mon-fri", "0 */15 8-18/2 1,15 JAN-mar mon-fri"),
        ("5/15 ? ? * 0", "0 5/15 ? ? * 0"),
        ("@daily", "@daily"),
        ("@every 6h30m", "@every 6h30m"),
    ],
)
def test_a_valid_expression(cron: str, expected: str) -> None:
    assert kfp_cron(cron) == expected


@pytest.mark.parametrize(
    ("cron", "got"),
    [
        ("61 2 * * *", "61"),
        ("0 24 * * *", "24"),
        ("0 2 0 * *", "0"),
        ("0 2 * 13 *", "13"),
        ("0 2 * * 7", "7"),
        ("0 2 * * mon-", "mon-"),
        ("5-1 2 * * *", "5-1"),
        ("*/0 2 * * *", "*/0"),
        ("1,,2 2 * * *", ""),
        ("0 2 L * *", "L"),
        ("daily", "daily"),
        ("@every hour", "@every hour"),
        ("@reboot", "@reboot"),
    ],
)
def test_an_expression_that_kfp_does_not_understand(cron: str, got: str) -> None:
    with refused(field="--cron", got=got):
        kfp_cron(cron)


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (JOB, "nightly-202611240200-3fa9"),
        (PipelineJob(JOB.id, JOB.created, "2026-11-24T01:59:00Z"), "nightly-202611240159-3fa9"),
        (PipelineJob(JOB.id, "2026-11-24 02:00:07 +0000 UTC"), "nightly-202611240200-3fa9"),
        (PipelineJob(JOB.id, "{{$.pipeline_job_create_time_utc}}"), "nightly-3fa9b2c10000"),  # KFP before 2.17
        (PipelineJob("{{$.pipeline_job_uuid}}", JOB.created), "nightly-202611240200"),
        (PipelineJob(), "nightly"),
    ],
)
def test_the_id_of_a_scheduled_run(job: PipelineJob, expected: str) -> None:
    run_id = scheduled_run_id(load(resolve_preset(None), ["run.id=nightly"]))
    assert expand_run_id(run_id, job) == expected


def test_an_id_without_a_time_stays() -> None:
    assert expand_run_id("digits", JOB) == "digits"


@pytest.mark.parametrize(("preset", "longest"), [("digits", 22), ("digits-ensemble", 19)])
def test_every_scheduled_run_of_an_accepted_document_has_a_valid_id(preset: str, longest: int) -> None:
    config = load(resolve_preset(preset), [f"run.id={'a' * longest}"])
    run_id = expand_run_id(scheduled_run_id(config), JOB)
    members = ensemble_members(load(resolve_preset(preset), [f"run.id={run_id}"]))
    assert max(map(len, [run_id, *(member.config.run.id for member in members)])) == 40
    with refused(field="run.id"):
        scheduled_run_id(load(resolve_preset(preset), [f"run.id={'a' * (longest + 1)}"]))
