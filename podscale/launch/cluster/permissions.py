"""What submitting, following and stopping jobs takes: the table behind the chart's Role, `podscale doctor` and docs."""

from dataclasses import dataclass, replace

from podscale.launch.backends import JOB_BACKENDS

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
        """The name of the resource that this is a part of, or its own."""
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
