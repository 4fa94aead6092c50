"""Reason why Kueue keeps a job suspended, from Kueue's Workload of the job.

Kueue sets the condition `Evicted` when it suspends an admitted job, and clears it when quota is reserved again.
"""

import re
from collections.abc import Iterator

from podscale.kubernetes.resources import KubernetesObject, conditions_of, name_of
from podscale.util.formatting import one_line

JOB_UID_LABEL = "kueue.x-k8s.io/job-uid"
"""Label of a Workload with the UID of its job."""
PREEMPTED = "Preempted"
"""Reason of the condition `Evicted`, and type of the condition with the details, of a preempted workload."""

_PREEMPTOR_UID = re.compile(r"\bJobUID: ([0-9A-Za-z-]+)")
_PREEMPTION_DETAILS = {
    "InClusterQueue": "which has priority in this ClusterQueue",
    "InCohortReclamation": "whose ClusterQueue takes its quota back from the cohort",
    "InCohortFairSharing": "whose ClusterQueue has less than its fair share of the cohort",
    "InCohortReclaimWhileBorrowing": "which has priority in the cohort",
}
"""Description of the preemptor, by the reason of the condition `Preempted`."""


def wait_code(workload: KubernetesObject) -> str:
    """Return Kueue's code for why the workload is not admitted, such as `Preempted` or `Pending`; "" if it has none."""
    conditions = conditions_of(workload)
    for name, status in (("Evicted", "True"), ("QuotaReserved", "False"), ("Admitted", "False")):
        if _has_status(conditions.get(name), status):
            return str(conditions[name].get("reason") or name)
    return ""


def preemptor_uid(workload: KubernetesObject) -> str:
    """Return the UID of the job for which Kueue preempted this one; "" if it was not preempted."""
    evicted = conditions_of(workload).get("Evicted")
    if evicted is None or not _has_status(evicted, "True") or evicted.get("reason") != PREEMPTED:
        return ""
    found = _PREEMPTOR_UID.search(str(evicted.get("message")))
    return found[1] if found and found[1] != "UNKNOWN" else ""


def describe_wait(workload: KubernetesObject, queue: str, preemptor: KubernetesObject | None = None) -> str:
    """Return why the job was evicted, if it was, and what it waits for now.

    Args:
        preemptor: Workload of the job for which Kueue preempted this one, if it is known.
    """
    reasons = [*_eviction(workload, preemptor), *_missing(workload)]
    return f"{'; '.join(reasons)} (queue {queue})" if reasons else f"waits in queue {queue}"


def _eviction(workload: KubernetesObject, preemptor: KubernetesObject | None) -> Iterator[str]:
    conditions = conditions_of(workload)
    evicted = conditions.get("Evicted")
    if evicted is None or not _has_status(evicted, "True"):
        return
    details = _PREEMPTION_DETAILS.get(str(conditions.get(PREEMPTED, {}).get("reason")))
    if evicted.get("reason") == PREEMPTED and details is not None:
        yield f"preempted by {_job_of(preemptor)}, {details}"
    else:
        yield f"evicted by Kueue: {_message(evicted)}"


def _missing(workload: KubernetesObject) -> Iterator[str]:
    """Yield what is missing until Kueue admits the workload."""
    spec, status, conditions = workload.get("spec") or {}, workload.get("status") or {}, conditions_of(workload)
    if spec.get("active") is False:
        yield f"Kueue does not try again until spec.active of Workload {name_of(workload)} is set to true"
        return
    quota = conditions.get("QuotaReserved")
    if quota is not None and _has_status(quota, "False"):
        again = (status.get("requeueState") or {}).get("requeueAt")
        if again:
            yield f"Kueue tries again at {again}"
        if quota.get("message") != conditions.get("Evicted", {}).get("message"):  # until Kueue has tried again
            yield f"waits for quota: {_message(quota)}"
        return
    checks = [check for check in status.get("admissionChecks") or () if check.get("state") != "Ready"]
    for check in checks:
        message = one_line(str(check.get("message") or ""))
        yield f"waits for admission check {check['name']} ({check.get('state')}): {message}".removesuffix(": ")
    admitted = conditions.get("Admitted")
    if not checks and admitted is not None and _has_status(admitted, "False"):
        yield f"waits for admission: {_message(admitted)}"


def _job_of(workload: KubernetesObject | None) -> str:
    """Return the job of a workload, such as `PyTorchJob r1`."""
    owners = (workload["metadata"].get("ownerReferences") if workload is not None else None) or ()
    return next((f"{owner['kind']} {owner['name']}" for owner in owners), "another job")


def _has_status(condition: KubernetesObject | None, status: str) -> bool:
    return condition is not None and condition.get("status") == status


def _message(condition: KubernetesObject) -> str:
    return one_line(str(condition.get("message") or condition.get("reason")))
