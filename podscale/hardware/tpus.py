"""TPUs on Google Cloud: generations, slices and their machines, and the chips as the TPU compiler names them.

Sources of machines, read in 2026: AI-Hypercomputer/xpk, src/xpk/core/system_characteristics.py at 367c838 (node labels,
machine types, chips of a machine, topologies). Slices of one and of four chips on v5e are recalled, not read.

Sources of chips, read in November 2026: Google Cloud's pages of each generation (docs.cloud.google.com/tpu/docs/v3, v4,
v5e, v5p, v6e, tpu7x): peak, memory, interconnect, network. A page's interconnect figure for both directions is halved;
v3's is its 340 TB/s of all-reduce in a pod over 1,024 chips. Recalled, not read again: links of v2 and v4, and clocks
(Jouppi 2020 and 2023). v2's peak and memory are those of jax 0.10.2 (pallas/mosaic/tpu_info.py), which agrees with the
others except for v5p's memory (2,460 GB/s there) and v3's peak (140 there). Names and devices of a chip, and the memory
that a program may use, rounded: as libtpu 0.0.42.1 reports them (tests/system/train/test_tpu_compiler.py checks them).
v5p's page has 95 GiB, less than that; its 96 are jax's 103 GB.
"""

import re
from dataclasses import dataclass
from math import prod

from podscale.errors import InputError

CUBE_SIDE = 4
"""Side of the blocks of which slices in three dimensions are built, chips."""
SMALL_3D_TOPOLOGIES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")
FLAT_TOPOLOGIES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")


@dataclass(frozen=True)
class TpuKind:
    """One generation of machines.

    Args:
        gke_label: value of the node label cloud.google.com/gke-tpu-accelerator.
        machine: type of the machine with 4 chips.
        single_chip_machine: type of the machine with one chip, if there is one.
        max_cubes: blocks of 4x4x4 chips in the largest slice; 0 if slices are flat.
    """

    name: str
    gke_label: str
    machine: str
    single_chip_machine: str | None = None
    max_cubes: int = 0

    @property
    def smallest_topologies(self) -> tuple[str, ...]:
        """Topologies, smallest first; of those built from cubes only the first."""
        if not self.max_cubes:
            return FLAT_TOPOLOGIES
        single = ("1x1x1",) if self.single_chip_machine else ()
        return (*single, *SMALL_3D_TOPOLOGIES, "4x4x4", "4x4x8", "4x8x8", "8x8x8")

    @property
    def topology_rule(self) -> str:
        names = ", ".join(self.smallest_topologies)
        rule = f", ... (multiples of 4 up to {self.max_cubes * CUBE_SIDE**3} chips)"
        return names + (rule if self.max_cubes else "")

    def has_topology(self, topology: str) -> bool:
        """Return True if a slice may have this topology; sides are in ascending order if it is built from cubes."""
        if topology in self.smallest_topologies:
            return True
        sides = [int(side) for side in topology.split("x") if side.isdigit()]
        has_cubes = len(sides) == 3 and all(side and side % CUBE_SIDE == 0 for side in sides) and sides == sorted(sides)
        return has_cubes and topology == "x".join(map(str, sides)) and prod(sides) <= self.max_cubes * CUBE_SIDE**3

    def chips_per_host(self, topology: str) -> int:
        return min(4, chip_count(topology))

    def host_count(self, topology: str) -> int:
        return chip_count(topology) // self.chips_per_host(topology)

    def machine_type(self, topology: str) -> str:
        return self.single_chip_machine if self.single_chip_machine and chip_count(topology) == 1 else self.machine


def chip_count(topology: str) -> int:
    return prod(int(side) for side in topology.split("x"))


TPU_KINDS = (
    TpuKind("tpu-v4", "tpu-v4-podslice", "ct4p-hightpu-4t", max_cubes=64),
    TpuKind("tpu-v5e", "tpu-v5-lite-podslice", "ct5lp-hightpu-4t", "ct5lp-hightpu-1t"),
    TpuKind("tpu-v5p", "tpu-v5p-slice", "ct5p-hightpu-4t", max_cubes=140),
    TpuKind("tpu-v6e", "tpu-v6e-slice", "ct6e-standard-4t", "ct6e-standard-1t"),
    TpuKind("tpu7x", "tpu7x", "tpu7x-standard-4t", "tpu7x-standard-1t", max_cubes=144),
)
"""Oldest first; tpu7x is Ironwood."""


TORUS_2D_TOPOLOGIES = ("2x2", "4x4", "4x8", "8x8", "8x16", "16x16", "16x32", "32x32")
_TOPOLOGY_NAME = re.compile(r"^(?:tpu-)?(?P<chip>v\d+[a-z]?|tpu7x)[:-](?P<sides>\d+(?:x\d+)*)$")


@dataclass(frozen=True)
class TpuChip:
    """One generation of chips. Bandwidths are GB/s of a chip.

    Args:
        name: the compiler's name.
        available_gib: memory of a device that a program may use; the runtime keeps the rest.
        link_bandwidth: all links to neighbours together, one way.
        network_bandwidth: a chip's part of the network between slices; 0 if not known.
        devices: jax devices of a chip: 1, or one for each core.
        config: the compiler's view of a chip, if it has two.
        clock_ghz: 0 if not published.
    """

    name: str
    bf16_tflops: float
    hbm_gib: float
    available_gib: float
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float = 0.0
    devices: int = 1
    config: str | None = None
    clock_ghz: float = 0.0

    @property
    def kind(self) -> TpuKind | None:
        """Machines with this chip; None for old generations."""
        return next((kind for kind in TPU_KINDS if kind.name.removeprefix("tpu-") == self.name), None)

    @property
    def topology_names(self) -> str:
        return self.kind.topology_rule if self.kind else ", ".join(self._flat_topologies)

    @property
    def _flat_topologies(self) -> tuple[str, ...]:
        end = TORUS_2D_TOPOLOGIES.index("16x16" if self.name == "v2" else "32x32")
        return TORUS_2D_TOPOLOGIES[: end + 1]

    def has_topology(self, sides: str) -> bool:
        return self.kind.has_topology(sides) if self.kind else sides in self._flat_topologies


TPU_CHIPS = (
    TpuChip("v2", 46.0, 16, 7.48, 716.0, 248.0, devices=2, clock_ghz=0.7),
    TpuChip("v3", 123.0, 32, 15.48, 900.0, 332.0, devices=2, clock_ghz=0.94),
    TpuChip("v4", 275.0, 32, 30.75, 1200.0, 300.0, config="megacore", clock_ghz=1.05),
    TpuChip("v5e", 197.0, 16, 15.75, 819.0, 200.0, network_bandwidth=3.125),
    TpuChip("v5p", 459.0, 96, 95.74, 2765.0, 600.0, network_bandwidth=6.25),
    TpuChip("v6e", 918.0, 32, 31.25, 1638.0, 400.0, network_bandwidth=12.5),
    TpuChip("tpu7x", 2307.0, 192, 94.75, 7380.0, 600.0, network_bandwidth=12.5, devices=2),
)
"""Oldest first. On v4 and v5p the two cores of a chip are one device; on v2, v3 and tpu7x they are two."""


@dataclass(frozen=True)
class Topology:
    """One or more slices of the same chips and sides."""

    chip: TpuChip
    sides: str
    slices: int = 1

    def __str__(self) -> str:
        """Return the compiler's name and the number of slices: `v5e:16x16`, `v5e:16x16 x2`."""
        return self.compiler_name + (f" x{self.slices}" if self.slices > 1 else "")

    @property
    def compiler_name(self) -> str:
        return f"{self.chip.name}:{self.sides}"

    @property
    def chip_count(self) -> int:
        """Chips of all slices."""
        return self.slices * chip_count(self.sides)

    @property
    def device_count(self) -> int:
        """jax devices of all slices: the ranks of a run document."""
        return self.chip_count * self.chip.devices

    @property
    def device_hbm_bytes(self) -> float:
        return self.chip.hbm_gib * 2**30 / self.chip.devices

    @property
    def device_available_bytes(self) -> float:
        """Bytes of one device's memory that a program may use."""
        return self.chip.available_gib * 2**30


def find_topology(name: str, slices: int = 1) -> Topology:
    """Return the topology named `v5e:4x4` (compiler) or `tpu-v5e-4x4` (`launch.hardware`), or raise InputError."""
    if slices < 1:
        raise InputError("a job has at least one slice", field="--slices", got=slices)
    match = _TOPOLOGY_NAME.match(name.strip().lower())
    chip = next((chip for chip in TPU_CHIPS if match and chip.name == match["chip"]), None)
    if match is None or chip is None:
        listed = "; ".join(f"{chip.name}: {chip.topology_names}" for chip in TPU_CHIPS)
        raise InputError(
            "no such TPU",
            field="--topology",
            got=name,
            hint=f"Write GENERATION:SIDES, such as v5e:4x4. Known: {listed}",
        )
    if not chip.has_topology(match["sides"]):
        raise InputError(
            f"{chip.name} has no such slice", field="--topology", got=name, hint=f"It has {chip.topology_names}"
        )
    return Topology(chip, match["sides"], slices)
