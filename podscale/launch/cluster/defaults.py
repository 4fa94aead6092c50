"""The settings of a cluster that stand below every run document there, left by the chart in a ConfigMap."""

from podscale.config import Defaults
from podscale.launch.cluster.api import ClusterClient
from podscale.launch.cluster.errors import ApiError
from podscale.launch.cluster.resources import CONFIG_MAPS

NAME = "podscale-defaults"
KEY = "defaults.yaml"


def find_defaults(api: ClusterClient) -> Defaults | None:
    """The defaults of the namespace; None where there are none, or these credentials may not see them."""
    try:
        found = api.get_or_none(CONFIG_MAPS, NAME)
    except ApiError as error:
        if error.status != 403:
            raise
        return None
    text = (found.get("data") or {}).get(KEY) if found else None
    return Defaults(text, f"ConfigMap {NAME} of namespace {api.namespace}") if text else None
