"""Flags of XLA's compilers that overlap messages with arithmetic, in one table; a flag of the user's takes precedence.

XLA reads its flags once, when it is loaded. A worker therefore sets them before it imports JAX. A compiler that does
not know a flag ends the process, so the table has flags of the pinned versions only: tests give all of them to the
installed compilers (docs/explanation/tpu.md, "Flags of the compiler"). A second table has the flags for GPUs that are
left at XLA's defaults, with the reason (docs/explanation/jax.md, "On GPUs").
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
        "ours; benchmarks/results/tpu-flags.md",
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
        "Run messages on a stream of the highest priority; also the default of the XLA in jaxlib 0.10.2.",
        "NVIDIA/JAX-Toolbox rosetta/docs/GPU_performance.md",
    ),
)


class DefaultXlaFlag(NamedTuple):
    """Flags of XLA for GPUs that stay at XLA's default.

    Args:
        default: of each of these flags.
        purpose: what the flags do.
        reason: why they are not set.
    """

    names: tuple[str, ...]
    default: str
    purpose: str
    reason: str


DEFAULT_GPU_FLAGS = (
    DefaultXlaFlag(
        ("xla_gpu_enable_pipelined_all_reduce", "xla_gpu_enable_pipelined_all_gather"),
        "false",
        "move a collective of a loop into the next round of the loop",
        "the only loop is over steps. The next step needs the weights, which need these gradients first",
    ),
    DefaultXlaFlag(
        ("xla_gpu_enable_pipelined_reduce_scatter",),
        "true",
        "the same for reduce-scatters",
        "it is XLA's default, and changes nothing for the same reason",
    ),
    DefaultXlaFlag(
        (
            "xla_gpu_all_reduce_combine_threshold_bytes",
            "xla_gpu_all_gather_combine_threshold_bytes",
            "xla_gpu_reduce_scatter_combine_threshold_bytes",
        ),
        "31457287",
        "merge collectives up to this sum, bytes",
        "the step has buckets of its own, and the compiled program showed no effect (see above)",
    ),
    DefaultXlaFlag(
        ("xla_gpu_enable_command_buffer",),
        "CONDITIONAL,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,FUSION",
        "kinds of operations that run as CUDA graphs",
        "kernels, cuBLAS and cuDNN are recorded by default. `COLLECTIVES` and `WHILE` are not: adding them needs a "
        "measurement on several GPUs",
    ),
    DefaultXlaFlag(
        ("xla_gpu_enable_while_loop_double_buffering",),
        "false",
        "write a loop's body twice",
        "a step of ResNet-50 compiles in tens of seconds, and there is nothing to overlap between steps",
    ),
    DefaultXlaFlag(
        ("xla_gpu_enable_while_loop_unrolling",),
        "WHILE_LOOP_UNROLLING_AUTO_UNROLL",
        "write a loop's body several times",
        "XLA unrolls loops of a known length only; that of `train.steps_per_call` is known at run time (see below)",
    ),
)
"""Flags that were considered, with the defaults of XLA in jaxlib 0.10.2, read from the library."""


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
