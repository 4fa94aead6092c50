"""Write the table of verdicts in benchmarks/results/learning/README.md, and the readings into the studies' pages.

A reading is prose of the study's document, written after the run. `podscale study NAME --results-only --out
benchmarks/results/learning` writes a study's page, verdict and reading again, if its records are there.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from podscale.pipelines import presets
from podscale.study import StudyDocument, read_study
from podscale.study.verdict import describe_threshold
from tools.paper_evidence import study_scale

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "learning"
PAGE = FOLDER / "README.md"
TRAININGS = "<details>\n<summary>Every training"
"""First lines of the last table of a study's page."""
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
    lines = ["| study | papers | scale | passes if | verdict | result | trainings |", "|---|---|---|---|---|---|---:|"]
    for study in studies:
        verdict = read_verdict(study.name)
        thresholds = (describe_threshold(criterion) for criterion in study.criteria if criterion.is_decisive)
        passes = "; ".join(dict.fromkeys(thresholds)) or "each difference is reported"
        trainings = verdict["trainings"]
        cells = [
            f"[{verdict['title']}]({verdict['page']})",
            ", ".join(verdict["papers"]),
            study_scale(study),
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


def study_page(study: StudyDocument) -> Path:
    return FOLDER / f"{study.name}.md"


def read_sources(study: StudyDocument) -> str:
    """Return the texts whose numbers a reading may have: pages and documents of the study and of those it names."""
    names = {study.name, *re.findall(r"[a-z0-9]+(?:-[a-z0-9]+)+", study.reading)}
    paths = [path for name in sorted(names) for path in (FOLDER / f"{name}.md", FOLDER.parent / f"{name}.md")]
    pages = [path.read_text(encoding="utf-8") for path in paths if path.exists()]
    named = sorted(names & set(presets.study_names()))
    studies = [read_study(presets.resolve_study(name), {}, presets.resolve_preset) for name in named]
    documents = [str(one.model_dump(exclude={"reading"})) for one in studies]
    return "\n".join([*documents, *pages]).replace(study.reading.strip(), "")


def with_reading(text: str, reading: str) -> str:
    """Return a study's page with this reading, the block of text before the table of all trainings."""
    before, table, after = text.rpartition(TRAININGS)
    *blocks, last = before.rstrip().split("\n\n")
    if last.startswith(("|", "<", "!", "-")) or last.endswith("</details>"):
        blocks.append(last)
    return "\n\n".join([*blocks, *([reading.strip()] if reading.strip() else []), table + after])


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    for judged in judged_studies():
        path = study_page(judged)
        path.write_text(with_reading(path.read_text(encoding="utf-8"), judged.reading), encoding="utf-8")
