"""Pods of a job: which one has rank 0, and when they started."""

from typing import Any

import pytest

from podscale.kubernetes.pod_state import first_pod, read_pod_starts, trim_pod
from tests.support.cluster_objects import condition, job, pod, stored, waiting

CREATED = "2026-11-24T10:00:00Z"
JOB = stored(job(), created=CREATED)


def at(seconds: int) -> str:
    return f"2026-11-24T10:00:{seconds:02}Z"


def started_pod(index: int, scheduled: int, started: int, **changes: Any) -> dict[str, Any]:
    scheduled_condition = {**condition("PodScheduled"), "lastTransitionTime": at(scheduled)}
    state = {"running": {"startedAt": at(started)}}
    built = pod(index, **{"state": state, "status": {"conditions": [scheduled_condition]}} | changes)
    return trim_pod(built)


def test_the_parts_are_those_of_the_leading_pod() -> None:
    start = read_pod_starts(JOB, [started_pod(1, 9, 40), started_pod(0, 3, 15)])
    assert start is not None
    assert (start.scheduling, start.pull, start.pods) == (3.0, 12.0, 2)
    assert start.last_started_at - start.submitted_at == 40.0


@pytest.mark.parametrize(
    "other",
    [
        started_pod(1, 9, 40, state=waiting("ContainerCreating")),
        started_pod(1, 9, 40, restarts=1),
        pod(1, node="", phase="Pending"),
    ],
    ids=["not yet", "restarted", "no node"],
)
def test_there_is_none_before_all_pods_run_and_after_a_restart(other: dict[str, Any]) -> None:
    assert read_pod_starts(JOB, [started_pod(0, 3, 15), other]) is None


@pytest.mark.parametrize(
    "status", [{"conditions": [condition("Restarting", "False")]}, {"failed": 1}, {"restarts": 1}], ids=str
)
def test_there_is_none_of_a_job_that_restarted(status: dict[str, Any]) -> None:
    assert read_pod_starts(JOB | {"status": status}, [started_pod(0, 3, 15)]) is None


def test_there_is_none_without_pods_or_times() -> None:
    assert read_pod_starts(JOB, []) is None
    assert read_pod_starts(JOB, [pod(0)]) is None, "the time of scheduling is unknown"


def labelled(name: str, **labels: str) -> dict[str, Any]:
    made = pod(0, name=name)
    made["metadata"]["labels"] = {key.replace("__", "/"): value for key, value in labels.items()}
    return made


def test_rank_0_is_selected_among_the_pods_of_every_kind_of_job() -> None:
    index, kind = "training.kubeflow.org/replica-index", "training.kubeflow.org/replica-type"
    master = labelled("m", **{index: "0", kind: "master"})
    workers = [labelled(f"w{number}", **{index: str(number), kind: "worker"}) for number in (1, 0)]
    hosts = [
        labelled(
            f"s{number}",
            **{"jobset.sigs.k8s.io/job-index": "0", "batch.kubernetes.io/job-completion-index": str(number)},
        )
        for number in (1, 0)
    ]
    for pods, expected in ((workers, "w0"), ([*workers, master], "m"), (hosts, "s0"), ([labelled("only")], "only")):
        first = first_pod(pods)
        assert first is not None
        assert first["metadata"]["name"] == expected
    assert first_pod([]) is None
