"""The settings of a cluster that stand below every run document there, left by the chart in a ConfigMap."""

from podscale.config import Defaults
from podscale.launch.cluster.api import ClusterClient
from podscale.launch.cluster.errors import ApiError
from podscale.launch.cluster.resources import CONFIG_MAPS

DEFAULTS_CONFIG_MAP = "podscale-defaults"
DEFAULTS_KEY = "defaults.yaml"


def find_cluster_defaults(api: ClusterClient) -> Defaults | None:
    """The defaults of the namespace; None where there are none, or these credentials may not see them."""
    try:
        found = api.get_or_none(CONFIG_MAPS, DEFAULTS_CONFIG_MAP)
    except ApiError as error:
        if error.status != 403:
            raise
        return None
    text = (found.get("data") or {}).get(DEFAULTS_KEY) if found else None
    return Defaults(text, f"ConfigMap {DEFAULTS_CONFIG_MAP} of namespace {api.namespace}") if text else None
