"""Quotas of a namespace: what the pods of a job need of them, and how the API server reports that they do not fit."""

import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from podscale.kubernetes import inventory
from podscale.kubernetes.client import ClusterClient
from podscale.kubernetes.errors import ApiError
from podscale.kubernetes.job_spec import JobSpec
from podscale.kubernetes.pod_state import PodProblem
from podscale.kubernetes.render.pod import container_resources
from podscale.kubernetes.resources import JOB_KINDS, RESOURCE_QUOTAS, KubernetesObject, name_of, parse_quantity
from podscale.util.formatting import format_count
from podscale.util.terminal import CheckResult

LESS_ADVICE = "lower launch.resources.cpus, launch.resources.memory_gib or launch.nodes, or ask for a higher quota"
NAME_ADVICE = "set launch.resources.cpus and launch.resources.memory_gib"
COMPUTE_NAMES = tuple(f"{prefix}{name}" for prefix in ("", "requests.", "limits.") for name in ("cpu", "memory"))
"""Names in a quota that every pod must then specify."""

_AMOUNTS = re.compile(r"requested: (?P<requested>.*), used: .*, limited: (?P<limited>.*)")


def check_quotas(api: ClusterClient, spec: JobSpec | None, backend: str) -> Iterator[CheckResult]:
    """Check that the pods of the job fit into what is left of each quota; without a `spec`, report the quotas only."""
    try:
        quotas, _ = api.list(RESOURCE_QUOTAS)
    except ApiError:
        yield inventory.unreadable("quota", "ask the administrator of the namespace")
        return
    needs = job_needs(spec, backend) if spec is not None else {}
    for quota in quotas:
        applies = spec is not None and quota_applies(quota.get("spec") or {}, spec)
        yield _check_quota(quota, needs if applies else {}, applies=applies)
    if not quotas:
        yield CheckResult("quota", "ok", "none in this namespace")


def job_needs(spec: JobSpec, backend: str) -> dict[str, Decimal]:
    """Return what all pods of a job need, by the names in a quota; an amount that the pods do not specify is 0."""
    needs = {"pods": Decimal(spec.nodes), "count/pods": Decimal(spec.nodes)}
    resources = container_resources(spec)
    for prefix, amounts in (("requests.", resources["requests"]), ("limits.", resources["limits"])):
        for name in {"cpu", "memory", *amounts}:
            needs[f"{prefix}{name}"] = spec.nodes * parse_quantity(amounts.get(name, "0"))
    needs |= {name: needs[f"requests.{name}"] for name in ("cpu", "memory", "ephemeral-storage")}
    kinds = {JOB_KINDS[backend].full_name} if backend in JOB_KINDS else set()
    return needs | {f"count/{name}": Decimal(1) for name in (*kinds, "networkpolicies.networking.k8s.io")}


def quota_applies(quota_spec: KubernetesObject, spec: JobSpec) -> bool:
    """Return whether a quota with scopes counts the pods of a job. The pods have no deadline of their own."""
    request = spec.resources.request
    is_best_effort = not (request.cpus or request.memory_gib)
    priority = spec.cluster.priority_class
    selected = (quota_spec.get("scopeSelector") or {}).get("matchExpressions") or ()
    for scope in (*({"scopeName": name} for name in quota_spec.get("scopes") or ()), *selected):
        name, operator, values = scope["scopeName"], scope.get("operator", "Exists"), scope.get("values") or ()
        matches = {
            "BestEffort": is_best_effort,
            "NotBestEffort": not is_best_effort,
            "Terminating": False,
            "CrossNamespacePodAffinity": False,
        }.get(name, True)
        if name == "PriorityClass":
            matches = priority in values if operator in ("In", "NotIn") else priority is not None
            matches = matches != (operator in ("NotIn", "DoesNotExist"))
        if not matches:
            return False
    return True


def _check_quota(quota: KubernetesObject, needs: Mapping[str, Decimal], *, applies: bool) -> CheckResult:
    """Return the result for one quota; a limit of something that the job does not need is no problem."""
    status: dict[str, Any] = quota.get("status") or {}
    hard, used = status.get("hard") or {}, status.get("used") or {}
    text = ", ".join(f"{used.get(name, '0')} of {hard[name]} {name}" for name in hard) or "no limits"
    subject = f"quota {name_of(quota)}"
    unnamed = [name for name in hard if applies and name in COMPUTE_NAMES and not needs.get(name)]
    if unnamed:
        return CheckResult(subject, "missing", f"{text}; the pods do not specify {', '.join(unnamed)}", NAME_ADVICE)
    limits = {name: parse_quantity(hard[name]) for name in hard}
    zero = Decimal(0)
    never = [name for name in hard if needs.get(name, zero) > limits[name]]
    left = {name: max(zero, limits[name] - parse_quantity(used.get(name, "0"))) for name in hard}
    later = [name for name in hard if needs.get(name, zero) > left[name]]
    if not later:
        return CheckResult(subject, "ok", text)
    missing = ", ".join(f"{_format_amount(needs[name])} {name}" for name in never or later)
    advice = LESS_ADVICE if never else f"wait for other jobs, or {LESS_ADVICE}"
    return CheckResult(subject, "missing", f"{text}; this job needs {missing}", advice)


def _format_amount(amount: Decimal) -> str:
    gib = amount / 2**30
    return f"{gib:.4g}Gi" if gib >= 1 else f"{amount.normalize():f}"


def refused_pods_problem(message: str, pods: int) -> PodProblem:
    """Return the problem of pods that a quota refuses, from the event about one of them.

    It is permanent if the pods do not specify what the quota counts, or if one pod alone exceeds the quota.
    """
    is_unspecified = "failed quota" in message
    exceeds = (match := _AMOUNTS.search(message)) is not None and _exceeds(match["requested"], match["limited"])
    advice = NAME_ADVICE if is_unspecified else LESS_ADVICE if exceeds else f"wait for other jobs, or {LESS_ADVICE}"
    subject = f"its {format_count(pods, 'pod')}"
    return PodProblem(
        f"{subject} do not fit the namespace's quota: {message}; {advice} (`kubectl describe quota`)",
        is_permanent=is_unspecified or exceeds,
        topic="quota",
    )


def _exceeds(requested: str, limited: str) -> bool:
    """Return whether one of the requested amounts is more than its limit; both are lists such as `pods=1,cpu=2`."""
    limits = dict(entry.partition("=")[::2] for entry in limited.split(","))
    amounts = (entry.partition("=")[::2] for entry in requested.split(","))
    return any(name in limits and parse_quantity(amount) > parse_quantity(limits[name]) for name, amount in amounts)
