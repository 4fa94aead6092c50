"""Write the table of the studies with pass criteria in benchmarks/results/learning/README.md, from their verdicts.

`podscale study NAME --results-only --out benchmarks/results/learning` writes a study's page and verdict again.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from podscale.pipelines import presets
from podscale.study import StudyDocument, read_study

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


def table(verdicts: Sequence[dict[str, Any]]) -> str:
    """Return the Markdown table of these verdicts."""
    lines = ["| study | papers | passes if | verdict | result | trainings |", "|---|---|---|---|---|---:|"]
    for verdict in verdicts:
        decisive = [
            one for one in verdict["criteria"] if not one["criterion"].startswith("none") and not one["premise"]
        ]
        passes = "; ".join(dict.fromkeys(one["criterion"] for one in decisive)) or "each difference is reported"
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
    return before + BEGIN + table([read_verdict(study.name) for study in judged_studies()]) + END + after


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
