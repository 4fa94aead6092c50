"""Markup by functions: every value is escaped here and nowhere else."""

from html import escape
from typing import Any

from podscale.util.formatting import printable


class Markup(str):
    """Text that is already HTML or SVG; anything else is escaped when it becomes part of a tag."""


def tag(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """One element. `class_` is class, `stroke_width` is stroke-width; None leaves an attribute out.

    Floats are written with two decimals, which is a hundredth of a pixel.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_format_attribute(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{written}>{join_markup(*children)}</{name}>")


def void_tag(name: str, /, **attributes: Any) -> Markup:
    """An element without content or end tag: img, meta, br."""
    return Markup(tag(name, **attributes).removesuffix(f"</{name}>"))


def join_markup(*children: Any) -> Markup:
    """The children one after the other; plain strings are escaped, lists and generators are flattened."""
    return Markup("".join(_escape_child(child) for child in children))


def _escape_child(child: Any) -> str:
    if isinstance(child, Markup):
        return child
    if child is None:
        return ""
    if isinstance(child, str):
        return escape(printable(child))
    if isinstance(child, int | float):
        return escape(_format_attribute(child))
    return "".join(_escape_child(part) for part in child)


def _format_attribute(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".") if value % 1 else f"{value:.0f}"
    return printable(str(value))
