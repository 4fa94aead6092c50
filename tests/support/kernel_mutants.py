"""Faults that are planted into Triton kernels and their calls, each of which the comparison with an oracle must find.

`python -m tests.support.kernel_mutants SUBJECT [MUTANT ...]` prints JSON: the error of each case, in Triton's
interpreter, without a fault ("none") and with each mutant of the subject.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

from tests.support.triton_interpreter import adapt_interpreter

NORM_KERNELS = "podscale.pytorch.batch_norm.fused_kernels"
POOL_KERNELS = "podscale.pytorch.batch_norm.fused_pool_kernels"
GEMM_KERNELS, GEMM_CALLS, GEMM = (
    f"podscale.pytorch.batch_norm.{name}" for name in ("gemm_kernels", "gemm_calls", "gemm")
)
MOMENTUM_KERNELS = "podscale.pytorch.optim.fused_momentum"
CROP_KERNELS = "podscale.data.loaders.crop_kernels"
USERS = ("podscale.", "tests.support.")
"""Beginnings of the names of modules that may use a changed one."""


class Mutant(NamedTuple):
    """Text of a module, and its replacement."""

    module: str
    old: str
    new: str


def _of(module: str, changes: Mapping[str, tuple[str, str]]) -> dict[str, Mutant]:
    return {name: Mutant(module, *change) for name, change in changes.items()}


NORM = {
    "sums are not of differences": ("tl.sum(tile, 0) / tl.minimum(", "0.0 * tl.sum(tile, 0) / tl.minimum("),
    "the variance of a chunk is not centred": ("tl.sum(squared, 0) - total * total / count", "tl.sum(squared, 0)"),
    "moments count rows past the end": ("tl.where(mask, value - shift", "tl.where(within, value - shift"),
    "chunks merge without their distance": ("square + count * mean * mean", "square + 0.0 * mean"),
    "chunks merge with equal weights": ("tl.minimum(chunk, rows - part * chunk)", "(chunk + 0 * part)"),
    "the last chunk is lost": ("part < parts)[:, None]", "part < parts - 1)[:, None]"),
    "the running variance is biased": ("(total / tl.maximum(total - 1.0, 1.0))", "1.0"),
    "the running mean stays": ("average + momentum * (exact_mean", "average + 0.0 * momentum * (exact_mean"),
    "the output is not activated": ("tl.where(value <= 0.0, 0.0, value)", "value"),
    "the shortcut is lost": ("value += tl.load(shortcut", "value + tl.load(shortcut"),
    "bits in the wrong order": (">> tl.arange(0, 8)", ">> (7 - tl.arange(0, 8))"),
    "sums of a gradient that is not masked": (
        "<= 0.0, 0.0, g)\n        if relu == 2",
        "<= 0.0, g, g)\n        if relu == 2",
    ),
    "the second gradient is lost": ("g += tl.load(second_gradient", "g + tl.load(second_gradient"),
    "products are not centred": ("product += g * (value - centre[None, :])", "product += g * value"),
    "the input gradient is not masked": ("<= 0.0, 0.0, g)\n    centre", "<= 0.0, g, g)\n    centre"),
    "the input gradient has no slope": ("k[None, :] * (value - centre[None, :])", "0.0 * k[None, :]"),
    "the input gradient has no constant": ("+ d[None, :])", "+ 0.0 * d[None, :])"),
}
POOL = {
    "a window without its last column": ("for j in tl.static_range(3)", "for j in tl.static_range(2)"),
    "windows begin a row too early": ("2 * row - 1 + i", "2 * row - 2 + i"),
    "the number of a pixel is transposed": ("3 * i + j, index", "3 * j + i, index"),
    "a window of zeros has a pixel": ("block_channels], 15, tl.int32)", "block_channels], 4, tl.int32)"),
    "a corner takes another window's gradient": ("i11 == 0, g11", "i11 == 0, g10"),
    "the window on the right is lost": ("tl.where(i01 == 3, g01, 0.0)", "0.0 * g01"),
    "the window below is lost": ("tl.where(i10 == 1, g10, 0.0)", "0.0 * g10"),
    "windows of the next line are used": ("present & (column + 1 < half)", "present & (q + 1 < squares)"),
    "the second gradient is lost": ("g += tl.load(second_gradient", "g + tl.load(second_gradient"),
    "a pixel is missing in the sums": ("(g0 + g1) + (g2 + g3)", "(g0 + g1) + g2"),
    "products of a pixel are not centred": (
        "x3 = tl.load(at + (width + 1) * channels",
        "x3 = centre + tl.load(at + (width + 1) * channels",
    ),
    "the constant is not centred": (" - k * tl.load(mean + c, mask=inside, other=0.0)[None, :]", ""),
    "two pixels are exchanged": ("(a * g1 + k * x1 + d)", "(a * g2 + k * x1 + d)"),
}
MOMENTUM = {
    "the norm is of the gradient alone": ("g += decay * w", "g += 0.0 * decay * w"),
    "a norm is not a root": ("tl.sqrt(tl.sum(w_squares))", "tl.sum(w_squares)"),
    "the decay is the first parameter's": ("tl.load(decays + param)", "tl.load(decays + 0 * param)"),
    "the step has no decay": ("inside * (g + decay * w)", "inside * g"),
    "the inner factor is lost": ("u = inside * (", "u = (1.0 + 0.0 * inside) * ("),
    "the outer factor is lost": ("w - outside * step", "w - step"),
    "the momentum is lost": ("m = keep * m + u", "m = 0.0 * m + u"),
    "the momentum is not written": ("offsets, m, mask=offsets < size", "offsets, m, mask=offsets < 0"),
    "Nesterov's step lacks the gradient": ("u + keep * m if nesterov", "keep * m if nesterov"),
    "every step is Nesterov's": ("u + keep * m if nesterov else m", "u + keep * m"),
    "only the first block of a chunk": ("range(0, size, block)", "range(0, block, block)"),
}
CROPS = {
    "another cubic": ("(-0.5 + 2.0)", "(-0.75 + 2.0)"),
    "the filter is not stretched": ("inverse = 1.0 / shrink", "inverse = 1.0 + 0.0 * shrink"),
    "half a pixel off": ("(output.to(tl.float64) + 0.5) * scale", "output.to(tl.float64) * scale"),
    "weights do not add up to one": ("weight / tl.where(total == 0.0, 1.0, total)", "weight / shrink"),
    "sums are truncated": ("2097152, tl.int32", "0, tl.int32"),
    "sums are not clipped": ("tl.minimum(tl.maximum(total >> 22, 0), 255)", "(total >> 22)"),
    "crops are not mirrored": ("tl.where(mirrored, size - 1 - o, o)", "o"),
    "the padding is not zero": ("inside & (first + tap < end), weight", "first + tap < end, weight"),
    "the corner of the square is lost": ("output = tl.load(row + 8 + axis) + ", "output = "),
    "every channel is the first": ("place = channel * plane", "place = 0 * plane"),
    "every image is the first": ("(begin + r)[:, None] * (3 * size)", "(0 * begin + r)[:, None] * (3 * size)"),
    "swapped crops stay swapped": ("tl.where(swapped, 3, 3 * size)", "3 * size"),
}
MUTANTS: dict[str, dict[str, Mutant]] = {
    "norm": _of(NORM_KERNELS, NORM),
    "pool": _of(POOL_KERNELS, POOL),
    "momentum": _of(MOMENTUM_KERNELS, MOMENTUM),
    "crops": _of(CROP_KERNELS, CROPS),
    "gemm": {
        "the input is not activated": Mutant(GEMM_KERNELS, "tl.where(result <= 0.0, 0.0, result)", "result"),
        "the shift is lost": Mutant(
            GEMM_KERNELS, "value.to(tl.float32) * scale + shift", "value.to(tl.float32) * scale"
        ),
        "only the first step of a product": Mutant(
            GEMM_KERNELS, "range(0, inputs, block", "range(0, block_inputs, block"
        ),
        "moments before rounding": Mutant(GEMM_KERNELS, "value = rounded.to(tl.float32)", "value = total"),
        "moments count rows past the end": Mutant(
            GEMM_KERNELS, "tl.minimum(block_rows, rows - part * block_rows)", "(block_rows + part * 0)"
        ),
        "tiles merge without their distance": Mutant(GEMM_KERNELS, "second += count", "second += 0 * count"),
        "tiles merge with equal weights": Mutant(
            GEMM_KERNELS, "tl.sum(first * count, 0) / tl.sum(count, 0)", "tl.sum(first, 0) / tl.sum(count / count, 0)"
        ),
        "sums of a group of tiles lack one": Mutant(
            GEMM_KERNELS, "total = tl.sum(first, 0)", "total = tl.max(first, 0)"
        ),
        "the gradient is not masked": Mutant(GEMM_KERNELS, "tl.where(value * a + b <= 0.0, 0.0, g)", "g"),
        "the sum lacks the shortcut": Mutant(GEMM_KERNELS, "value += tl.load(shortcut", "value + tl.load(shortcut"),
        "bits in the wrong order": Mutant(NORM_KERNELS, ">> tl.arange(0, 8)", ">> (7 - tl.arange(0, 8))"),
        "products are not centred": Mutant(GEMM_KERNELS, "value - tl.load(mean + n)[None, :]", "value"),
        "the second gradient at every row": Mutant(
            GEMM_KERNELS, "& (row_of_image % second_stride == 0)", "& (row_of_image >= 0)"
        ),
        "no second gradient": Mutant(GEMM_KERNELS, "g += tl.load(second_gradient", "g + tl.load(second_gradient"),
        "the stride of rows is lost": Mutant(GEMM_KERNELS, "line % height * stride", "line % height"),
        "a split is lost": Mutant(GEMM_KERNELS, "for _ in range(splits)", "for _ in range(1, splits)"),
        "a described factor has one step": Mutant(GEMM_KERNELS, "x.load([first_row, start])", "x.load([first_row, 0])"),
        "a described result has one column": Mutant(
            GEMM_KERNELS, "dx.store([part * block_rows, column * block_outputs]", "dx.store([part * block_rows, 0]"
        ),
        "a described gradient has one column": Mutant(
            GEMM_KERNELS, "gradient.load([start, tile // columns * block_outputs])", "gradient.load([start, 0])"
        ),
        "gradients between strides are not zero": Mutant(GEMM_CALLS, "dx.zero_()", "dx.fill_(1.0)"),
        "the weight gradient of inputs that are not activated": Mutant(
            GEMM, "ctx.dtype, 1, affine)", "ctx.dtype, 1, None)"
        ),
        "the projection's gradient is lost": Mutant(GEMM, "second=second, second_stride", "second=None, second_stride"),
        "running statistics by the wrong chunks": Mutant(GEMM_CALLS, "BLOCK_ROWS * MERGED_TILES)", "BLOCK_ROWS)"),
    },
}


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """Replace a module by its mutant wherever it or a part of it is used. Its constants keep their present values."""
    module = import_module(mutant.module)
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    assert mutant.old in source, mutant.old
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = Path(folder) / f"{mutant.module.rpartition('.')[2]}.py"
        path.write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")
        spec: Any = spec_from_file_location(mutant.module, path)
        changed = module_from_spec(spec)
        stack.enter_context(mock.patch.dict(sys.modules, {mutant.module: changed}))
        spec.loader.exec_module(changed)
        vars(changed).update({name: value for name, value in vars(module).items() if name.isupper()})
        for user, attribute, value in _uses(module, changed):
            stack.enter_context(mock.patch.object(user, attribute, value))
        yield


def _uses(module: ModuleType, changed: ModuleType) -> list[tuple[ModuleType, str, Any]]:
    """Return each module and attribute that is `module`, or a function or class of it, and what replaces it."""
    parts = {
        id(value): getattr(changed, name)
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == module.__name__
    }
    parts[id(module)] = changed
    users = [user for name, user in sys.modules.items() if name.startswith(USERS) and user is not changed]
    return [
        (user, attribute, parts[id(value)])
        for user in users
        for attribute, value in list(vars(user).items())
        if id(value) in parts
    ]


def norm_errors() -> dict[str, float]:
    """Return the errors of batch norm, of images of one tile, of several chunks of several tiles, and far from zero."""
    from tests.support.fused_norm_oracle import largest_error, several_tiles

    one, several = (3, 8, 6, 4), (2, 24, 10, 14)
    with several_tiles():
        return {
            "norm": largest_error("norm", one),
            **{kind: largest_error(kind, several) for kind in ("relu", "sum")},
            "far from zero": largest_error("relu", several, mean=300.0) / 100,
        }


def pool_errors() -> dict[str, float]:
    from tests.support.fused_norm_oracle import largest_error, several_tiles

    with several_tiles():
        return {"pool": largest_error("pool", (2, 24, 10, 14))}


def momentum_errors() -> dict[str, float]:
    from tests.support.momentum_oracle import all_errors

    return all_errors()


def crop_errors() -> dict[str, float]:
    """Return the differences of bicubic crops from PIL's, grey levels."""
    from tests.support.crop_kernel_oracle import OTHER_ORDER, differences, use_few_programs

    use_few_programs()
    found = differences("bicubic", cases=["shrunk", "padded"])
    return {**found, **differences("bicubic", order=OTHER_ORDER, cases=["high"])}


def gemm_errors() -> dict[str, float]:
    from tests.support.gemm_oracle import all_errors, prepare_interpreter

    prepare_interpreter()
    return all_errors()


ORACLES: dict[str, Callable[[], dict[str, float]]] = {
    "norm": norm_errors,
    "pool": pool_errors,
    "momentum": momentum_errors,
    "crops": crop_errors,
    "gemm": gemm_errors,
}


def main() -> None:
    adapt_interpreter()
    subject, *chosen = sys.argv[1:]
    errors_of, mutants = ORACLES[subject], MUTANTS[subject]
    found = {"none": errors_of()}
    for name in chosen or mutants:
        with planted(mutants[name]):
            found[name] = errors_of()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
