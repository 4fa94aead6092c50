"""Triton kernels compiled for a GPU that is not there, or interpreted."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
SHARED_MEMORY_BYTES = {80: 166_912, 90: 232_448, 100: 232_448}
"""Shared memory of a block by compute capability: A100, H100 and B200 (CUDA programming guide)."""
TENSOR_CORE_PRODUCTS = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
"""Instruction of PTX that multiplies tiles on tensor cores, by compute capability."""
REGISTERS = 65536
"""Registers of a multiprocessor."""


def skip_without_interpreter() -> None:
    """Skip the test without Triton, or if its interpreter does not run with this NumPy."""
    triton = pytest.importorskip("triton")
    if _release(triton) < (3, 7) and _release(np) >= (2, 4):  # it makes an int of an array with one element
        pytest.skip(f"the interpreter of Triton {triton.__version__} does not run with NumPy {np.__version__}")


def interpret(*arguments: str) -> str:
    """Return the last line that Python prints with Triton's interpreter, which must be chosen before the import."""
    skip_without_interpreter()
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def _release(package: Any) -> tuple[int, ...]:
    """Return (major, minor) of a package's version."""
    return tuple(int(part) for part in package.__version__.split(".")[:2])


KERNEL_FAILURES = ("no C compiler", "too little shared memory")


def kernel_failure(reason: str) -> Exception:
    """Return what Triton raises for a reason of KERNEL_FAILURES."""
    from triton.runtime.errors import OutOfResources

    if reason == "no C compiler":
        return RuntimeError("Failed to find C compiler")
    return OutOfResources(115100, 101376, "shared memory")  # type: ignore[no-untyped-call]


class CompiledKernel(NamedTuple):
    """Code of a kernel and what it needs: bytes of shared memory, registers of a thread, bytes of spilled registers."""

    ptx: str
    shared: int
    registers: int
    spilled: int

    @property
    def vector_loads(self) -> int:
        """Loads of 16 bytes from the device's memory."""
        return len(re.findall(r"ld\.global[.:\w]*\.v4", self.ptx))

    @property
    def vector_copies(self) -> int:
        """Copies of 16 bytes from the device's memory to shared memory."""
        return len(re.findall(r"cp\.async\.cg\.shared\.global", self.ptx))

    @property
    def vector_stores(self) -> int:
        return len(re.findall(r"st\.global[.:\w]*\.v4", self.ptx))


def compile_kernel(
    function: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    capability: int,
    folder: Path,
    *,
    warps: int,
    stages: int = 3,
    multiples_of_16: tuple[str, ...] = (),
) -> CompiledKernel:
    """Compile a kernel for a compute capability. `folder` gets the binary.

    Args:
        stages: Steps of a loop whose loads are in flight.
        types: Triton's types of the arguments, by default pointers to fp32.
        constants: Values of the compile-time arguments.
        multiples_of_16: Integers known to be multiples of 16, as all pointers of torch's tensors are.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: "constexpr" if name in constants else types.get(name, "*fp32") for name in function.arg_names}
    aligned = [
        number
        for number, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name in multiples_of_16
    ]
    source = ASTSource(
        fn=function,
        signature=signature,
        constexprs=dict(constants),
        attrs={(number,): [["tt.divisibility", 16]] for number in aligned},
    )
    options = {"num_warps": warps, "num_stages": stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    usage = _resource_usage(compiled.asm["cubin"], folder)
    return CompiledKernel(compiled.asm["ptx"], compiled.metadata.shared, usage["REG"], usage["STACK"] + usage["LOCAL"])


def _resource_usage(cubin: bytes, folder: Path) -> dict[str, int]:
    """Return registers of a thread, and bytes of memory by kind, of the kernel in a binary."""
    from triton import backends

    (folder / "kernel.cubin").write_bytes(cubin)
    program = Path(backends.__file__).parent / "nvidia" / "bin" / "cuobjdump"
    command = [program, "--dump-resource-usage", folder / "kernel.cubin"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", text)}
