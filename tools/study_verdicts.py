"""Write the table of the studies with pass criteria in benchmarks/results/learning/README.md, from their verdicts.

`podscale study NAME --results-only --out benchmarks/results/learning` writes a study's page and verdict again.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from podscale.pipelines import presets
from podscale.study import StudyDocument, read_study
from podscale.study.verdict import describe_threshold

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "learning"
PAGE = FOLDER / "README.md"
BEGIN, END = "<!-- verdicts: python -m tools.study_verdicts -->\n", "<!-- end of verdicts -->\n"


def judged_studies() -> list[StudyDocument]:
    """Return the shipped studies that have criteria, by name."""
    studies = [read_study(presets.resolve_study(name), {}, presets.resolve_preset) for name in presets.study_names()]
    return [study for study in studies if study.criteria]


def read_verdict(study: str) -> dict[str, Any]:
    """Return the content of a study's verdict file."""
    values: dict[str, Any] = json.loads((FOLDER / f"{study}.verdict.json").read_text(encoding="utf-8"))
    return values


def table(studies: Sequence[StudyDocument]) -> str:
    """Return the Markdown table of these studies' verdicts."""
    lines = ["| study | papers | passes if | verdict | result | trainings |", "|---|---|---|---|---|---:|"]
    for study in studies:
        verdict = read_verdict(study.name)
        thresholds = (describe_threshold(criterion) for criterion in study.criteria if criterion.is_decisive)
        passes = "; ".join(dict.fromkeys(thresholds)) or "each difference is reported"
        trainings = verdict["trainings"]
        cells = [
            f"[{verdict['title']}]({verdict['page']})",
            ", ".join(verdict["papers"]),
            passes,
            verdict["verdict"].replace("-", " "),
            verdict["sentence"] if trainings["done"] else "",
            f"{trainings['done']} of {trainings['expected']}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """Return the page with the table that follows from the verdicts."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table(judged_studies()) + END + after


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
