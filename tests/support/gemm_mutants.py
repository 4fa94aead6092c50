"""Faults that are planted into the kernels of 1x1 convolutions, each of which the comparison with float64 must find.

`python -m tests.support.gemm_mutants` prints the errors of each mutant in Triton's interpreter as JSON.
"""

import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

from podscale.pytorch import batch_norm
from podscale.pytorch.batch_norm import fused_kernels, gemm, gemm_calls, gemm_kernels
from tests.support.gemm_oracle import all_errors, prepare_interpreter


class Mutant(NamedTuple):
    """Text of a module, and its replacement."""

    module: ModuleType
    old: str
    new: str


MUTANTS = {
    "the input is not activated": Mutant(gemm_kernels, "tl.where(result <= 0.0, 0.0, result)", "result"),
    "the shift is lost": Mutant(gemm_kernels, "value.to(tl.float32) * scale + shift", "value.to(tl.float32) * scale"),
    "only the first step of a product": Mutant(gemm_kernels, "range(0, inputs, block", "range(0, block_inputs, block"),
    "moments before rounding": Mutant(gemm_kernels, "value = rounded.to(tl.float32)", "value = total"),
    "moments count rows past the end": Mutant(
        gemm_kernels, "tl.minimum(block_rows, rows - part * block_rows)", "(block_rows + part * 0)"
    ),
    "tiles merge without their distance": Mutant(gemm_kernels, "second += count", "second += 0 * count"),
    "tiles merge with equal weights": Mutant(
        gemm_kernels, "tl.sum(first * count, 0) / tl.sum(count, 0)", "tl.sum(first, 0) / tl.sum(count / count, 0)"
    ),
    "sums of a group of tiles lack one": Mutant(gemm_kernels, "total = tl.sum(first, 0)", "total = tl.max(first, 0)"),
    "the gradient is not masked": Mutant(gemm_kernels, "tl.where(value * a + b <= 0.0, 0.0, g)", "g"),
    "the sum lacks the shortcut": Mutant(gemm_kernels, "value += tl.load(shortcut", "value + tl.load(shortcut"),
    "bits in the wrong order": Mutant(fused_kernels, ">> tl.arange(0, 8)", ">> (7 - tl.arange(0, 8))"),
    "products are not centred": Mutant(gemm_kernels, "value - tl.load(mean + n)[None, :]", "value"),
    "the second gradient at every row": Mutant(
        gemm_kernels, "& (row_of_image % second_stride == 0)", "& (row_of_image >= 0)"
    ),
    "no second gradient": Mutant(gemm_kernels, "g += tl.load(second_gradient", "g + tl.load(second_gradient"),
    "the stride of rows is lost": Mutant(gemm_kernels, "line % height * stride", "line % height"),
    "a split is lost": Mutant(gemm_kernels, "for _ in range(splits)", "for _ in range(1, splits)"),
    "a described factor has one step": Mutant(gemm_kernels, "x.load([first_row, start])", "x.load([first_row, 0])"),
    "a described result has one column": Mutant(
        gemm_kernels, "dx.store([part * block_rows, column * block_outputs]", "dx.store([part * block_rows, 0]"
    ),
    "a described gradient has one column": Mutant(
        gemm_kernels, "gradient.load([start, tile // columns * block_outputs])", "gradient.load([start, 0])"
    ),
    "gradients between strides are not zero": Mutant(gemm_calls, "dx.zero_()", "dx.fill_(1.0)"),
    "the weight gradient of inputs that are not activated": Mutant(
        gemm, "ctx.dtype, 1, affine)", "ctx.dtype, 1, None)"
    ),
    "the projection's gradient is lost": Mutant(gemm, "second=second, second_stride", "second=None, second_stride"),
    "running statistics by the wrong chunks": Mutant(gemm_calls, "BLOCK_ROWS * MERGED_TILES)", "BLOCK_ROWS)"),
}


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """Replace a module by its mutant wherever it is used."""
    source = Path(str(mutant.module.__file__)).read_text(encoding="utf-8")
    assert source.count(mutant.old) >= 1, mutant.old
    name = mutant.module.__name__
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name.rpartition('.')[2]}.py"
        path.write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")
        spec: Any = importlib.util.spec_from_file_location(name, path)
        changed = importlib.util.module_from_spec(spec)
        with mock.patch.dict(sys.modules, {name: changed}):
            spec.loader.exec_module(changed)
            if mutant.module is gemm_calls:
                changed.MERGED_TILES = gemm_calls.MERGED_TILES  # type: ignore[attr-defined]
            users = [
                (user, attribute)
                for user in (batch_norm, gemm, gemm_calls, gemm_kernels)
                for attribute, value in vars(user).items()
                if value is mutant.module
            ]
            patches = [mock.patch.object(user, attribute, changed) for user, attribute in users]
            for patch in patches:
                patch.start()
            try:
                yield
            finally:
                for patch in patches:
                    patch.stop()


def main() -> None:
    assert os.environ["TRITON_INTERPRET"] == "1"
    prepare_interpreter()
    found = {"none": all_errors()}
    for name in sys.argv[1:] or MUTANTS:
        with planted(MUTANTS[name]):
            found[name] = all_errors()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
