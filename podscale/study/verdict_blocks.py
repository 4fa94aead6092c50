"""Verdict of a study on its results page: a sentence, and a table of the criteria."""

from podscale.study.blocks import TableBlock
from podscale.study.verdict import CriterionVerdict, StudyVerdict


def verdict_text(verdict: StudyVerdict) -> str:
    """Return the verdict in words."""
    return f"Verdict: {verdict.verdict.replace('-', ' ')}. {verdict.sentence}"


def criteria_table(verdict: StudyVerdict) -> TableBlock:
    """Return the criteria with their results."""
    heads = ["criterion", "passes if", "variant", "against", "result", "n", "verdict"]
    rows = [_row(result) for result in verdict.criteria]
    return TableBlock(heads, rows, "Criteria, written before the run", text_columns=4)


def _row(result: CriterionVerdict) -> list[str]:
    name = f"{result.name} (premise)" if result.premise else result.name
    verdict = result.verdict.replace("-", " ")
    return [name, result.criterion, result.variant, result.other, _value_text(result), str(result.n), verdict]


def _value_text(result: CriterionVerdict) -> str:
    if result.value is None:
        return ""
    scale, unit = (100, " points") if result.measure == "top1" else (1, "")
    sign = "+" if result.measure == "top1" else ""
    interval = "" if result.half_width is None else f" \u00b1 {scale * result.half_width:.2f}"
    return f"{scale * result.value:{sign}.2f}{interval}{unit}"
