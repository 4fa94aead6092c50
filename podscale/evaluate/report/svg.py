"""Markup by functions: every value is escaped here and nowhere else."""

from html import escape
from typing import Any


class Markup(str):
    """Text that is already HTML or SVG; anything else is escaped when it becomes part of a tag."""


def tag(name: str, *children: Any, **attributes: Any) -> Markup:
    """One element. `class_` is class, `stroke_width` is stroke-width; None leaves an attribute out.

    Floats are written with two decimals, which is a hundredth of a pixel.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_value(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{written}>{text(*children)}</{name}>")


def void(name: str, **attributes: Any) -> Markup:
    """An element without content or end tag: img, meta, br."""
    return Markup(tag(name, **attributes).removesuffix(f"</{name}>"))


def text(*children: Any) -> Markup:
    """The children one after the other; plain strings are escaped, lists and generators are flattened."""
    return Markup("".join(_child(child) for child in children))


def _child(child: Any) -> str:
    if isinstance(child, Markup):
        return child
    if child is None:
        return ""
    if isinstance(child, str):
        return escape(printable(child))
    if isinstance(child, int | float):
        return escape(_value(child))
    return "".join(_child(part) for part in child)


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".") if value % 1 else f"{value:.0f}"
    return printable(str(value))


def printable(value: str | bytes) -> str:
    """Text that any browser can show: bytes as UTF-8 with \\xNN for the rest, control characters as \\xNN."""
    decoded = value.decode("utf-8", errors="backslashreplace") if isinstance(value, bytes) else value
    return "".join(c if _shows(c) else f"\\x{ord(c):02x}" for c in decoded)


def _shows(c: str) -> bool:
    bidirectional = "\u202a" <= c <= "\u202e" or "\u2066" <= c <= "\u2069"  # would turn the text around it
    return c == "\n" or c == "\t" or (c.isprintable() and not "\ud800" <= c <= "\udfff" and not bidirectional)
