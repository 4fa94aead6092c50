"""Checks of `podscale doctor --cluster`: one line for each requirement of a run, with a remedy, and the RBAC rules.

Nothing is created: the last check is a server-side dry run of the job. Objects that these credentials may not read are
reported as unseen, not as missing. The table of RBAC rules is the source of the chart's Role and of the docs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from podscale.config import RunConfig
from podscale.config.preflight import preflight
from podscale.errors import InputError, PodscaleError
from podscale.kubernetes import inventory
from podscale.kubernetes.client import ClusterClient, connect_cluster
from podscale.kubernetes.errors import ApiError, ApiNotFound, KindNotServed
from podscale.kubernetes.job_spec import JobSpec, build_job_spec
from podscale.kubernetes.pod_state import name_of
from podscale.kubernetes.resources import (
    JOB_BACKENDS,
    JOB_KINDS,
    LOCAL_QUEUES,
    NAMESPACES,
    RESOURCE_QUOTAS,
    SERVICE_ACCOUNTS,
    STORAGE_CLASSES,
    VOLUME_CLAIMS,
    KubernetesObject,
)
from podscale.kubernetes.run_stage import build_manifests, choose_job_kind
from podscale.kubernetes.submit import dry_run_job
from podscale.util.terminal import CheckResult

JOB_VERBS = ("create", "get", "list", "watch", "delete")
OWNED_OBJECT_VERBS = ("create", "get", "patch", "delete")
FINALIZERS = "finalizers"
"""Part of an object whose update the admission plugin OwnerReferencesPermissionEnforcement asks of whoever sets
blockOwnerDeletion (companions.own)."""


@dataclass(frozen=True)
class PermissionRule:
    """Verbs on one resource of an API group ('' is the core group); a part stands behind a slash, as in RBAC.

    optional: without it everything works on most clusters, or people are told less.
    """

    group: str
    resource: str
    verbs: tuple[str, ...]
    reason: str
    optional: bool = False
    only_names: str = ""
    """The one object that is needed, where it is one."""

    @property
    def name(self) -> str:
        return f"{self.resource}.{self.group}" if self.group else self.resource

    @property
    def base_resource(self) -> str:
        """Return the resource that a subresource belongs to, or the resource itself."""
        return replace(self, resource=self.resource.partition("/")[0]).name


PERMISSION_RULES = (
    *(
        PermissionRule(kind.group, kind.plural, JOB_VERBS, f"to submit, follow and stop jobs of kind {kind.kind}")
        for kind in JOB_BACKENDS.values()
    ),
    *(
        PermissionRule(
            kind.group,
            f"{kind.plural}/{FINALIZERS}",
            ("update",),
            f"to have a {kind.kind} outlast what comes with it, where the cluster asks for this right (OpenShift does)",
            optional=True,
        )
        for kind in JOB_BACKENDS.values()
    ),
    PermissionRule(
        "networking.k8s.io", "networkpolicies", OWNED_OBJECT_VERBS, "the policy that lets the ranks of a job meet"
    ),
    PermissionRule("trainer.kubeflow.org", "trainingruntimes", OWNED_OBJECT_VERBS, "how a TrainJob makes its pods"),
    PermissionRule("", "pods", ("get", "list", "watch"), "to tell how a job stands and how its stage ended"),
    PermissionRule("", "pods/log", ("get",), "to show the log of rank 0"),
    PermissionRule("", "events", ("list",), "to tell why pods cannot be made or started", optional=True),
    PermissionRule("kueue.x-k8s.io", "workloads", ("list",), "to tell why a job waits in a queue", optional=True),
    PermissionRule(
        "", "configmaps", ("get",), "the defaults of the namespace", optional=True, only_names="podscale-defaults"
    ),
)
"""All in the namespace of the jobs. Whoever trains needs none of it."""


POD_SECURITY_LABEL = "pod-security.kubernetes.io/enforce"
DEFAULT_CLASS_ANNOTATION = "storageclass.kubernetes.io/is-default-class"


def check_cluster(config: RunConfig) -> Iterator[CheckResult]:
    """Check the cluster that the document names, for this document."""
    try:
        api = connect_cluster(config.launch.cluster)
        version = api.version()
    except PodscaleError as error:
        yield CheckResult("API server", "missing", str(error), "nothing else can be looked at")
        return
    yield CheckResult("API server", "ok", f"Kubernetes {version.get('gitVersion')}, {api.target.origin}")
    spec, backend = None, str(config.launch.backend)
    try:
        spec = build_job_spec(config, "train")
        backend = choose_job_kind(api, spec, config.launch.backend)
        preflight(config, "job")
    except InputError as error:
        yield CheckResult("document", "missing", str(error), "change the document")
    looks: list[Callable[[], Iterator[CheckResult]]] = [
        lambda: _check_namespace(api, spec),
        lambda: inventory.check_job_kinds(api, backend),
        lambda: inventory.check_controllers(api, backend),
        lambda: _check_permissions(api, backend),
        lambda: _check_quota(api),
        lambda: _check_storage(api, config),
        lambda: _check_service_account(api, config),
        lambda: _check_queue(api, config, backend),
        lambda: inventory.check_pipelines(api),
        lambda: inventory.check_monitoring(api),
    ]
    if spec is not None:
        looks.insert(4, lambda: inventory.fitting_nodes(api, spec))
        looks.append(lambda: _check_admission(api, config))
    for look in looks:
        try:
            yield from look()
        except PodscaleError as error:
            yield CheckResult("cluster", "missing", str(error), "look again when this is mended")


def _check_namespace(api: ClusterClient, spec: JobSpec | None) -> Iterator[CheckResult]:
    subject = f"namespace {api.namespace}"
    try:
        found = api.get(NAMESPACES, api.namespace)
    except ApiNotFound:
        yield CheckResult(subject, "missing", "there is none", f"kubectl create namespace {api.namespace}")
        return
    except ApiError:
        yield CheckResult(
            subject, "note", "may not be looked at with these credentials", "ask for its Pod Security level"
        )
        return
    level = (found["metadata"].get("labels") or {}).get(POD_SECURITY_LABEL, "privileged")
    if spec is not None and spec.security_mode == "privileged" and level != "privileged":
        advice = (
            f"use a namespace whose label {POD_SECURITY_LABEL} is privileged, or launch.cluster.security=restricted"
        )
        yield CheckResult(subject, "missing", f"Pod Security {level}, but this job needs privileged pods", advice)
        return
    yield CheckResult(subject, "ok", f"Pod Security {level}")
    if level == "restricted":
        yield from inventory.check_init_container(api)


def _check_permissions(api: ClusterClient, backend: str) -> Iterator[CheckResult]:
    """One line for what is needed and may not be done, or one that all is allowed."""
    refused = [(rule, verbs) for rule in PERMISSION_RULES if (verbs := _denied_verbs(api, rule))]
    needed = {JOB_KINDS[backend].full_name, JOB_KINDS["job"].full_name} if backend in JOB_KINDS else set()
    kinds = {kind.full_name for kind in JOB_KINDS.values()} | {"trainingruntimes.trainer.kubeflow.org"}
    needed |= {"trainingruntimes.trainer.kubeflow.org"} if backend == "trainjob" else set()
    lacking = [(rule, verbs) for rule, verbs in refused if rule.base_resource not in kinds - needed]
    for rule, verbs in lacking:
        yield CheckResult(
            f"may {rule.name}",
            "note" if rule.optional else "missing",
            f"not allowed: {', '.join(verbs)} ({rule.reason})",
            f"bind the chart's launcher role in namespace {api.namespace} to these credentials",
        )
    if not lacking:
        yield CheckResult("permissions", "ok", f"submit, follow and stop jobs in namespace {api.namespace}")


def _denied_verbs(api: ClusterClient, rule: PermissionRule) -> list[str]:
    return [verb for verb in rule.verbs if not api.can_i(verb, rule.group, rule.resource, name=rule.only_names)]


def _check_quota(api: ClusterClient) -> Iterator[CheckResult]:
    """Quotas that are used up; whether this job fits is for admission to say."""
    try:
        quotas, _ = api.list(RESOURCE_QUOTAS)
    except ApiError:
        yield CheckResult("quota", "note", "may not be looked at with these credentials", "ask who runs the namespace")
        return
    for quota in quotas:
        status = quota.get("status") or {}
        hard, used = status.get("hard") or {}, status.get("used") or {}
        text = ", ".join(f"{used.get(name, '0')} of {hard[name]} {name}" for name in hard)
        full = [
            name
            for name in hard
            if inventory.parse_quantity(used.get(name, "0")) >= inventory.parse_quantity(hard[name])
        ]
        yield CheckResult(
            f"quota {name_of(quota)}",
            "missing" if full else "ok",
            text or "no limits",
            f"{', '.join(full)} used up: wait for other jobs, or have it raised" if full else "",
        )
    if not quotas:
        yield CheckResult("quota", "ok", "none in this namespace")


def _check_storage(api: ClusterClient, config: RunConfig) -> Iterator[CheckResult]:
    claim = config.launch.cluster.workspace_claim
    if claim is not None:
        yield _check_claim(api, claim, config.launch.nodes)
        return
    try:
        classes, _ = api.list(STORAGE_CLASSES)
    except ApiError:
        return
    default = [
        name_of(one) for one in classes if (one["metadata"].get("annotations") or {}).get(DEFAULT_CLASS_ANNOTATION)
    ]
    yield CheckResult(
        "workspace",
        "note",
        f"no launch.cluster.workspace_claim; storage classes: {', '.join(map(name_of, classes)) or 'none'}"
        + (f" (default {default[0]})" if default else ""),
        "make a ReadWriteMany claim (the chart can), and name it; object stores need none",
    )


def _check_claim(api: ClusterClient, claim: str, nodes: int) -> CheckResult:
    subject = f"claim {claim}"
    try:
        found = api.get(VOLUME_CLAIMS, claim)
    except ApiNotFound:
        return CheckResult(
            subject, "missing", "there is none", "make it (the chart can), or name another workspace_claim"
        )
    except ApiError:
        return CheckResult(subject, "note", "may not be looked at with these credentials", "see that it is bound")
    phase = (found.get("status") or {}).get("phase")
    modes = found["spec"].get("accessModes") or []
    if phase == "Lost":
        return CheckResult(subject, "missing", "its volume is lost", "restore the volume, or name another claim")
    if nodes > 1 and "ReadWriteMany" not in modes:
        advice = "pods on several nodes need ReadWriteMany (Filestore, a bucket, NFS); one node will do without"
        return CheckResult(subject, "note", f"{phase}, {', '.join(modes)}", advice)
    return CheckResult(subject, "ok", f"{phase}, {', '.join(modes)}")


def _check_service_account(api: ClusterClient, config: RunConfig) -> Iterator[CheckResult]:
    name = config.launch.cluster.service_account
    if name is None:
        return
    try:
        api.get(SERVICE_ACCOUNTS, name)
        yield CheckResult(f"service account {name}", "ok", "is there")
    except ApiNotFound:
        yield CheckResult(f"service account {name}", "missing", "there is none", "make it (the chart does)")
    except ApiError:
        return


def _check_queue(api: ClusterClient, config: RunConfig, backend: str) -> Iterator[CheckResult]:
    name = config.launch.cluster.queue
    if name is None:
        return
    subject = f"queue {name}"
    try:
        found = api.get(LOCAL_QUEUES, name)
    except KindNotServed:
        yield CheckResult(subject, "missing", "this cluster has no Kueue", str(api.missing_error(LOCAL_QUEUES)))
        return
    except ApiNotFound:
        advice = f"kubectl get localqueues -n {api.namespace}"
        yield CheckResult(subject, "missing", "there is no such LocalQueue", advice)
        return
    except ApiError:
        yield CheckResult(subject, "note", "may not be looked at with these credentials", "ask who runs Kueue")
        return
    inactive = _inactive_reason(found)
    if inactive:
        yield CheckResult(subject, "missing", inactive, "its ClusterQueue must exist, have flavors, and not be stopped")
    else:
        yield CheckResult(subject, "ok", f"active, of ClusterQueue {found['spec'].get('clusterQueue')}")
    yield from inventory.check_managed_by_kueue(api, backend)


def _inactive_reason(queue: KubernetesObject) -> str:
    conditions = (queue.get("status") or {}).get("conditions") or ()
    refused = (found for found in conditions if found.get("type") == "Active" and found.get("status") == "False")
    return next((str(found.get("message") or "not active") for found in refused), "")


def _check_admission(api: ClusterClient, config: RunConfig) -> Iterator[CheckResult]:
    try:
        dry_run_job(api, build_manifests(api, config, "train"))
    except InputError as error:
        yield CheckResult("the job itself", "missing", str(error), "mend this, then `podscale submit`")
        return
    yield CheckResult("the job itself", "ok", "the API server would accept it (dry run)")
