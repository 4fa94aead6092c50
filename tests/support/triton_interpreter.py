"""Triton's interpreter with bf16 as on a GPU, and in half of its time.

By itself it multiplies bits of bf16 as integers, and truncates (Triton 3.9). It replaces the functions of Triton's
language at each call of a function, and puts them back behind it.
"""

import os
from types import SimpleNamespace
from typing import Any

import numpy as np

QUIET_NAN = 0x7FC0


def widen(bits: np.ndarray) -> np.ndarray:
    """Return bf16 values, uint16, as fp32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """Return fp32 values rounded to the nearest bf16, ties to even, as uint16."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16
    return np.where(np.isnan(values), QUIET_NAN, rounded).astype(np.uint16)


def adapt_interpreter() -> None:
    """Change the interpreter of this process, which must have been chosen."""
    assert os.environ["TRITON_INTERPRET"] == "1"
    _interpret_bf16()
    _replace_language_once()


def _replace_language_once() -> None:
    from triton.runtime import interpreter

    replace = interpreter._patch_lang
    if replace.__module__ == __name__:
        return
    languages = {id(interpreter.tl), id(interpreter.tl.core)}
    replaced = set[frozenset[int]]()
    kept = SimpleNamespace(restore=lambda: None)

    def replace_once(function: Any) -> Any:
        named = frozenset(languages.intersection(map(id, function.__globals__.values())))
        if named not in replaced:
            replaced.add(named)
            replace(function)
        return kept

    interpreter._patch_lang = replace_once


def _interpret_bf16() -> None:
    """Let the interpreter round to the nearest bf16, and convert bf16 tiles to fp32 before it multiplies them."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    cast, product = builder.cast_impl, builder.create_dot
    if cast.__module__ == __name__:
        return

    def cast_impl(self: Any, value: Any, dtype: Any) -> Any:
        match value.dtype.scalar, dtype.scalar:
            case tl.bfloat16, tl.float32:
                return handle(widen(value.data), tl.float32)
            case tl.float32, tl.bfloat16:
                return handle(narrow(value.data), tl.bfloat16)
        return cast(self, value, dtype)

    def create_dot(self: Any, a: Any, b: Any, *arguments: Any) -> Any:
        tiles = [self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)]
        return product(self, *tiles, *arguments)

    builder.cast_impl, builder.create_dot = cast_impl, create_dot
