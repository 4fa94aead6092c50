"""Triton kernels, in Triton's interpreter, which must be chosen at import and so needs its own process."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[4]


def release(package: Any) -> tuple[int, ...]:
    """Return (major, minor) of a package's version."""
    return tuple(int(part) for part in package.__version__.split(".")[:2])


@pytest.mark.parametrize(
    ("module", "cases", "tolerance"),
    [("update_rules", 5, 2e-6), ("momentum_oracle", 8, 1e-6)],
    ids=["lists of operations", "equations in float64"],
)
def test_fused_momentum_equals(module: str, cases: int, tolerance: float) -> None:
    """The oracle has the norms of Kumar 2019 and the momentum update, with float64 sums of each parameter."""
    triton = pytest.importorskip("triton")
    if release(triton) < (3, 7) and release(np) >= (2, 5):  # NumPy no longer converts an array of one element to an int
        pytest.skip(f"the interpreter of Triton {triton.__version__} does not run with NumPy {np.__version__}")
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


SHARED_MEMORY_BYTES = {80: 166_912, 90: 232_448, 100: 232_448}
"""Shared memory of a block by compute capability: A100, H100 and B200 (CUDA programming guide)."""


@pytest.mark.parametrize("capability", SHARED_MEMORY_BYTES)
@pytest.mark.parametrize(
    ("kernel", "constants"), [("_norms_kernel", {"of_sum": True}), ("_momentum_kernel", {"nesterov": True})]
)
def test_the_kernels_compile_for_a_gpu_and_load_full_vectors(
    kernel: str, constants: dict[str, Any], capability: int, tmp_path: Path, monkeypatch: Any
) -> None:
    """Compiled for A100, H100 or B200, which needs no GPU. Registers suffice without spills to memory."""
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
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
    vectors = compiled.asm["ptx"].count("ld.global.v4")
    assert vectors == {"_norms_kernel": 4, "_momentum_kernel": 6}[kernel]  # 8 elements of each array per thread
    assert compiled.metadata.shared <= SHARED_MEMORY_BYTES[capability]
    usage = resource_usage(compiled.asm["cubin"], tmp_path)
    assert usage["REG"] <= 65536 // 256  # 8 warps
    assert usage["STACK"] == usage["LOCAL"] == 0  # nothing spilled


def resource_usage(cubin: bytes, folder: Path) -> dict[str, int]:
    """Return registers of a thread, and bytes of memory by kind, of the kernel in a binary."""
    from triton import backends

    (folder / "kernel.cubin").write_bytes(cubin)
    program = Path(backends.__file__).parent / "nvidia" / "bin" / "cuobjdump"
    command = [program, "--dump-resource-usage", folder / "kernel.cubin"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", text)}


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
