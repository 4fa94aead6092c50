"""Pieces that several sections are made of."""

from collections.abc import Mapping
from typing import Any

from podscale.evaluate.report.svg import Markup, tag


def section_tag(title: str, *children: Any) -> Markup:
    """A section of the page; its anchor is its title."""
    return tag("section", tag("h2", title), children, id=title.lower().replace(" ", "-"))


def fact_table(rows: Mapping[str, Any]) -> Markup:
    """Names and values; rows without a value are left out."""
    cells = [tag("tr", tag("th", name), tag("td", value)) for name, value in rows.items() if value not in (None, "")]
    return tag("table", tag("tbody", cells), class_="facts")
