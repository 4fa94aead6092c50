"""Rank with torch: all-reduces over gloo until one of the ranks is gone or a stop is agreed."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from podscale.errors import PeerLost, Preempted
from podscale.pytorch import world


def main() -> None:
    stopped = [0]
    signal.signal(signal.SIGTERM, lambda *_: stopped.__setitem__(0, 1))
    world.join_world(60.0)
    for step in range(100_000):
        word = torch.tensor([stopped[0], step], dtype=torch.int32)
        try:
            dist.all_reduce(word, op=dist.ReduceOp.MAX)
        except RuntimeError as error:
            raise PeerLost(f"a peer of rank {dist.get_rank()} is gone: {error}") from error
        if step == 3:
            Path(os.environ["PLAIN_DIRECTORY"], f"ready-{dist.get_rank()}").write_text(str(os.getpid()))
        if word[0]:
            dist.barrier()
            dist.destroy_process_group()
            raise Preempted(f"saved step {int(word[1])} and stopped on request")
        time.sleep(0.01)
    sys.exit(1)


if __name__ == "__main__":
    main()
