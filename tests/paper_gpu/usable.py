"""The engine's checks of GPUs with the real torch.cuda, on a machine that the stub describes."""

import warnings
from typing import Any
from unittest import mock

from podscale.config import TrainSection
from podscale.errors import InputError
from podscale.pytorch.gpu_checks import check_gpu, choose_device, compare_identities, gpu_identity
from podscale.util import host_info


def check_machine(case: dict[str, Any]) -> dict[str, Any]:
    """Return the devices of the ranks on a node, the ranks of each kind if there are several, or the refused field.

    Args:
        case: `precision`; `ranks` on the node; `nodes`, the number of the driver's device files.
    """
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    try:
        with mock.patch.object(host_info, "visible_gpus", return_value=case["nodes"]):
            environments = [{"LOCAL_RANK": str(rank)} for rank in range(case["ranks"])]
            for environ in environments:
                check_gpu(TrainSection(precision=case["precision"]), environ)
        devices = [choose_device(environ) for environ in environments]
        found["devices"] = [str(device) for device in devices]
        if devices[0].type == "cuda":
            kinds = compare_identities([gpu_identity(device) for device in devices], may_share=False)
            found.update({"kinds": kinds} if len(kinds) > 1 else {})
    except InputError as error:
        found["refused"] = error.field
    return found
