"""docs/explanation/papers.md is what presets, tests and result pages say; `python -m tools.papers_page` writes it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tools import paper_evidence, papers_page
from tools.paper_evidence import EvidenceError

LEARNING = "benchmarks/results/learning/photographs-techniques.md"


def test_the_page_is_what_its_sources_say() -> None:
    assert papers_page.TARGET.read_text(encoding="utf-8") == papers_page.render(), "run: python -m tools.papers_page"


@pytest.mark.parametrize(
    "ask",
    [
        lambda: paper_evidence.check_test("tests/repository/test_papers_page.py::test_that_is_gone"),
        lambda: paper_evidence.check_test("tests/repository/no_file.py::test_it"),
        lambda: paper_evidence.quote_sentence(LEARNING, "A sentence that this page does not have."),
        lambda: paper_evidence.quote_sentence(f"{LEARNING}#no-such-section", "Best"),
        lambda: paper_evidence.quote_cells(LEARNING, [("batch norm over 5", "from the first")]),
        lambda: paper_evidence.study_result("no-such-study"),
    ],
)
def test_evidence_that_does_not_exist_is_an_error(ask: Callable[[], object]) -> None:
    with pytest.raises(EvidenceError):
        ask()


@pytest.mark.parametrize(
    ("written", "instead"),
    [
        ("[akiba2017-32k]", "[]"),  # a preset without a paper
        ("row: 16", "row: 17"),  # an option that no preset of the paper sets
        ("train.optimizer.trust:", "train.optimizer.truth:"),  # no option
        ("test_neumann_follows_its_oracle", "test_neumann_follows"),  # no test
        ("podscale/pytorch/optim/neumann.py", "podscale/pytorch/optim/newmann.py"),  # no file
        ("3.74 times", "3.75 times"),  # a number of no source
        ("{collapsed-ensemble: against one model}", "+0.88 \u00b1 0.44 points"),  # a result that would not change
        ("{grouped-batch-norm: span 16}", "{grouped-batch-norm: span 12}"),  # no criterion of the study
        ("[span 8, span 16", "[span 8, span 12"),  # the same of a technique
        ("no regulariser, rate 0.8", "no regulariser, rate 0.9"),  # no row of the page
        ("{nlcg-large-batch: momentum fails}", "{NLCG: momentum fails}"),  # no placeholder
        ("[lars-vs-sgd-curves]", "[lars-vs-sgd-curve]"),  # no picture
        ("{nlcg-large-batch}", "{nlcg-small-batch}"),  # no study
    ],
)
def test_a_table_of_evidence_that_drifted_is_an_error(
    written: str, instead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = papers_page.DATA.read_text(encoding="utf-8")
    assert written in text
    data = tmp_path / "papers.yaml"
    data.write_text(text.replace(written, instead), encoding="utf-8")
    monkeypatch.setattr(papers_page, "DATA", data)
    with pytest.raises(EvidenceError):
        papers_page.render()


def test_cells_are_found_by_their_rows_and_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = "| a | b | c |\n|---|---|---|\n| 1 | x | 2 |\n| 1 | y | 3 |\n"
    (tmp_path / "page.md").write_text(f"# Page\n\n## One\n\n{table}", encoding="utf-8")
    monkeypatch.setattr(paper_evidence, "ROOT", tmp_path)
    quotation = paper_evidence.quote_cells("page.md#one", [("1", "c"), ("1, y", "c")])
    assert quotation.text == "1, c: 2; 1, y, c: 3"


def test_a_study_gives_its_scale_and_each_criterion() -> None:
    result = paper_evidence.study_result("shampoo-steps")
    assert result.verdict == "undecided"
    assert result.scale == (
        "ResNet-18 of width 8 at 32 px on Imagenette, batch 2,048, 20, 30 and 40 epochs, 93 to 185 steps, 3 seeds"
    )
    assert result.conclusions[0] == "three quarters of the steps: -3.83 \u00b1 2.83 points"
    assert len(result.conclusions) == 4
    missed = paper_evidence.study_result("neumann-steps").conclusions
    assert missed[-1] == "steps at 4,096: the accuracy is not reached"
    pretrained = paper_evidence.study_result("fine-tuning").scale
    assert pretrained == "ResNet-18 of width 16 at 32 px on Imagenette, batch 50, 60 epochs, 3 seeds", "no steps"
    (first,) = paper_evidence.study_result("photographs-techniques").conclusions
    assert first.startswith("Best: bf16"), "without criteria, the first line of its page"


def test_a_study_that_has_not_run_has_a_title_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper_evidence, "STUDY_DOCUMENTS", tmp_path)
    document = "name: fresh\ntitle: To be run\npapers: [You 2017]\nrun: {train: {epochs: 1}}\n"
    (tmp_path / "fresh.yaml").write_text(document, encoding="utf-8")
    assert (paper_evidence.studies_of("You 2017"), paper_evidence.studies_of("Jia 2018")) == (["fresh"], [])
    assert paper_evidence.study_result("fresh") == paper_evidence.StudyResult("fresh", "To be run")


def test_a_placeholder_has_the_sign_of_the_difference() -> None:
    text = "({grouped-batch-norm: span 16}; {neumann-direction: Nesterov, rate 0.4 | top-1}), {lars-vs-sgd}"
    assert paper_evidence.fill_placeholders(text) == "(-2.56 \u00b1 1.25 points; 63.90%), passed"


def test_a_number_with_a_sign_has_it_in_its_source() -> None:
    paper_evidence.check_numbers("by 2.56 points, -2.56, 10 to 20", ["-2.56 points, 10-20"], "here")
    for text in ("+2.56 points", "-10"):
        with pytest.raises(EvidenceError):
            paper_evidence.check_numbers(text, ["-2.56 points, 10-20"], "here")


def test_numbers_are_found_as_they_are_written() -> None:
    text = "at 2,048, 4.09 \u00b1 1.01 points; 32K, fp16 and v1.0 are names; 3 of 1,024."
    assert paper_evidence.numbers(text) == {"2,048", "4.09", "1.01", "3", "1,024"}


def test_heads_give_their_sources_by_known_labels() -> None:
    """A reader can tell for each number: paper, authors' code, secondary source, recalled, ours."""
    known = {*papers_page.LABELS, *papers_page.OTHER_LABELS}
    for preset in papers_page.published_presets().values():
        labels = {label for label, _ in preset.paragraphs}
        assert labels <= known, preset.name
        assert "Claim" in labels, preset.name
        assert labels & {"Ours", "Settings"}, preset.name
