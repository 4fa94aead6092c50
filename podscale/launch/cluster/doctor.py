"""`podscale doctor --cluster`: whether a cluster can carry out a run, line by line, with what to do about each.

Nothing is created: the last line has the API server check the job itself without effect. What these credentials may
not see is said to be unseen, not to be missing.
"""

from collections.abc import Callable, Iterator

from podscale.config import RunConfig
from podscale.config.preflight import preflight
from podscale.errors import InputError, PodscaleError
from podscale.findings import Finding
from podscale.launch.cluster import machines, operators
from podscale.launch.cluster.api import Api, connect
from podscale.launch.cluster.carry import manifests_of
from podscale.launch.cluster.choose import choose
from podscale.launch.cluster.errors import Missing, NotFound, Refused
from podscale.launch.cluster.permissions import RULES, Rule
from podscale.launch.cluster.pods import name_of
from podscale.launch.cluster.resources import (
    CLAIMS,
    JOB_KINDS,
    LOCAL_QUEUES,
    NAMESPACES,
    QUOTAS,
    SERVICE_ACCOUNTS,
    STORAGE_CLASSES,
    Object,
)
from podscale.launch.cluster.submit import check
from podscale.launch.jobspec import JobSpec, job_spec

ENFORCE = "pod-security.kubernetes.io/enforce"
DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"


def examine(config: RunConfig) -> Iterator[Finding]:
    """Looks at the cluster that the document names, for this document."""
    try:
        api = connect(config.launch.cluster)
        version = api.version()
    except PodscaleError as error:
        yield Finding("API server", "missing", str(error), "nothing else can be looked at")
        return
    yield Finding("API server", "ok", f"Kubernetes {version.get('gitVersion')}, {api.target.origin}")
    spec, backend = None, str(config.launch.backend)
    try:
        spec = job_spec(config, "train")
        backend = choose(api, spec, config.launch.backend)
        preflight(config, "job")
    except InputError as error:
        yield Finding("document", "missing", str(error), "change the document")
    looks: list[Callable[[], Iterator[Finding]]] = [
        lambda: _namespace(api, spec),
        lambda: operators.kinds(api, backend),
        lambda: operators.controllers(api, backend),
        lambda: _permissions(api, backend),
        lambda: _quota(api),
        lambda: _storage(api, config),
        lambda: _service_account(api, config),
        lambda: _queue(api, config, backend),
        lambda: operators.pipelines(api),
        lambda: operators.monitoring(api),
    ]
    if spec is not None:
        looks.insert(4, lambda: machines.fitting_nodes(api, spec))
        looks.append(lambda: _acceptance(api, config))
    for look in looks:
        try:
            yield from look()
        except PodscaleError as error:
            yield Finding("cluster", "missing", str(error), "look again when this is mended")


def _namespace(api: Api, spec: JobSpec | None) -> Iterator[Finding]:
    subject = f"namespace {api.namespace}"
    try:
        found = api.get(NAMESPACES, api.namespace)
    except NotFound:
        yield Finding(subject, "missing", "there is none", f"kubectl create namespace {api.namespace}")
        return
    except Refused:
        yield Finding(subject, "note", "may not be looked at with these credentials", "ask for its Pod Security level")
        return
    level = (found["metadata"].get("labels") or {}).get(ENFORCE, "privileged")
    if spec is not None and spec.security == "privileged" and level != "privileged":
        advice = f"use a namespace whose label {ENFORCE} is privileged, or launch.cluster.security=restricted"
        yield Finding(subject, "missing", f"Pod Security {level}, but this job needs privileged pods", advice)
        return
    yield Finding(subject, "ok", f"Pod Security {level}")
    if level == "restricted":
        yield from operators.init_container(api)


def _permissions(api: Api, backend: str) -> Iterator[Finding]:
    """One line for what is needed and may not be done, or one that all is allowed."""
    refused = [(rule, verbs) for rule in RULES if (verbs := _refused_verbs(api, rule))]
    needed = {JOB_KINDS[backend].full_name, JOB_KINDS["job"].full_name} if backend in JOB_KINDS else set()
    kinds = {kind.full_name for kind in JOB_KINDS.values()} | {"trainingruntimes.trainer.kubeflow.org"}
    needed |= {"trainingruntimes.trainer.kubeflow.org"} if backend == "trainjob" else set()
    lacking = [(rule, verbs) for rule, verbs in refused if rule.whole not in kinds - needed]
    for rule, verbs in lacking:
        yield Finding(
            f"may {rule.name}",
            "note" if rule.optional else "missing",
            f"not allowed: {', '.join(verbs)} ({rule.why})",
            f"bind the chart's launcher role in namespace {api.namespace} to these credentials",
        )
    if not lacking:
        yield Finding("permissions", "ok", f"submit, follow and stop jobs in namespace {api.namespace}")


def _refused_verbs(api: Api, rule: Rule) -> list[str]:
    return [verb for verb in rule.verbs if not api.allowed(verb, rule.group, rule.resource, name=rule.only)]


def _quota(api: Api) -> Iterator[Finding]:
    """Quotas that are used up; whether this job fits is for admission to say."""
    try:
        quotas, _ = api.list(QUOTAS)
    except Refused:
        yield Finding("quota", "note", "may not be looked at with these credentials", "ask who runs the namespace")
        return
    for quota in quotas:
        status = quota.get("status") or {}
        hard, used = status.get("hard") or {}, status.get("used") or {}
        text = ", ".join(f"{used.get(name, '0')} of {hard[name]} {name}" for name in hard)
        full = [name for name in hard if machines.amount(used.get(name, "0")) >= machines.amount(hard[name])]
        yield Finding(
            f"quota {name_of(quota)}",
            "missing" if full else "ok",
            text or "no limits",
            f"{', '.join(full)} used up: wait for other jobs, or have it raised" if full else "",
        )
    if not quotas:
        yield Finding("quota", "ok", "none in this namespace")


def _storage(api: Api, config: RunConfig) -> Iterator[Finding]:
    claim = config.launch.cluster.workspace_claim
    if claim is not None:
        yield _claim(api, claim, config.launch.nodes)
        return
    try:
        classes, _ = api.list(STORAGE_CLASSES)
    except Refused:
        return
    default = [name_of(one) for one in classes if (one["metadata"].get("annotations") or {}).get(DEFAULT_CLASS)]
    yield Finding(
        "workspace",
        "note",
        f"no launch.cluster.workspace_claim; storage classes: {', '.join(map(name_of, classes)) or 'none'}"
        + (f" (default {default[0]})" if default else ""),
        "make a ReadWriteMany claim (the chart can), and name it; object stores need none",
    )


def _claim(api: Api, claim: str, nodes: int) -> Finding:
    subject = f"claim {claim}"
    try:
        found = api.get(CLAIMS, claim)
    except NotFound:
        return Finding(subject, "missing", "there is none", "make it (the chart can), or name another workspace_claim")
    except Refused:
        return Finding(subject, "note", "may not be looked at with these credentials", "see that it is bound")
    phase = (found.get("status") or {}).get("phase")
    modes = found["spec"].get("accessModes") or []
    if phase == "Lost":
        return Finding(subject, "missing", "its volume is lost", "restore the volume, or name another claim")
    if nodes > 1 and "ReadWriteMany" not in modes:
        advice = "pods on several nodes need ReadWriteMany (Filestore, a bucket, NFS); one node will do without"
        return Finding(subject, "note", f"{phase}, {', '.join(modes)}", advice)
    return Finding(subject, "ok", f"{phase}, {', '.join(modes)}")


def _service_account(api: Api, config: RunConfig) -> Iterator[Finding]:
    name = config.launch.cluster.service_account
    if name is None:
        return
    try:
        api.get(SERVICE_ACCOUNTS, name)
        yield Finding(f"service account {name}", "ok", "is there")
    except NotFound:
        yield Finding(f"service account {name}", "missing", "there is none", "make it (the chart does)")
    except Refused:
        return


def _queue(api: Api, config: RunConfig, backend: str) -> Iterator[Finding]:
    name = config.launch.cluster.queue
    if name is None:
        return
    subject = f"queue {name}"
    try:
        found = api.get(LOCAL_QUEUES, name)
    except Missing:
        yield Finding(subject, "missing", "this cluster has no Kueue", str(api.missing(LOCAL_QUEUES)))
        return
    except NotFound:
        advice = f"kubectl get localqueues -n {api.namespace}"
        yield Finding(subject, "missing", "there is no such LocalQueue", advice)
        return
    except Refused:
        yield Finding(subject, "note", "may not be looked at with these credentials", "ask who runs Kueue")
        return
    inactive = _inactive(found)
    if inactive:
        yield Finding(subject, "missing", inactive, "its ClusterQueue must exist, have flavors, and not be stopped")
    else:
        yield Finding(subject, "ok", f"active, of ClusterQueue {found['spec'].get('clusterQueue')}")
    yield from operators.managed_by_kueue(api, backend)


def _inactive(queue: Object) -> str:
    conditions = (queue.get("status") or {}).get("conditions") or ()
    refused = (found for found in conditions if found.get("type") == "Active" and found.get("status") == "False")
    return next((str(found.get("message") or "not active") for found in refused), "")


def _acceptance(api: Api, config: RunConfig) -> Iterator[Finding]:
    try:
        check(api, manifests_of(api, config, "train"))
    except InputError as error:
        yield Finding("the job itself", "missing", str(error), "mend this, then `podscale submit`")
        return
    yield Finding("the job itself", "ok", "the API server would accept it (dry run)")
