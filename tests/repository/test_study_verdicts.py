"""Verdicts of the studies with pass criteria: each document has one, under the protocol that stands in the document."""

import pytest

from podscale.study import StudyDocument
from podscale.study.protocol import protocol_digest
from tools import study_verdicts

STUDIES = study_verdicts.judged_studies()


@pytest.mark.parametrize("study", STUDIES, ids=[study.name for study in STUDIES])
def test_a_verdict_belongs_to_the_protocol_of_its_document(study: StudyDocument) -> None:
    """A criterion changed after a run shows here: run the study again, or `podscale study NAME --results-only`."""
    verdict = study_verdicts.read_verdict(study.name)
    assert verdict["protocol"]["digest"] == protocol_digest(study)
    launch = verdict["protocol"]["launch"]
    if verdict["trainings"]["done"]:
        assert launch is not None
        assert launch["commit"] is not None, "the document was committed before its first launch"
        assert launch["committed"] <= launch["date"]
    assert (study_verdicts.FOLDER / verdict["page"]).exists()


def test_the_table_of_verdicts_is_current() -> None:
    text = study_verdicts.PAGE.read_text(encoding="utf-8")
    assert study_verdicts.page(text) == text
