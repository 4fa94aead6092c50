"""Default settings of a namespace for run documents: the ConfigMap that the chart installs."""

from podscale.config import Defaults
from podscale.errors import InputError
from podscale.kubernetes.client import ClusterClient
from podscale.kubernetes.errors import ApiError, ApiNotFound
from podscale.kubernetes.required_objects import check_namespace_exists
from podscale.kubernetes.resources import CONFIG_MAPS

DEFAULTS_CONFIG_MAP = "podscale-defaults"
DEFAULTS_KEY = "defaults.yaml"


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
