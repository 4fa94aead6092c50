"""Check of a pipeline's run document by the policy of the namespace, in the first task of the pipeline."""

from podscale.config import RunConfig
from podscale.errors import InputError, PodscaleError
from podscale.kubernetes.client import connect_cluster
from podscale.kubernetes.cluster_policy import check_pipeline
from podscale.kubernetes.errors import ApiError, ApiUnreachable


def check_namespace_policy(config: RunConfig) -> None:
    """Raise InputError if the policy of this pod's namespace refuses the pipeline of a document.

    The parameter `image` of a run can name another image than the package that was checked when it was compiled. If
    the API server does not answer this pod, or refuses it, the check is left to the launchers and to admission.
    """
    try:
        api = connect_cluster(config.launch.cluster)
    except InputError as error:  # no token of a service account
        _print_unchecked(error)
        return
    try:
        check_pipeline(api, config)
    except (ApiError, ApiUnreachable) as error:
        _print_unchecked(error)


def _print_unchecked(error: PodscaleError) -> None:
    print(f"the policy of the namespace was not checked: {error}", flush=True)
