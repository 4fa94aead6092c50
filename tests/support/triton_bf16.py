"""Products of bf16 tiles in Triton's interpreter, which multiplies their bits as integers (Triton 3.9)."""

from typing import Any


def interpret_bf16_products() -> None:
    """Let the interpreter convert bf16 tiles to fp32 before it multiplies them; the products are exact in fp32."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    product = builder.create_dot
    if getattr(product, "converts_bf16", False):
        return

    def create_dot(self: Any, a: Any, b: Any, *arguments: Any) -> Any:
        return product(self, *(_widen(self, tile, tl) for tile in (a, b)), *arguments)

    create_dot.converts_bf16 = True  # type: ignore[attr-defined]
    builder.create_dot = create_dot


def _widen(builder: Any, tile: Any, tl: Any) -> Any:
    return builder.create_fp_ext(tile, tl.float32) if tile.dtype.scalar == tl.bfloat16 else tile
