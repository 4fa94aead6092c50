"""HTML markup and number formats of the report; the only module that escapes HTML."""

import math
from collections.abc import Mapping
from html import escape
from typing import Any

from podscale.util.formatting import printable


class Markup(str):
    """HTML or SVG text; any other text is escaped when it becomes part of a tag."""


def tag(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """Return one element; `class_` is class, `stroke_width` is stroke-width, and None omits an attribute."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_format_attribute(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{written}>{join_markup(*children)}</{name}>")


def void_tag(name: str, /, **attributes: Any) -> Markup:
    """Return an element without content or end tag, such as img, meta or br."""
    return Markup(tag(name, **attributes).removesuffix(f"</{name}>"))


def join_markup(*children: Any) -> Markup:
    """Concatenate the children; plain strings are escaped, iterables are flattened."""
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


MISSING_TEXT = "\u2013"
"""En dash."""


def format_percent(share: float | None, digits: int = 1) -> str:
    """Format a fraction in percent: 0.9722 -> 97.2 %."""
    return MISSING_TEXT if share is None else f"{100 * share:.{digits}f}\u202f%"


def format_integer(value: float | None) -> str:
    """Format an integer: 12345 -> 12 345, with a narrow no-break space."""
    return MISSING_TEXT if value is None else f"{round(value):,}".replace(",", "\u202f")


def format_loss(value: float | None) -> str:
    return MISSING_TEXT if value is None else f"{value:.4f}"


def format_rate(value: float | None) -> str:
    """Format images per second: three significant digits below 100, whole numbers above."""
    if value is None:
        return MISSING_TEXT
    return format_integer(value) if value >= 100 else f"{value:.3g}"


def format_seconds(seconds: float | None) -> str:
    """Format a duration: 250 ms, 3.2 s, 35 s, 4 min 10 s, 2 h 05 min."""
    if seconds is None:
        return MISSING_TEXT
    if seconds < 0.9995:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if round(seconds) < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_size(number: float | None) -> str:
    """Format a number of bytes in decimal units."""
    if number is None:
        return MISSING_TEXT
    for unit in ("B", "kB", "MB", "GB"):
        if abs(number) < 999.5:
            return f"{number:.3g} {unit}" if unit != "B" else f"{number:.0f} B"
        number /= 1000
    return f"{number:.3g} TB"


def format_short(value: float) -> str:
    """Format a tick or hover label: at most four significant digits; k, M and G from ten thousand on."""
    if not math.isfinite(value):
        return MISSING_TEXT
    for limit, scale, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (9999.5, 1e3, "k")):
        if abs(value) >= limit:
            return f"{value / scale:.4g}{unit}"
    if value and abs(value) < 1e-3:
        mantissa, exponent = f"{value:.3e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.4g}"


def section_tag(title: str, *children: Any) -> Markup:
    """Return a section of the page, with an anchor made from its title."""
    return tag("section", tag("h2", title), children, id=title.lower().replace(" ", "-"))


def panel(title: str, *body: Any, caption: Any = None) -> Markup:
    """Return a titled figure with a caption beside the title."""
    return tag("figure", tag("figcaption", tag("b", title), caption), body, class_="panel")


def chart_figure(title: str, width: float, height: float, *drawing: Any, caption: Any = None) -> Markup:
    """Return a titled figure with an SVG drawing; sizes are in drawing units."""
    view_box = f"0 0 {width:.0f} {height:.0f}"
    return panel(
        title, tag("svg", drawing, viewBox=view_box, role="img", aria_label=title, class_="chart"), caption=caption
    )


def headline_tile(name: str, value: str, note: str) -> Markup:
    """Return a large number with its name above and a note below."""
    parts = (("name", name), ("value", value), ("sub", note))
    return tag("div", [tag("span", part, class_=style) for style, part in parts], class_="tile")


def note(text: str) -> Markup:
    return tag("p", text, class_="note")


def table_row(*cells: Any, cell: str = "td", text_columns: int = 1, **attributes: Any) -> Markup:
    """Return a row; the cells after the first `text_columns` hold numbers."""
    styled = (tag(cell, content, class_="n" if i >= text_columns else None) for i, content in enumerate(cells))
    return tag("tr", styled, **attributes)


def table(head: Markup, rows: Any, class_: str | None = "compact") -> Markup:
    return tag("table", tag("thead", head), tag("tbody", rows), class_=class_)


def fact_table(rows: Mapping[str, Any]) -> Markup:
    """Return a table of names and values, without rows that have no value."""
    cells = [tag("tr", tag("th", name), tag("td", value)) for name, value in rows.items() if value not in (None, "")]
    return tag("table", tag("tbody", cells), class_="facts")
