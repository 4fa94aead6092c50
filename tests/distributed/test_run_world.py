"""Processes of `run_world` do not depend on the tests that ran before in the same worker."""

import gc
import os
from typing import Any


class Finalized:
    """Part of a cycle; its finalizer reports in which process it ran."""

    def __init__(self, pipe: int) -> None:
        self.itself, self.pipe = self, pipe

    def __del__(self) -> None:
        os.write(self.pipe, f"{os.getpid()} ".encode())


def test_ranks_finalize_no_object_of_their_parent(run_world: Any) -> None:
    reader, writer = os.pipe()

    def body(world: Any) -> int:
        gc.collect()
        return os.getpid()

    gc.collect()
    gc.disable()
    try:
        Finalized(writer)
        ranks = run_world(2, body)
    finally:
        gc.enable()
    gc.collect()
    assert os.getpid() not in ranks
    assert os.read(reader, 100).split() == [str(os.getpid()).encode()]
    os.close(reader)
    os.close(writer)
