"""Paths of messages between two GPUs of this machine, as NCCL chooses them and writes them to its log.

    python -m podscale.pytorch.nccl_paths [network]

is one of two ranks that sum a bucket, with NCCL's log on the standard output. With `network` NCCL may not use NVLink,
PCIe or shared memory between the GPUs: it takes the path to other machines, over a network card of this one.
"""

import os
import re
import sys
from typing import NamedTuple

from podscale.util.processes import exit_with_parent

TIMEOUT_SECONDS = 60.0
"""Timeout of forming the group, and of the sum."""
ELEMENTS = 2**20
"""Elements of the bucket, fp32."""
LOG = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,GRAPH,NET,P2P"}
NETWORK_ONLY = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}

_CHANNEL = re.compile(r"NCCL INFO Channel .* -> .* via (\S+)")
_RING = re.compile(r"NCCL INFO Pattern 4, .* type (\w+)/\w+")


class NcclPaths(NamedTuple):
    """Paths that NCCL's log names.

    Args:
        transports: such as P2P/CUMEM, SHM/direct/direct, NET/IB/0/GDRDMA, NET/Socket/0; sorted.
        link: worst link of a ring between the GPUs: NVL for NVLink, else PIX, PXB, PHB or SYS (PCIe); "" if unknown.
    """

    transports: tuple[str, ...]
    link: str

    @property
    def kinds(self) -> set[str]:
        """First parts of the transports: P2P, SHM, NET."""
        return {transport.partition("/")[0] for transport in self.transports}


def parse_paths(log: str) -> NcclPaths:
    """Return the paths in a log of NCCL_DEBUG=INFO."""
    rings = _RING.findall(log)
    return NcclPaths(tuple(sorted(set(_CHANNEL.findall(log)))), rings[0] if rings else "")


def main(arguments: list[str]) -> None:
    exit_with_parent()
    os.environ.pop("NCCL_DEBUG_FILE", None)
    os.environ.update(LOG, **(NETWORK_ONLY if arguments == ["network"] else {}))
    import torch
    from torch import distributed as dist

    from podscale.pytorch.world import join_world, leave_world

    world = join_world(TIMEOUT_SECONDS)
    bucket = torch.ones(ELEMENTS, device=world.device)
    dist.all_reduce(bucket)
    if bucket.ne(world.size).any():
        raise RuntimeError(f"the sum of {world.size} ranks is wrong: {bucket[bucket.ne(world.size)][:3].tolist()}")
    leave_world()


if __name__ == "__main__":
    main(sys.argv[1:])
