"""Blocks of a results page for the verdict of a study: its sentence, a chart of the differences and a table."""

from collections.abc import Iterator

from podscale.study.blocks import BulletBlock, ResultBlock, TableBlock
from podscale.study.verdict import CriterionVerdict, StudyVerdict


def verdict_blocks(verdict: StudyVerdict) -> Iterator[ResultBlock]:
    yield BulletBlock([f"Verdict: {verdict.verdict.replace('-', ' ')}. {verdict.sentence}"])
    rows = [_row(result) for result in verdict.criteria]
    heads = ["criterion", "passes if", "variant", "against", "result", "n", "verdict"]
    yield TableBlock(heads, rows, "Criteria, written before the run", text_columns=4)


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
