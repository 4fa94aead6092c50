"""The confusion matrix of few classes as a heat map."""

from collections.abc import Sequence

from podscale.evaluate.report.svg import Markup, tag

MAX_NAME_LENGTH = 13
"""Characters of a class name that are drawn; the whole name shows on hover."""


def heatmap(title: str, names: Sequence[str], matrix: Sequence[Sequence[int]]) -> Markup:
    """Rows are true classes, columns predictions; shade is the share of the row, so that rare classes show too.

    The diagonal has the colour of success, mistakes the colour of attention, on a square-root shade: one mistake in a
    hundred is to be seen.
    """
    n = len(names)
    cell = max(16.0, min(34.0, 320.0 / n))
    longest = min(MAX_NAME_LENGTH, max(len(name) for name in names))
    left, top = 14.0 + 8.0 * longest, 16.0 + 5.0 * longest
    parts = []
    for i, row in enumerate(matrix):
        total = sum(row) or 1
        parts.append(_draw_name(names[i], left - 8, top + (i + 0.5) * cell + 4, slanted=False))
        parts.append(_draw_name(names[i], left + (i + 0.5) * cell + 2, top - 8, slanted=True))
        for j, value in enumerate(row):
            shade = (value / total) ** 0.5 if value else 0.0
            tint = "right" if i == j else "wrong"
            label = f"{names[i]} taken for {names[j]}: {value} of {sum(row)}"
            parts.append(
                tag(
                    "g",
                    tag("title", label),
                    tag("rect", x=left + j * cell, y=top + i * cell, width=cell - 1, height=cell - 1, class_="cell"),
                    tag(
                        "rect",
                        x=left + j * cell,
                        y=top + i * cell,
                        width=cell - 1,
                        height=cell - 1,
                        class_=tint,
                        fill_opacity=shade,
                    )
                    if value
                    else None,
                    tag(
                        "text",
                        str(value),
                        x=left + (j + 0.5) * cell - 0.5,
                        y=top + (i + 0.5) * cell + 3.5,
                        text_anchor="middle",
                        class_="on" if shade > 0.6 else "off",
                        style=f"font-size:{min(12.0, cell * 0.9 / max(2, len(str(value)))):.1f}px",
                    )
                    if value
                    else None,
                )
            )
    side = n * cell
    width, height = left + side + 3.6 * longest, top + side + 4
    drawn = tag("svg", parts, viewBox=f"0 0 {width:.0f} {height:.0f}", role="img", aria_label=title, class_="chart")
    caption = tag("figcaption", tag("b", title), tag("span", "rows: true class, columns: prediction", class_="unit"))
    return tag("figure", caption, drawn, class_="panel")


def _draw_name(name: str, x: float, y: float, *, slanted: bool) -> Markup:
    label = name if len(name) <= MAX_NAME_LENGTH else name[: MAX_NAME_LENGTH - 1] + "\u2026"
    if slanted:
        return tag("text", tag("title", name), label, x=x, y=y, transform=f"rotate(-50 {x:.1f} {y:.1f})")
    return tag("text", tag("title", name), label, x=x, y=y, text_anchor="end")
