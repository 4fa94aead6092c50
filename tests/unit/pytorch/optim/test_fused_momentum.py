"""Triton kernels, in Triton's interpreter, which must be chosen at import and so needs its own process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.triton_kernels import (
    KERNEL_FAILURES,
    REGISTERS,
    SHARED_MEMORY_BYTES,
    compile_kernel,
    kernel_failure,
    skip_without_interpreter,
)

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.parametrize(
    ("module", "cases", "tolerance"),
    [
        pytest.param("optimizer_rules", 5, 2e-6, id="lists of operations", marks=pytest.mark.slow),
        pytest.param("momentum_oracle", 8, 1e-6, id="equations in float64"),
    ],
)
def test_fused_momentum_equals(module: str, cases: int, tolerance: float) -> None:
    """The oracle has the norms of Kumar 2019 and the momentum update, with float64 sums of each parameter."""
    skip_without_interpreter()
    done = subprocess.run(
        [sys.executable, "-m", f"tests.support.{module}"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout.splitlines()[-1])
    assert len(errors) == cases
    assert all(error < tolerance for error in errors.values()), errors


@pytest.mark.parametrize("capability", SHARED_MEMORY_BYTES)
@pytest.mark.parametrize(
    ("kernel", "constants"), [("_norms_kernel", {"of_sum": True}), ("_momentum_kernel", {"nesterov": True})]
)
def test_the_kernels_compile_for_a_gpu_and_load_full_vectors(
    kernel: str, constants: dict[str, Any], capability: int, tmp_path: Path, monkeypatch: Any
) -> None:
    """Compiled for A100, H100 or B200, which needs no GPU. Registers suffice without spills to memory."""
    pytest.importorskip("triton")
    from podscale.pytorch.optim import fused_momentum

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled = compile_kernel(
        getattr(fused_momentum, kernel),
        {"table": "*i64", "finite": "*i32"},
        {**constants, "block": fused_momentum.BLOCK_ELEMENTS},
        capability,
        tmp_path,
        warps=8,
    )
    assert compiled.vector_loads == {"_norms_kernel": 4, "_momentum_kernel": 6}[kernel]  # 8 values of each array
    assert compiled.shared <= SHARED_MEMORY_BYTES[capability]
    assert compiled.registers <= REGISTERS // 256  # 8 warps
    assert compiled.spilled == 0


def test_lists_of_operations_are_used_if_triton_cannot_compile(monkeypatch: Any, caplog: Any) -> None:
    import torch

    pytest.importorskip("triton")
    from podscale.pytorch.optim import fused_momentum, sgd

    class Fused:
        failure: Exception | None = None

        def __init__(self, share: Any, *, nesterov: bool) -> None: ...

        def compile(self) -> None:
            if self.failure:
                raise self.failure

    class Listed(Fused): ...

    monkeypatch.setattr(fused_momentum, "FusedMomentum", Fused)
    monkeypatch.setattr(sgd, "ForeachMomentum", Listed)
    share: Any = SimpleNamespace(device=torch.device("cuda"))
    assert type(sgd.build_momentum_update(share, nesterov=False)) is Fused
    for reason in KERNEL_FAILURES:
        Fused.failure = kernel_failure(reason)
        assert type(sgd.build_momentum_update(share, nesterov=False)) is Listed
        assert str(Fused.failure) in caplog.text
