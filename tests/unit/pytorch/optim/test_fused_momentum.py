"""Triton kernels, in Triton's interpreter, which must be chosen at import and so needs its own process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[4]


def test_fused_momentum_equals_lists_of_operations() -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.update_rules"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    differences = json.loads(done.stdout.splitlines()[-1])
    assert len(differences) == 5
    assert all(difference < 2e-6 for difference in differences.values()), differences


@pytest.mark.parametrize(
    ("kernel", "constants"), [("_norms_kernel", {"of_sum": True}), ("_momentum_kernel", {"nesterov": True})]
)
def test_the_kernels_compile_for_a_gpu_and_load_full_vectors(
    kernel: str, constants: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    """Compiled for an H100 or H200 (sm_90), which needs no GPU."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from podscale.pytorch.optim import fused_momentum

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    function, constants = getattr(fused_momentum, kernel), {**constants, "block": fused_momentum.BLOCK_ELEMENTS}
    types = {"table": "*i64", "finite": "*i32", **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(
        fn=function,
        signature={name: types.get(name, "*fp32") for name in function.arg_names},
        constexprs=constants,
        attrs={(number,): [["tt.divisibility", 16]] for number in range(3)},  # torch's alignment
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    vectors = compiled.asm["ptx"].count("ld.global.v4")
    assert vectors == {"_norms_kernel": 4, "_momentum_kernel": 6}[kernel]  # 8 elements of each array per thread


def test_lists_of_operations_are_used_if_triton_cannot_compile(monkeypatch: Any, caplog: Any) -> None:
    import torch

    pytest.importorskip("triton")
    from podscale.pytorch.optim import fused_momentum, sgd

    class Fused:
        reason = ""

        def __init__(self, share: Any, *, nesterov: bool) -> None: ...

        def compile(self) -> None:
            if self.reason:
                raise RuntimeError(self.reason)

    class Listed(Fused): ...

    monkeypatch.setattr(fused_momentum, "FusedMomentum", Fused)
    monkeypatch.setattr(sgd, "ForeachMomentum", Listed)
    share: Any = SimpleNamespace(device=torch.device("cuda"))
    assert type(sgd.build_momentum_update(share, nesterov=False)) is Fused
    Fused.reason = "Failed to find C compiler"
    assert type(sgd.build_momentum_update(share, nesterov=False)) is Listed
    assert "Failed to find C compiler" in caplog.text
