"""TPUs as Google Cloud offers them: generations, slices, and the machines that a slice consists of.

Source, read in 2026: AI-Hypercomputer/xpk, src/xpk/core/system_characteristics.py at 367c838 (node labels, machine
types, chips of a machine, topologies). Slices of one and of four chips on v5e are recalled, not read.
"""

from dataclasses import dataclass
from math import prod

CUBE_SIDE = 4
"""Side of the block of chips that slices in three dimensions are built from, in chips."""
SMALL_3D_TOPOLOGIES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")
FLAT_TOPOLOGIES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")


@dataclass(frozen=True)
class TpuKind:
    """One generation. gke_label: value of the node label cloud.google.com/gke-tpu-accelerator.

    machine: type of the machines of 4 chips; single_chip_machine: that of the machine with one chip, where there is
    one. max_cubes: blocks of 4x4x4 chips that the largest slice has; 0 where slices are flat.
    """

    name: str
    gke_label: str
    machine: str
    single_chip_machine: str | None = None
    max_cubes: int = 0

    @property
    def smallest_topologies(self) -> tuple[str, ...]:
        """Its topologies, smallest first; of those built from cubes only the first."""
        if not self.max_cubes:
            return FLAT_TOPOLOGIES
        alone = ("1x1x1",) if self.single_chip_machine else ()
        return (*alone, *SMALL_3D_TOPOLOGIES, "4x4x4", "4x4x8", "4x8x8", "8x8x8")

    @property
    def topology_rule(self) -> str:
        """What its topologies are, in words."""
        listed = ", ".join(self.smallest_topologies)
        return (
            f"{listed}, ... (multiples of 4 up to {self.max_cubes * CUBE_SIDE**3} chips)" if self.max_cubes else listed
        )

    def has_topology(self, topology: str) -> bool:
        """Whether a slice may have this topology; sides in ascending order where it is built from cubes."""
        if topology in self.smallest_topologies:
            return True
        sides = [int(side) for side in topology.split("x") if side.isdigit()]
        built = len(sides) == 3 and all(side and side % CUBE_SIDE == 0 for side in sides) and sides == sorted(sides)
        return built and topology == "x".join(map(str, sides)) and prod(sides) <= self.max_cubes * CUBE_SIDE**3

    def chips_per_host(self, topology: str) -> int:
        """Chips of one machine of a slice."""
        return min(4, chip_count(topology))

    def host_count(self, topology: str) -> int:
        """Machines of a slice."""
        return chip_count(topology) // self.chips_per_host(topology)

    def machine_type(self, topology: str) -> str:
        """Machine type of a slice."""
        return self.single_chip_machine if self.single_chip_machine and chip_count(topology) == 1 else self.machine


def chip_count(topology: str) -> int:
    """Chips of a slice: the product of its sides."""
    return prod(int(side) for side in topology.split("x"))


TPU_KINDS = (
    TpuKind("tpu-v4", "tpu-v4-podslice", "ct4p-hightpu-4t", max_cubes=64),
    TpuKind("tpu-v5e", "tpu-v5-lite-podslice", "ct5lp-hightpu-4t", "ct5lp-hightpu-1t"),
    TpuKind("tpu-v5p", "tpu-v5p-slice", "ct5p-hightpu-4t", max_cubes=140),
    TpuKind("tpu-v6e", "tpu-v6e-slice", "ct6e-standard-4t", "ct6e-standard-1t"),
    TpuKind("tpu7x", "tpu7x", "tpu7x-standard-4t", "tpu7x-standard-1t", max_cubes=144),
)
"""Oldest first; tpu7x is Ironwood."""
