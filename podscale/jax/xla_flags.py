"""Flags of XLA's compilers that overlap messages with arithmetic, in one table; a flag of the user's takes precedence.

XLA reads its flags once, when it is loaded. A worker therefore sets them before it imports JAX. A compiler that does
not know a flag ends the process, so the table has flags of the pinned versions only: tests give all of them to the
installed compilers (docs/explanation/tpu.md, "Flags of the compiler").
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

Platform = Literal["tpu", "cuda"]
VARIABLES: dict[str, str] = {"tpu": "LIBTPU_INIT_ARGS", "cuda": "XLA_FLAGS"}
"""Environment variable from which the compiler of a platform reads its flags."""
JAX_GPU_TIPS = "JAX documentation, GPU performance tips"
MAXTEXT = "AI-Hypercomputer/maxtext benchmarks/xla_flags_library.py, 05d3525"
AXLEARN = "apple/axlearn, axlearn/common/compiler_options.py"


SMALL_VMEM = frozenset({"v2", "v3", "v4"})
"""TPU generations with 16 MiB of vector memory: a message that is fused with a convolution exceeds it there."""


class XlaFlag(NamedTuple):
    """One flag of a compiler, its value, what it is for, and who recommends it.

    Args:
        excluded: TPU generations for which the compiler cannot compile with it.
    """

    platform: Platform
    name: str
    value: str
    purpose: str
    source: str
    excluded: frozenset[str] = frozenset()

    @property
    def argument(self) -> str:
        return f"--{self.name}={self.value}"


XLA_FLAGS = (
    XlaFlag(
        "tpu",
        "xla_tpu_enable_latency_hiding_scheduler",
        "true",
        "Schedule arithmetic between the start and the end of a message.",
        AXLEARN,
    ),
    XlaFlag(
        "tpu",
        "xla_tpu_enable_async_collective_fusion",
        "true",
        "Run a message in steps inside of the operations that hide it.",
        MAXTEXT,
        SMALL_VMEM,
    ),
    XlaFlag(
        "tpu",
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
        "true",
        "The same for all-gathers: the weights of a sharded update.",
        MAXTEXT,
        SMALL_VMEM,
    ),
    XlaFlag(
        "tpu",
        "xla_tpu_enable_async_collective_fusion_multiple_steps",
        "true",
        "Hide one message behind several operations.",
        MAXTEXT,
        SMALL_VMEM,
    ),
    XlaFlag(
        "tpu",
        "xla_tpu_overlap_compute_collective_tc",
        "true",
        "Let arithmetic and messages use a core at the same time.",
        MAXTEXT,
        SMALL_VMEM,
    ),
    XlaFlag("tpu", "xla_enable_async_all_gather", "true", "Split an all-gather into start and end.", MAXTEXT),
    XlaFlag(
        "tpu",
        "xla_tpu_enable_async_collective_fusion_fuse_all_reduce",
        "true",
        "Fuse all-reduces like all-gathers: the gradients of a replicated update.",
        MAXTEXT,
        SMALL_VMEM,
    ),
    XlaFlag("tpu", "xla_enable_async_all_reduce", "true", "Split an all-reduce into start and end.", MAXTEXT),
    XlaFlag(
        "tpu",
        "xla_jf_crs_combiner_threshold_in_bytes",
        str(25 * 2**20),
        "Keep the buckets of the gradients apart (25 MiB, the default of train.all_reduce.bucket_mb), so that all but "
        "the last can start before backward ends; the compiler would merge them.",
        "ours; seen in the compiled program",
    ),
    XlaFlag(
        "cuda",
        "xla_gpu_enable_latency_hiding_scheduler",
        "true",
        "Schedule kernels between the start and the end of a message.",
        JAX_GPU_TIPS,
    ),
    XlaFlag(
        "cuda",
        "xla_gpu_enable_highest_priority_async_stream",
        "true",
        "Run messages on a stream of the highest priority.",
        "NVIDIA/JAX-Toolbox rosetta/docs/GPU_performance.md",
    ),
)


def xla_environment(platform: str, environment: Mapping[str, str], generation: str | None = None) -> dict[str, str]:
    """Return the variable of a platform with the flags of `environment` and those that it lacks.

    Args:
        platform: such as `tpu`.
        generation: of the TPU chips, such as `v5e`; None if unknown.
    """
    if platform not in VARIABLES:
        return {}
    given = environment.get(VARIABLES[platform], "").split()
    names = {argument.lstrip("-").partition("=")[0] for argument in given}
    flags = [
        flag.argument
        for flag in XLA_FLAGS
        if flag.platform == platform and flag.name not in names and generation not in flag.excluded
    ]
    return {VARIABLES[platform]: " ".join([*given, *flags])}
