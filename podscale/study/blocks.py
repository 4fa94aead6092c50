"""Blocks of a results page: text, bullets, tables and charts, as Markdown and as HTML."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from podscale.report.charts.lines import DEFAULT_X, LineSeries, ReferenceLine, XAxis, YAxis, line_chart
from podscale.report.charts.standalone import DotRow, dots_chart, dots_chart_svg, line_chart_svg
from podscale.report.markup import tag


class ResultBlock(ABC):
    """One block of a results page."""

    @abstractmethod
    def markdown(self, study: str) -> Iterator[str]:
        """Yield the lines of Markdown; charts are files <study>-<name>.svg."""

    @abstractmethod
    def html(self) -> Any:
        """Return the markup."""


@dataclass(frozen=True)
class TextBlock(ResultBlock):
    text: str

    def markdown(self, study: str) -> Iterator[str]:
        yield self.text

    def html(self) -> Any:
        return [tag("p", paragraph) for paragraph in re.split(r"\n\s*\n", self.text)]


@dataclass(frozen=True)
class BulletBlock(ResultBlock):
    items: Sequence[str]

    def markdown(self, study: str) -> Iterator[str]:
        yield from (f"- {item}" for item in self.items)

    def html(self) -> Any:
        return tag("div", tag("ul", [tag("li", item) for item in self.items]), class_="notice")


@dataclass(frozen=True)
class TableBlock(ResultBlock):
    """Table of text cells.

    Args:
        text_columns: Number of leading columns that hold text; the others hold numbers.
        is_collapsed: Shown on demand only.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    text_columns: int = 1
    is_collapsed: bool = False

    def markdown(self, study: str) -> Iterator[str]:
        if self.is_collapsed:
            yield from ("<details>", f"<summary>{self.caption}</summary>", "")
        elif self.caption:
            yield from (f"{self.caption}:", "")
        yield f"| {' | '.join(self.heads)} |"
        yield f"|{'|'.join('---' if i < self.text_columns else '---:' for i in range(len(self.heads)))}|"
        yield from (f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in self.rows)
        if self.is_collapsed:
            yield from ("", "</details>")

    def html(self) -> Any:
        rows = [tag("tr", self._html_cells("td", row)) for row in self.rows]
        head = tag("thead", tag("tr", self._html_cells("th", self.heads)))
        table = tag("table", head, tag("tbody", rows), class_="compact")
        if self.is_collapsed:
            return tag("details", tag("summary", self.caption), table)
        return [tag("h3", self.caption) if self.caption else None, table]

    def _html_cells(self, name: str, cells: Sequence[str]) -> list[Any]:
        return [tag(name, cell, class_=None if i < self.text_columns else "n") for i, cell in enumerate(cells)]


@dataclass(frozen=True)
class ChartBlock(ResultBlock):
    """Chart; `name` is the suffix of its file name."""

    name: str
    title: str

    def markdown(self, study: str) -> Iterator[str]:
        yield f"![{self.title}]({study}-{self.name}.svg)"

    @abstractmethod
    def svg(self) -> str:
        """Return the text of an SVG file."""


@dataclass(frozen=True)
class LineBlock(ChartBlock):
    series: Sequence[LineSeries]
    y: YAxis
    x: XAxis = DEFAULT_X
    vlines: Sequence[ReferenceLine] = ()

    def svg(self) -> str:
        return line_chart_svg(self.title, self.series, x=self.x, y=self.y, vlines=self.vlines)

    def html(self) -> Any:
        return line_chart(self.title, self.series, x=self.x, y=self.y, vlines=self.vlines)


@dataclass(frozen=True)
class DotBlock(ChartBlock):
    """Dot chart of percentages with one row per group."""

    rows: Sequence[DotRow]
    unit: str

    def svg(self) -> str:
        return dots_chart_svg(self.title, self.rows, unit=self.unit, x_range=(0, 100))

    def html(self) -> Any:
        return dots_chart(self.title, self.rows, unit=self.unit, x_range=(0, 100))
