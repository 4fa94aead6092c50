"""What a TPU chip can do at best, and how the TPU compiler calls and cuts it.

Sources, read in November 2026: Google Cloud's pages of each generation (docs.cloud.google.com/tpu/docs/v3, v4, v5e,
v5p, v6e, tpu7x): peak, memory, interconnect, network. What a page tells of the interconnect for both directions is
halved; v3's is its 340 TB/s of all-reduce in a pod over 1,024 chips. Recalled, not read again: links of v2 and v4, and
clocks (Jouppi 2020 and 2023). v2's peak and memory are those of jax 0.10.2 (pallas/mosaic/tpu_info.py), which agrees
with the others but for v5p's memory (2,460 GB/s there) and v3's peak (140 there). Names and devices of a chip: as
libtpu 0.0.42.1 describes them. What a program may use of the memory: as that version says, rounded, when it refuses a
program that is too large (tests/system/test_tpu_compiler.py asks it again). v5p's page has 95 GiB, less than that; its
96 are jax's 103 GB.
"""

import re
from dataclasses import dataclass

from podscale.errors import InputError
from podscale.hardware.tpus import TPU_KINDS, TpuKind, chip_count

TORUS_2D_TOPOLOGIES = ("2x2", "4x4", "4x8", "8x8", "8x16", "16x16", "16x32", "32x32")
_TOPOLOGY_NAME = re.compile(r"^(?:tpu-)?(?P<chip>v\d+[a-z]?|tpu7x)[:-](?P<sides>\d+(?:x\d+)*)$")


@dataclass(frozen=True)
class TpuChip:
    """One generation. name: as the compiler has it; hbm_gib: GiB; bf16_tflops: TFLOP/s; memory, links,
    network_bandwidth: GB/s.

    available_gib: GiB of a device (hbm is of a chip) that a program may use; the runtime keeps the rest.
    link_bandwidth: all of a chip's to its neighbours together, one way. network_bandwidth: between slices, a chip's
    share; 0 = not known. devices: what jax sees of a chip: 1, or one a core. config: which of the compiler's two views
    of a chip that is. clock_ghz: GHz; 0 = not published.
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
        """The same generation among the machines of a cluster; None for the old ones, which `TPUS` does not offer."""
        return next(
            (kind for kind in TPU_KINDS if kind.name.removeprefix("tpu-") == self.name.removeprefix("tpu-")), None
        )

    @property
    def topology_names(self) -> str:
        """Its topologies, in words."""
        return self.kind.topology_rule if self.kind else ", ".join(self._flat_topologies)

    @property
    def _flat_topologies(self) -> tuple[str, ...]:
        return (
            TORUS_2D_TOPOLOGIES[: TORUS_2D_TOPOLOGIES.index("16x16") + 1] if self.name == "v2" else TORUS_2D_TOPOLOGIES
        )

    def has_topology(self, sides: str) -> bool:
        """Whether a slice may have these sides."""
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
"""Oldest first. v4 and v5p join the two cores of a chip to one device, which v2, v3 and tpu7x do not."""


@dataclass(frozen=True)
class Topology:
    """Slices of chips of one kind, all of the same sides."""

    chip: TpuChip
    sides: str
    slices: int = 1

    def __str__(self) -> str:
        """As the compiler has it, and how many: `v5e:16x16`, `v5e:16x16 x2`."""
        return self.compiler_name + (f" x{self.slices}" if self.slices > 1 else "")

    @property
    def compiler_name(self) -> str:
        """The name of one slice for the compiler."""
        return f"{self.chip.name}:{self.sides}"

    @property
    def chip_count(self) -> int:
        """Of all slices."""
        return self.slices * chip_count(self.sides)

    @property
    def device_count(self) -> int:
        """As jax counts them: what a run document calls ranks."""
        return self.chip_count * self.chip.devices

    @property
    def device_hbm_bytes(self) -> float:
        """Bytes of memory of one device."""
        return self.chip.hbm_gib * 2**30 / self.chip.devices

    @property
    def device_available_bytes(self) -> float:
        """Bytes of it that a program may use."""
        return self.chip.available_gib * 2**30


def find_topology(name: str, slices: int = 1) -> Topology:
    """The topology of a name, as the compiler has it (`v5e:4x4`) or as `launch.hardware` does (`tpu-v5e-4x4`).

    Raises InputError, listing what there is, for one that does not exist.
    """
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
            hint=f"Write GENERATION:SIDES, such as v5e:4x4, out of {listed}",
        )
    if not chip.has_topology(match["sides"]):
        raise InputError(
            f"{chip.name} has no such slice", field="--topology", got=name, hint=f"It has {chip.topology_names}"
        )
    return Topology(chip, match["sides"], slices)
