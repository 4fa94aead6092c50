"""Checks of `podscale doctor --cluster`: one line for each requirement of a run, with a remedy, and the RBAC rules.

Nothing is created except the Job of image_check, and that is deleted: the last check is a server-side dry run of the
job. Objects that these credentials may not read are reported as such, not as missing. The table of RBAC rules is the
source of the chart's Role and of the docs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from podscale.config import RunConfig
from podscale.config.preflight import preflight
from podscale.errors import InputError, PodscaleError
from podscale.kubernetes import inventory
from podscale.kubernetes.client import ClusterClient, connect_cluster
from podscale.kubernetes.errors import ApiError, ApiNotFound
from podscale.kubernetes.image_check import check_images
from podscale.kubernetes.job_spec import JobSpec, build_job_spec
from podscale.kubernetes.namespace import check_stages
from podscale.kubernetes.quota import check_quotas
from podscale.kubernetes.resources import (
    JOB_KINDS,
    LOCAL_QUEUES,
    NAMESPACES,
    STORAGE_CLASSES,
    annotations_of,
    labels_of,
    name_of,
)
from podscale.kubernetes.run_stage import build_manifests, choose_job_kind
from podscale.kubernetes.submit import dry_run_job
from podscale.kubernetes.submit_checks import required_objects
from podscale.runs.stage_outcomes import STAGES
from podscale.util.terminal import CheckResult

JOB_VERBS = ("create", "get", "list", "watch", "delete")
OWNED_OBJECT_VERBS = ("create", "get", "patch", "delete")
FINALIZERS = "finalizers"
"""Subresource that the admission plugin OwnerReferencesPermissionEnforcement requires for blockOwnerDeletion."""


@dataclass(frozen=True)
class PermissionRule:
    """Permission for verbs on one resource, as in RBAC.

    Args:
        group: API group; "" is the core group.
        resource: plural, with a subresource after a slash.
        optional: jobs run without it on most clusters, with less precise messages at most.
        only_names: name of the one object that it covers; "" for all.
    """

    group: str
    resource: str
    verbs: tuple[str, ...]
    reason: str
    optional: bool = False
    only_names: str = ""

    @property
    def name(self) -> str:
        return f"{self.resource}.{self.group}" if self.group else self.resource

    @property
    def base_resource(self) -> str:
        """Name without the subresource."""
        return replace(self, resource=self.resource.partition("/")[0]).name


PERMISSION_RULES = (
    *(
        PermissionRule(kind.group, kind.plural, JOB_VERBS, f"to submit, follow and stop jobs of kind {kind.kind}")
        for kind in JOB_KINDS.values()
    ),
    *(
        PermissionRule(
            kind.group,
            f"{kind.plural}/{FINALIZERS}",
            ("update",),
            f"to delete a {kind.kind} after its owned objects, if the cluster requires this right (as OpenShift does)",
            optional=True,
        )
        for kind in JOB_KINDS.values()
    ),
    PermissionRule(
        "networking.k8s.io", "networkpolicies", OWNED_OBJECT_VERBS, "the policy that connects the ranks of a job"
    ),
    PermissionRule("trainer.kubeflow.org", "trainingruntimes", OWNED_OBJECT_VERBS, "the template of a TrainJob's pods"),
    PermissionRule("", "pods", ("get", "list", "watch"), "to report the state of a job and the exit of its stage"),
    PermissionRule("", "pods", ("patch",), "to record the time of their start for their metrics", optional=True),
    PermissionRule("", "pods/log", ("get",), "to show the log of rank 0"),
    PermissionRule("", "events", ("list",), "to report why pods cannot be created or started", optional=True),
    PermissionRule("kueue.x-k8s.io", "workloads", ("list",), "to report why a job waits in a queue", optional=True),
    *(
        PermissionRule(
            group, resource, ("get",), f"to find before the first stage that {what} is missing", optional=True
        )
        for group, resource, what in (
            ("", "persistentvolumeclaims", "a claim"),
            ("", "serviceaccounts", "the service account"),
            ("kueue.x-k8s.io", "localqueues", "the queue"),
        )
    ),
    PermissionRule(
        "", "configmaps", ("get",), "the defaults of the namespace", optional=True, only_names="podscale-defaults"
    ),
)
"""Permissions that the launcher needs in the namespace of the jobs. The pods need none."""

POD_SECURITY_LABEL = "pod-security.kubernetes.io/enforce"
DEFAULT_CLASS_ANNOTATION = "storageclass.kubernetes.io/is-default-class"


def check_cluster(config: RunConfig, *, pull: bool = True) -> Iterator[CheckResult]:
    """Check that the cluster which the document names can run it. Yields each result as soon as it is known.

    Args:
        pull: let a node pull the images, by a Job that is deleted afterwards.
    """
    try:
        api = connect_cluster(config.launch.cluster)
        version = api.version()
    except PodscaleError as error:
        yield CheckResult("API server", "missing", str(error), "nothing else can be checked")
        return
    yield CheckResult("API server", "ok", f"Kubernetes {version.get('gitVersion')}, {api.target.origin}")
    spec, backend = None, str(config.launch.backend)
    try:
        spec = build_job_spec(config, "train")
        backend = choose_job_kind(api, spec, config.launch.backend)
        preflight(config, "job")
    except InputError as error:
        yield CheckResult("document", "missing", str(error), "change the document")
    checks: list[Callable[[], Iterator[CheckResult]]] = [
        lambda: _check_namespace(api, spec),
        lambda: inventory.check_job_kinds(api, backend),
        lambda: inventory.check_controllers(api, backend),
        lambda: _check_permissions(api, backend),
        lambda: check_quotas(api, spec, backend),
        lambda: _check_storage(api, config),
        lambda: _check_required_objects(api, config, backend),
        lambda: inventory.check_pipelines(api),
        lambda: inventory.check_monitoring(api),
    ]
    if spec is not None:
        checks.insert(4, lambda: inventory.fitting_nodes(api, spec))  # after the permissions
        checks += [lambda: check_images(api, spec, config.launch.launcher_image)] if pull else []
        checks += [lambda: _check_policy(api, config), lambda: _check_admission(api, config)]
    for check in checks:
        try:
            yield from check()
        except PodscaleError as error:
            yield CheckResult("cluster", "missing", str(error), "check again when this is fixed")


def _check_namespace(api: ClusterClient, spec: JobSpec | None) -> Iterator[CheckResult]:
    subject = f"namespace {api.namespace}"
    try:
        namespace = api.get(NAMESPACES, api.namespace)
    except ApiNotFound:
        yield CheckResult(subject, "missing", "does not exist", f"kubectl create namespace {api.namespace}")
        return
    except ApiError:
        yield inventory.unreadable(subject, "ask the administrator for its Pod Security level")
        return
    level = labels_of(namespace).get(POD_SECURITY_LABEL, "privileged")
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
    """Yield one result for each rule that lacks a permission, or a single "ok"."""
    runtimes = "trainingruntimes.trainer.kubeflow.org"
    required = {JOB_KINDS[backend].full_name, JOB_KINDS["job"].full_name} if backend in JOB_KINDS else set()
    required |= {runtimes} if backend == "trainjob" else set()
    not_required = {runtimes, *(kind.full_name for kind in JOB_KINDS.values())} - required
    rules = [rule for rule in PERMISSION_RULES if rule.base_resource not in not_required]
    denied = [(rule, verbs) for rule in rules if (verbs := _denied_verbs(api, rule))]
    for rule, verbs in denied:
        yield CheckResult(
            f"permissions on {rule.name}",
            "note" if rule.optional else "missing",
            f"not allowed: {', '.join(verbs)} ({rule.reason})",
            f"bind the chart's launcher role in namespace {api.namespace} to these credentials",
        )
    if not denied:
        yield CheckResult("permissions", "ok", f"submit, follow and stop jobs in namespace {api.namespace}")


def _denied_verbs(api: ClusterClient, rule: PermissionRule) -> list[str]:
    return [verb for verb in rule.verbs if not api.can_i(verb, rule.group, rule.resource, name=rule.only_names)]


def _check_storage(api: ClusterClient, config: RunConfig) -> Iterator[CheckResult]:
    """Report the storage classes if the document names no claim for the workspace."""
    if config.launch.cluster.workspace_claim is not None:
        return
    try:
        classes, _ = api.list(STORAGE_CLASSES)
    except ApiError:
        return
    default = [name_of(item) for item in classes if annotations_of(item).get(DEFAULT_CLASS_ANNOTATION) == "true"]
    yield CheckResult(
        "workspace",
        "note",
        f"no launch.cluster.workspace_claim; storage classes: {', '.join(map(name_of, classes)) or 'none'}"
        + (f" (default {default[0]})" if default else ""),
        "create a ReadWriteMany claim (the chart can) and name it, unless the workspace is in an object store",
    )


def _check_required_objects(api: ClusterClient, config: RunConfig, backend: str) -> Iterator[CheckResult]:
    yield from (required.result for required in required_objects(api, config))
    if config.launch.cluster.queue is not None and api.served_versions(LOCAL_QUEUES.group):
        yield from inventory.check_managed_by_kueue(api, backend)


def _check_policy(api: ClusterClient, config: RunConfig) -> Iterator[CheckResult]:
    """Yield what the policy of the namespace says of the stages; nothing if it has none."""
    try:
        if check_stages(api, config, STAGES):
            yield CheckResult("policy", "ok", "allows this document")
    except InputError as error:
        yield CheckResult("policy", "missing", str(error), "change the document, or ask for an exception")


def _check_admission(api: ClusterClient, config: RunConfig) -> Iterator[CheckResult]:
    try:
        dry_run_job(api, build_manifests(api, config, "train"))
    except InputError as error:
        yield CheckResult("the job itself", "missing", str(error), "fix this, then `podscale submit`")
        return
    yield CheckResult("the job itself", "ok", "the API server would accept it (dry run)")
