"""Namespace of the jobs: that it exists, its default settings for run documents, and its policy.

The chart installs defaults and policy as two keys of the ConfigMap podscale-defaults. The policy has the options of
runs that the platform team has locked, from the chart's value `policy`. `podscale submit` and the pipelines check it
before they create anything. The chart's ValidatingAdmissionPolicies check the same locks in the API server;
tests/chart/test_cluster_policy.py compares both on a real one.
"""

from collections.abc import Iterable, Iterator, Sequence

from podscale.config import Defaults, RunConfig
from podscale.config.document import loads_as
from podscale.config.fields import Section, placement_field
from podscale.errors import InputError, combine_errors
from podscale.kubernetes.client import ClusterClient
from podscale.kubernetes.errors import ApiError, ApiNotFound
from podscale.kubernetes.job_spec import JobSpec, SecurityMode, build_job_spec
from podscale.kubernetes.resources import CONFIG_MAPS, NAMESPACES
from podscale.runs.stage_outcomes import STAGES, StageName

DEFAULTS_CONFIG_MAP = "podscale-defaults"
DEFAULTS_KEY = "defaults.yaml"
POLICY_KEY = "policy.yaml"
SECONDS_PER_HOUR = 3600


def check_namespace_exists(api: ClusterClient) -> None:
    """Raise InputError if the namespace does not exist; credentials that may not read it are no error."""
    try:
        api.get(NAMESPACES, api.namespace)
    except ApiNotFound:
        raise InputError(
            "there is no such namespace",
            field="launch.cluster.namespace",
            got=api.namespace,
            hint=f"Name another one with --namespace, or create it: `kubectl create namespace {api.namespace}`",
        ) from None
    except ApiError:
        return


class NoDefaults(InputError):
    """The namespace has no default settings, or these credentials may not read them."""


def read_cluster_defaults(api: ClusterClient) -> Defaults:
    """Return the default settings of the namespace.

    Raises NoDefaults, or InputError for a namespace that does not exist.
    """
    field, place = f"ConfigMap {DEFAULTS_CONFIG_MAP}", f"namespace {api.namespace}"
    hint = "name another namespace with --namespace, or set run.workspace and launch.cluster.workspace_claim"
    try:
        config_map = api.get(CONFIG_MAPS, DEFAULTS_CONFIG_MAP)
    except ApiNotFound:
        check_namespace_exists(api)
        hint = f"Install the chart there (`helm install podscale charts/podscale --namespace {api.namespace}`), {hint}"
        raise NoDefaults(f"{place} has none, which would name the workspace", field=field, hint=hint) from None
    except ApiError as error:
        if error.status != 403:
            raise
        check_namespace_exists(api)
        hint = f"Ask for the chart's launcher role in {place}, {hint}"
        problem = (
            f"these credentials may not read it in {place} (RBAC: get configmaps), and it would name the workspace"
        )
        raise NoDefaults(problem, field=field, hint=hint) from None
    text = (config_map.get("data") or {}).get(DEFAULTS_KEY)
    if not text:
        hint = f"Install the chart there again, {hint}"
        raise NoDefaults(f"has no key {DEFAULTS_KEY} in {place}", field=field, hint=hint)
    return Defaults(text, f"{field} of {place}")


class ClusterPolicy(Section):
    """Locks of a namespace; the defaults lock nothing."""

    contact: str = placement_field("the administrators of the cluster", "Whom to ask for an exception.", min_length=1)
    images: tuple[str, ...] = placement_field(
        (), "Allowed images: registries with or without a path, or names without a tag."
    )
    queues: tuple[str, ...] = placement_field((), "Allowed LocalQueues for training and evaluation.")
    security: SecurityMode | None = placement_field(None, "Pod Security level that all pods must meet.")
    max_accelerators: int | None = placement_field(None, "Most accelerators of one job.", ge=1)
    accelerator_resources: tuple[str, ...] = placement_field((), "Resources that count as accelerators.")
    max_hours: float | None = placement_field(None, "Longest time limit of a job, hours.", gt=0)

    def allows_image(self, image: str) -> bool:
        """Return whether an allowed entry is the image, its name without tag and digest, or a path above it."""
        return not self.images or any(_covers(entry, image) for entry in self.images)


def _covers(entry: str, image: str) -> bool:
    rest = image.removeprefix(entry)
    if not image.startswith(entry):
        return False
    return rest == "" or rest[0] in "/@" or (rest[0] == ":" and "/" not in rest)  # else ":" begins a port


def find_cluster_policy(api: ClusterClient) -> ClusterPolicy | None:
    """Return the policy of the namespace; None if it has none or the ConfigMap may not be read.

    Raises InputError if this version of Podscale does not understand the policy.
    """
    try:
        config_map = api.get_or_none(CONFIG_MAPS, DEFAULTS_CONFIG_MAP)
    except ApiError as error:
        if error.status != 403:
            raise
        return None
    text = ((config_map or {}).get("data") or {}).get(POLICY_KEY)
    name = f"{POLICY_KEY} of ConfigMap {DEFAULTS_CONFIG_MAP} of namespace {api.namespace}"
    return loads_as(ClusterPolicy, text, name) if text else None


def check_stages(
    api: ClusterClient, config: RunConfig, stages: Iterable[StageName], shard_set: str | None = None
) -> bool:
    """Raise one InputError that lists what the policy of the namespace refuses in the jobs of these stages.

    Returns False if the namespace has no policy.
    """
    return check_specs(api, (build_job_spec(config, stage, shard_set) for stage in stages))


def check_specs(api: ClusterClient, specs: Iterable[JobSpec]) -> bool:
    """Raise one InputError that lists what the policy of the namespace refuses in these jobs.

    Returns False if the namespace has no policy; `specs` is then not read.
    """
    policy = find_cluster_policy(api)
    if policy is None:
        return False
    _raise_refusals([error for spec in specs for error in job_refusals(policy, spec)], api.namespace)
    return True


def check_pipeline(api: ClusterClient, config: RunConfig) -> None:
    """Raise one InputError that lists what the policy of the namespace refuses in the pipeline of a document."""
    policy = find_cluster_policy(api)
    if policy is not None:
        specs = [build_job_spec(config, stage, mounted=False) for stage in STAGES]
        errors = [error for spec in specs for error in job_refusals(policy, spec)]
        errors += _image_refusals(policy, "launch.launcher_image", config.launch.launcher_image)
        _raise_refusals(errors, api.namespace)


def job_refusals(policy: ClusterPolicy, spec: JobSpec) -> Iterator[InputError]:
    """Yield an error for each option of a job that the policy does not allow."""
    yield from _image_refusals(policy, "launch.image", spec.image)
    queue = spec.cluster.queue
    if policy.queues and spec.needs_accelerators and queue not in policy.queues:
        yield _refusal(policy, "launch.cluster.queue", queue, ", ".join(policy.queues))
    if policy.security == "restricted" and spec.security_mode != "restricted":
        yield _refusal(policy, "launch.cluster.security", spec.security_mode, policy.security)
    if policy.max_accelerators is not None and accelerators_of(policy, spec) > policy.max_accelerators:
        has_nodes = spec.hardware.hosts == 1 and spec.pods > 1
        nodes_option = "--parallel" if spec.parts else "launch.nodes"
        option, got = (nodes_option, spec.pods) if has_nodes else ("launch.hardware", spec.hardware.name)
        counted = f"{spec.pods} x {spec.resources.accelerators}"
        allowed = f"at most {policy.max_accelerators} accelerators in a job, and this one has {counted}"
        yield _refusal(policy, option, got, allowed)
    hours = spec.time_limit_seconds / SECONDS_PER_HOUR
    if policy.max_hours is not None and spec.time_limit_seconds > round(policy.max_hours * SECONDS_PER_HOUR):
        yield _refusal(policy, "launch.time_limit_hours", hours, f"at most {policy.max_hours:g} hours")


def accelerators_of(policy: ClusterPolicy, spec: JobSpec) -> int:
    """Return the number of the job's accelerators that the policy counts."""
    if spec.resources.resource not in policy.accelerator_resources:
        return 0
    return spec.pods * spec.resources.accelerators


def _image_refusals(policy: ClusterPolicy, option: str, image: str) -> list[InputError]:
    return [] if policy.allows_image(image) else [_refusal(policy, option, image, ", ".join(policy.images))]


def _refusal(policy: ClusterPolicy, option: str, got: object, allowed: str) -> InputError:
    problem = "the policy of this namespace does not allow it"
    return InputError(problem, field=option, got=got, hint=f"Allowed: {allowed}. Ask {policy.contact}.")


def _raise_refusals(errors: Sequence[InputError], namespace: str) -> None:
    if errors:
        raise combine_errors(errors, f"the policy of namespace {namespace} refuses this run")  # stages share options
