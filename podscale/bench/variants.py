"""Variants of a throughput sweep: the named sweeps, and grids of options given on the command line."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import yaml

from podscale.errors import InputError


@dataclass(frozen=True)
class BenchVariant:
    """Variant of a sweep.

    Args:
        changes: Options that differ from the base document, by dotted name.
        batch: Images per rank; default: the document's.
        real_images: Read the sweep's shard set instead of synthetic images.
    """

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    batch: int | None = None
    real_images: bool = False


GRAPH = {"train.cuda_graph": True}
COMPILED = {**GRAPH, "train.compile": "default"}
AUTOTUNED = {**GRAPH, "train.compile": "max-autotune-no-cudagraphs"}
FUSED = {**GRAPH, "train.fused_kernels": "norm"}
GEMM = {**GRAPH, "train.fused_kernels": "gemm"}
AUTO = {**GRAPH, "train.fused_kernels": "auto"}
JAX = {"train.engine": "jax"}
FOLDED = {"train.stem_compute": "space_to_depth"}
BF16, PURE, FP16, FP32 = ({"train.precision": name} for name in ("bf16", "bf16-pure", "fp16", "fp32"))

GPU_VARIANTS = (
    # Separate operations, the compiler, and a graph, at two batches.
    BenchVariant("bf16", BF16, 256),
    BenchVariant("bf16, compile", {**BF16, "train.compile": "default"}, 256),
    BenchVariant("bf16, compile, graph", {**BF16, **COMPILED}, 256),
    BenchVariant("bf16, 400", BF16, 400),
    BenchVariant("bf16, compile, 400", {**BF16, "train.compile": "default"}, 400),
    BenchVariant("bf16, compile, graph, 400", {**BF16, **COMPILED}, 400),
    # Each kernel of this project alone, then all together.
    BenchVariant("bf16, graph", {**BF16, **GRAPH}, 256),
    BenchVariant("bf16, fused, graph", {**BF16, **FUSED}, 256),
    BenchVariant("bf16, gemm, graph", {**BF16, **GEMM}, 256),
    BenchVariant("bf16, graph, folded stem", {**BF16, **GRAPH, **FOLDED}, 256),
    BenchVariant("bf16, gemm, graph, 400, folded stem", {**BF16, **GEMM, **FOLDED}, 400),
    BenchVariant("bf16, fused, graph, 400, folded stem", {**BF16, **FUSED, **FOLDED}, 400),
    BenchVariant("bf16, auto, graph, 400, folded stem", {**BF16, **AUTO, **FOLDED}, 400),
    BenchVariant("bf16, compile, graph, 400, folded stem", {**BF16, **COMPILED, **FOLDED}, 400),
    # Loaders.
    BenchVariant("bf16, fused, graph, 400, folded stem, real images", {**BF16, **FUSED, **FOLDED}, 400, True),
    BenchVariant("bf16, compile, graph, 400, folded stem, real images", {**BF16, **COMPILED, **FOLDED}, 400, True),
    BenchVariant(
        "bf16, fused, graph, 400, folded stem, decoded on the CPU",
        {**BF16, **FUSED, **FOLDED, "input.loader": "native"},
        400,
        real_images=True,
    ),
    BenchVariant("JAX, bf16", {**JAX, **BF16}, 256),
    BenchVariant("JAX, bf16, 400", {**JAX, **BF16}, 400),
    # Other precisions, batches and stems.
    BenchVariant("bf16-pure, fused, graph, 400, folded stem", {**PURE, **FUSED, **FOLDED}, 400),
    BenchVariant("bf16, compile, graph, folded stem", {**BF16, **COMPILED, **FOLDED}, 256),
    BenchVariant("fp32", FP32, 256),
    BenchVariant("bf16, fused, graph, 400", {**BF16, **FUSED}, 400),
    BenchVariant("bf16, fused, graph, 512, folded stem", {**BF16, **FUSED, **FOLDED}, 512),
    BenchVariant("bf16, gemm, graph, 512, folded stem", {**BF16, **GEMM, **FOLDED}, 512),
    BenchVariant("bf16, fused, graph, 128, folded stem", {**BF16, **FUSED, **FOLDED}, 128),
    BenchVariant("bf16, compile, graph, 400, padded stem", {**BF16, **COMPILED, "train.stem_compute": "padded4"}, 400),
    BenchVariant("fp16, fused, graph, 400, folded stem", {**FP16, **FUSED, **FOLDED}, 400),
    BenchVariant("bf16-pure, compile, graph, 400", {**PURE, **COMPILED}, 400),
    BenchVariant("bf16, compile, graph, 128", {**BF16, **COMPILED}, 128),
    BenchVariant("bf16, NCHW", {**BF16, "train.channels_last": False}, 256),
    BenchVariant("fp32, compile, graph", {**FP32, **COMPILED}, 256),
    BenchVariant("bf16, reduce-overhead", {**BF16, "train.compile": "reduce-overhead"}, 256),
    # It takes minutes to compile, unless an earlier session with the same OUT has filled the compiler's cache.
    BenchVariant("bf16, autotune, graph, 400", {**BF16, **AUTOTUNED}, 400),
)
"""ResNet-50 on one GPU; the most informative variants come first, in case the sweep is interrupted.

NCCL has no row, because one rank sends nothing: `tests/gpu` run its all-reduces, with several ranks on the GPU. The
kernels of momentum and of crops have no row without them, because no option turns them off: a profile has the time of
momentum, and `podscale bench input` the rate of the loader with its crops.
"""

CPU_VARIANTS = (
    BenchVariant("fp32", FP32, 8),
    BenchVariant("bf16", BF16, 8),
    BenchVariant("fp32, compile", {**FP32, "train.compile": "default"}, 8),
    BenchVariant("fp32, NCHW", {**FP32, "train.channels_last": False}, 8),
)
"""Smoke test of the sweep on a CPU."""

SWEEPS: Mapping[str, Sequence[BenchVariant]] = {"gpu": GPU_VARIANTS, "cpu": CPU_VARIANTS}


def named_sweep(name: str, *, real_images: bool) -> list[BenchVariant]:
    """Return the variants of a sweep, those of real images only if `real_images`. Raises InputError if unknown."""
    if name not in SWEEPS:
        hint = f"Known: {', '.join(SWEEPS)}. Define others with --vary a.b=x,y"
        raise InputError("unknown sweep", field="--sweep", got=name, hint=hint)
    return [variant for variant in SWEEPS[name] if real_images or not variant.real_images]


def variant_grid(settings: Sequence[str], *, real_images: bool) -> list[BenchVariant]:
    """Return every combination of `a.b=x,y` settings (`batch` is images per rank); by default the base document."""
    options = []
    for setting in settings:
        name, _, values = setting.partition("=")
        if not values:
            problem = "not an option and its values, such as train.compile=off,default"
            raise InputError(problem, field="--vary", got=setting)
        options.append([(name, value) for value in values.split(",")])
    return [_variant(combination, real_images) for combination in product(*options)]


def _variant(settings: Sequence[tuple[str, str]], real_images: bool) -> BenchVariant:
    batch = next((value for name, value in settings if name == "batch"), None)
    if batch is not None and not batch.isdecimal():
        raise InputError("not a whole number of images per rank", field="--vary batch", got=batch)
    changes: dict[str, Any] = {name: yaml.safe_load(value) for name, value in settings if name != "batch"}
    name = ", ".join(f"{name.rpartition('.')[2]}={value}" for name, value in settings) or "as the document says"
    return BenchVariant(name, changes, None if batch is None else int(batch), real_images)
