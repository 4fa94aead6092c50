"""Page of a prediction: bounded in size, escaped, and complete for few images."""

from html.parser import HTMLParser
from pathlib import Path

import pytest

from podscale.prediction.contact_sheet import write_contact_sheet
from podscale.prediction.image_inputs import Failure, ImageItem
from podscale.prediction.predictor import Prediction, PredictOptions, Predictor
from podscale.prediction.summary import MAX_DOUBTFUL, MAX_FAILURES, MAX_PICTURES, PredictionSummary
from tests.support.prediction import photograph


class _Page(HTMLParser):
    """Counts elements, and collects the text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def count(self, name: str) -> int:
        return sum(tag == name for tag, _ in self.tags)


@pytest.fixture
def predictor(model_run: Path, tmp_path: Path) -> Predictor:
    (tmp_path / "<b>x.jpg").write_bytes(photograph(0, 300, 300))
    return Predictor.open(model_run, [str(tmp_path / "<b>x.jpg")], PredictOptions())


def summary_of(predictor: Predictor, images: int, failures: int) -> PredictionSummary:
    """Return the summary of made-up predictions, all of one real file."""
    summary = PredictionSummary(predictor, pictures=True)
    name = predictor.inputs[0].location
    item = ImageItem(name, 0)
    for number in range(images):
        likely = 0.5 + (number * 7919 % images) / (2 * images)
        summary.add(
            item, Prediction(f"{name}#{number}", "bee", (f"class <{number % 30}>", "bee"), (likely, 1 - likely))
        )
    for number in range(failures):
        summary.add(item, Prediction(f"{number}.jpg", failure=Failure("corrupt", "<script>")))
    return summary


def test_all_of_a_few_images_are_shown(predictor: Predictor, tmp_path: Path) -> None:
    write_contact_sheet(summary_of(predictor, 9, 2), tmp_path / "page.html")
    page = _Page(tmp_path / "page.html")
    assert page.count("img") == 9
    assert page.count("script") == 0
    assert "<script>" in page.text
    assert "<b>x.jpg" in page.text
    assert {str(a["src"]).partition(":")[0] for tag, a in page.tags if tag == "img"} == {"data"}


def test_the_page_of_many_images_is_bounded(predictor: Predictor, tmp_path: Path) -> None:
    summary = summary_of(predictor, 5000, 500)
    write_contact_sheet(summary, tmp_path / "page.html")
    page = _Page(tmp_path / "page.html")
    assert page.count("img") == MAX_PICTURES + MAX_DOUBTFUL
    assert page.text.count("corrupt") <= MAX_FAILURES + 1
    assert (tmp_path / "page.html").stat().st_size < 3e6
    shown = [image.prediction.probabilities[0] for image in summary.doubtful]
    assert shown == sorted(shown)
    assert shown[-1] == pytest.approx(0.5 + (MAX_DOUBTFUL - 1) / 10000)
    numbers = [image.number for image in summary.sample]
    assert len(set(numbers)) == MAX_PICTURES
    assert 1500 < sum(numbers) / len(numbers) < 3500, "the sample is from the whole list"


def test_an_image_that_is_gone_has_a_note(predictor: Predictor, tmp_path: Path) -> None:
    summary = summary_of(predictor, 1, 0)
    Path(predictor.inputs[0].location).unlink()
    write_contact_sheet(summary, tmp_path / "page.html")
    assert _Page(tmp_path / "page.html").count("img") == 0


def test_the_counts_are_those_of_the_rows(predictor: Predictor) -> None:
    summary = summary_of(predictor, 40, 3)
    assert (summary.images, summary.failures, summary.reasons["corrupt"], summary.labelled) == (43, 3, 3, 40)
    assert summary.accuracy == 0
    summary.add(ImageItem("x", 0), Prediction("x", "bee", ("bee",), (1.0,)))
    assert summary.accuracy == pytest.approx(1 / 41)
