"""What a rank finds in its environment: its place among the others, from `launch.spawner`.

How the pods of a JAXJob, a TrainJob, a JobSet or a TPU slice meet is read before, in each pod: see `launch.rendezvous`.
Nothing is left for JAX's own detection to guess, which knows some of these launchers and fails in others.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from podscale.errors import InputError
from podscale.launch.rendezvous import SLICE, number
from podscale.launch.spawner import SLICES, STORE

NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class Seat:
    """Process `rank` of `size`, `local_rank` of `local_size` in its pod, in slice `slice_` of `slices`.

    address, port: of the store by which they meet; empty and 0 for a process alone.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    address: str = ""
    port: int = 0
    slice_: int = 0
    slices: int = 1


def read_seat(environment: Mapping[str, str] = os.environ) -> Seat:
    """The place that the spawner gave to this process; alone where there is none.

    Raises InputError for variables that are half set or make no sense together.
    """
    if environment.get("WORLD_SIZE", "1") == "1" and STORE not in environment:
        return Seat()
    missing = [name for name in (*NUMBERS, STORE) if not environment.get(name)]
    if (SLICE in environment) != (SLICES in environment) and SLICES in environment:
        missing.append(SLICE)
    if missing:
        raise InputError(
            f"incomplete rank environment: {', '.join(missing)} {'are' if len(missing) > 1 else 'is'} missing",
            field=missing[0],
            hint="`podscale train` starts ranks with all of it.",
        )
    rank, size, local_rank, local_size = (number(name, environment[name]) for name in NUMBERS)
    address, _, port = environment[STORE].rpartition(":")
    slice_, slices = 0, 1
    if SLICES in environment:
        slice_, slices = number(SLICE, environment[SLICE]), number(SLICES, environment[SLICES])
    seat = Seat(rank, size, local_rank, local_size, address, number(STORE, port), slice_, slices)
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size and 0 <= slice_ < slices):
        raise InputError(f"the numbers of this rank contradict each other: {seat}", field="RANK", got=rank)
    return seat
