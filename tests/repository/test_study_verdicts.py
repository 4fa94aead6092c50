"""Verdicts of the studies with pass criteria: each document has one, under the protocol that stands in the document."""

import pytest

from podscale.study import StudyDocument
from podscale.study.protocol import protocol_digest
from tools import study_verdicts
from tools.paper_evidence import check_numbers

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


@pytest.mark.parametrize("study", STUDIES, ids=[study.name for study in STUDIES])
def test_a_page_has_the_reading_of_its_document(study: StudyDocument) -> None:
    text = study_verdicts.study_page(study).read_text(encoding="utf-8")
    assert study_verdicts.with_reading(text, study.reading) == text, "run: python -m tools.study_verdicts"
    assert not study.reading or text.count(study.reading.strip()) == 1


@pytest.mark.parametrize("study", [study for study in STUDIES if study.reading], ids=lambda study: study.name)
def test_a_reading_has_no_number_that_its_sources_have_not(study: StudyDocument) -> None:
    """A number of another run, or one that a new run changed, shows here."""
    sources = study_verdicts.read_sources(study)
    assert study.reading.strip() not in sources
    check_numbers(study.reading, [sources], study.name)


def test_every_finished_study_has_a_reading() -> None:
    finished = [study for study in STUDIES if study_verdicts.read_verdict(study.name)["trials"]["left"] == 0]
    assert len(finished) > 8
    assert [study.name for study in finished if not study.reading] == []
