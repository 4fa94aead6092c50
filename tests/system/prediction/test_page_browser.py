"""Page of a prediction in a real browser: pictures load, nothing overflows on a phone, nothing is fetched."""

from pathlib import Path

from podscale.prediction.contact_sheet import write_contact_sheet
from podscale.prediction.predict import predicted_items
from podscale.prediction.predictor import PredictOptions, Predictor
from podscale.prediction.summary import PredictionSummary
from podscale.runs import RunDirectory
from tests.support.browser import browser, browser_or_skip
from tests.support.prediction import odd_images, write_model_run

HOSTILE = "<script>document.title='owned'</script>" + "x" * 80


def test_the_page_in_a_browser(tmp_path: Path) -> None:
    program = browser_or_skip()
    config = write_model_run(tmp_path, classes=["ant", HOSTILE, "bee"])
    photos = tmp_path / "photos"
    photos.mkdir()
    for name, (content, _, _) in odd_images().items():
        (photos / name).write_bytes(content)
    run = RunDirectory.for_config(config).path
    predictor = Predictor.open(run, [str(photos)], PredictOptions())
    summary = PredictionSummary(predictor, pictures=True)
    for item, prediction in predicted_items(predictor):
        summary.add(item, prediction)
    write_contact_sheet(summary, tmp_path / "page.html")
    with browser(program) as page:
        for width in (1100, 400):
            page.open(tmp_path / "page.html", width=width)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.evaluate("[...document.images].filter(i => i.complete && i.naturalWidth).length") == len(
                summary.sample
            )
            assert page.evaluate("document.title") != "owned"
            assert [address for address in page.requests() if not address.startswith("file:")] == []
