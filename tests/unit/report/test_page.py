"""Text of the report: it has every part and nothing executable or remote, also for a failed run."""

import base64
import io
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from podscale.config import dumps, loads
from podscale.data.shard_set import ShardSet
from podscale.evaluation.evaluation_json import evaluate_run
from podscale.evaluation.scores import most_confident_mistakes
from podscale.report.markup import tag
from podscale.report.page import build_report
from podscale.report.report_data import read_report_data
from podscale.report.sections.dataset import MAX_PICTURE_BYTES, thumbnail
from podscale.runs import StageOutcome, write_outcome
from podscale.runs.predictions import Predictions, read_predictions, write_predictions
from podscale.telemetry.events import EventLog
from podscale.util.formatting import printable
from tests.support.digits_run import DIGITS, DigitsRun, make_digits_run, png, write_digits

VOID = {"meta", "img"}
RANKED_PANELS = ("Most confused pairs", "Worst classes", "Best classes", "Images per class")
"""Titles of what replaces the confusion matrix and the bars of each class if there are many."""


class PageParser(HTMLParser):
    """Parser that collects scripts and remote addresses, and checks that all tags nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.handlers: list[str] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "data", "action")]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def page_text(run: Path, shards: ShardSet | Path | None, between: str = "") -> str:
    return between.join(PageParser(build_report(run, shards).read_text(encoding="utf-8")).text)


def evaluate(run: Path, shards: ShardSet, topk: np.ndarray, confidences: np.ndarray) -> None:
    """Write predictions of the validation split into a new run directory, and their evaluation."""
    run.mkdir()
    split = shards.split("validation")
    losses = confidences[:, 0]
    predictions = Predictions(
        split.keys, np.asarray(split.labels, np.int32), topk.astype(np.int32), confidences, losses
    )
    write_predictions(run / "predictions.safetensors", predictions)
    evaluate_run(run, loads(""), shards)


def test_the_page_has_every_section(digits_run: DigitsRun, run: Path) -> None:
    page = build_report(run, digits_run.shard_set).read_text()
    parsed = PageParser(page)
    for title in ("Claim and result", "Training", "Time", "Classes", "Calibration", "Most confident mistakes",
                  "Data", "Environment", "How to reproduce"):  # fmt: skip
        assert title in parsed.text
    top1 = json.loads((run / "evaluation.json").read_text())["figures"]["top1"]
    assert f"{100 * top1:.2f}\u202f%" in parsed.text
    assert parsed.tags.count("path") >= 5  # loss (2), accuracy (2), learning rate, throughput
    assert parsed.tags.count("img") >= 30
    assert len(page) < 1_000_000
    assert "are missing" not in page


def test_nothing_is_remote_and_nothing_runs(digits_run: DigitsRun, run: Path) -> None:
    parsed = PageParser(build_report(run, digits_run.shard_set).read_text())
    assert {"script", "link", "iframe", "object", "form"} & set(parsed.tags) == set()
    assert parsed.handlers == []
    assert parsed.links
    assert all(link.startswith("data:image/") for link in parsed.links)


def test_mistakes_are_shown_with_their_own_picture(digits_run: DigitsRun, run: Path) -> None:
    page = build_report(run, digits_run.shard_set).read_text()
    predictions = read_predictions(digits_run.path / "predictions.safetensors")
    split = ShardSet.open(digits_run.shard_set).split("validation")
    row = most_confident_mistakes(predictions, 1)[0]
    sample = int(np.flatnonzero(split.keys == predictions.keys[row])[0])
    card = page[page.index("<h2>Most confident") :].split('<figure class="card">')[1]
    assert f"{int(predictions.keys[row]):016x}" in card
    assert split.source(sample).decode() in card
    encoded = re.search(r"base64,([^\"]+)", card)
    assert encoded is not None
    shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(encoded[1]))).convert("L"))
    np.testing.assert_array_equal(shown, np.asarray(Image.open(io.BytesIO(split.read(sample).tobytes()))))


def test_hostile_names_are_shown_and_do_nothing(tmp_path: Path) -> None:
    names = [*DIGITS[:7], "<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "nul\0\u202eabc\udcff"]
    run = make_digits_run(tmp_path, names)
    (run.path / "environment.json").write_text(
        json.dumps({"host": "</style><script>alert(2)</script>", "command": "a & b"})
    )
    (run.shard_set / "rejects.jsonl").write_text(json.dumps({"source": "x\x1b[31m\udcfe</td>", "reason": "<i>"}) + "\n")
    parsed = PageParser(build_report(run.path, run.shard_set).read_text(encoding="utf-8"))
    assert {"script", "i "} & set(parsed.tags) == set()
    assert parsed.handlers == []
    text = "".join(parsed.text)
    assert "<script>alert(1)</script>" in text
    assert "nul\\x00\\x202eabc\\xdcff" in text
    assert "x\\x1b[31m\\xdcfe</td>" in text


def test_sources_that_are_not_utf_8_are_shown(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = [png(rng.integers(0, 255, (20, 30, 3), dtype=np.uint8)) for _ in range(4)]
    shards = write_digits(
        tmp_path / "shards", {"train": (images[:2], np.array([0, 1])), "validation": (images[2:], np.array([0, 1]))},
        ["a", "b"], [b"a/1", b"b/1", b"a/\xff\xfe\n.jpg", b"b/<2>"],
    )  # fmt: skip
    evaluate(tmp_path / "run", shards, np.array([[1, 0], [0, 1]]), np.array([[0.9, 0.1], [0.8, 0.2]], np.float32))
    page = build_report(tmp_path / "run", shards).read_text()
    assert "a/\\xff\\xfe\n.jpg" in page
    assert "b/&lt;2&gt;" in page


def test_the_page_of_a_failed_training_has_its_error(digits_run: DigitsRun, run: Path) -> None:
    for name in ("evaluation.json", "predictions.safetensors", "model", "outcome.json"):
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    write_outcome(run / "outcome.json", StageOutcome("shard", 0))
    write_outcome(run / "outcome.json", StageOutcome("train", 77, "rank 1 was killed <hard>", 12.0))
    data = read_report_data(run, digits_run.shard_set)
    assert data.failed_stage is not None
    assert data.failed_stage.stage == "train"
    reasons = {entry.part: entry.reason for entry in data.missing}
    assert reasons.keys() == {"the scores", "the predictions", "the model"}
    for reason in reasons.values():
        assert "train" in reason
        assert "77" in reason
        assert "rank 1 was killed <hard>" in reason
    page = PageParser(build_report(run, digits_run.shard_set).read_text(encoding="utf-8"))
    text = "".join(page.text)
    assert text.count("rank 1 was killed <hard>") == 1 + len(reasons)
    assert "Training" in text  # the curves until the failure
    assert page.tags.count("img") > 0, "samples of the training images"


def test_an_empty_run_directory_still_gets_a_report(tmp_path: Path) -> None:
    missing = read_report_data(tmp_path, None).missing
    parts = {entry.part.removeprefix("the ") for entry in missing}
    assert parts == {"run document", "data", "training curves", "scores", "predictions", "environment", "model"}
    text = page_text(tmp_path, None)
    assert f"{len(missing)} parts" in text
    for entry in missing:
        assert f"{entry.part}: {entry.reason}" in text


def test_damaged_files_are_named(run: Path, tmp_path: Path) -> None:
    (run / "evaluation.json").write_text("{")
    (run / "environment.json").write_text("[]")
    (run / "predictions.safetensors").write_bytes(b"x")
    files = {
        "the scores": "evaluation.json", "the environment": "environment.json",
        "the predictions": "predictions.safetensors", "the data": "nowhere",
    }  # fmt: skip
    missing = read_report_data(run, tmp_path / "nowhere").missing
    assert {entry.part for entry in missing} == files.keys()
    text = page_text(run, tmp_path / "nowhere")
    for entry in missing:
        assert f"{files[entry.part]}: " in entry.reason
        assert entry.reason in text


def test_scores_of_another_class_map_are_not_shown(run: Path, tmp_path: Path) -> None:
    other = make_digits_run(tmp_path, [*DIGITS[:9], "neun"])
    data = read_report_data(run, other.shard_set)
    assert (data.evaluation, data.predictions) == (None, None)
    (entry,) = data.missing
    assert entry.part == "the scores"
    text = page_text(run, other.shard_set)
    assert entry.reason in text
    assert "Confusion matrix" not in text


def test_many_classes_get_pairs_and_a_ranked_histogram(tmp_path: Path) -> None:
    classes, n = 300, 900
    rng = np.random.default_rng(3)
    images = [png(rng.integers(0, 255, (9, 9), dtype=np.uint8)) for _ in range(8)]
    labels = np.arange(n) % classes
    pictures = [images[i % 8] for i in range(n)]
    names = [f"c{i:03d}" for i in range(classes)]
    sources = [f"{i}.png".encode() for i in range(2 * n)]
    shards = write_digits(
        tmp_path / "s", {"train": (pictures, labels), "validation": (pictures, labels)}, names, sources
    )
    predicted = (labels + (labels % 3 == 0) * 7) % classes
    topk = np.stack([predicted, *((labels + i) % classes for i in (1, 2, 3, 4))], axis=1)
    evaluate(tmp_path / "run", shards, topk, np.sort(rng.random((n, 5)), axis=1)[:, ::-1])
    text = page_text(tmp_path / "run", shards)
    pairs, worst, best, ranked = (text.partition(head)[2][:400] for head in RANKED_PANELS)
    assert "c000" in pairs
    assert "c007" in pairs, "300 classes, every third of them taken for the seventh after it"
    assert "c000" in worst
    assert "c299" in best
    assert "median 3" in ranked
    assert "Confusion matrix" not in text


@pytest.mark.parametrize("side", [8, 300, 2000])
def test_pictures_are_bounded(side: int) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (side, side + 5, 3), dtype=np.uint8)
    mime, content, small = thumbnail(png(noise))
    shown = Image.open(io.BytesIO(content))
    assert len(content) <= MAX_PICTURE_BYTES
    assert max(shown.size) <= 144
    assert small == (side == 8)
    assert mime == ("image/png" if small else "image/jpeg")


def test_a_picture_that_cannot_be_decoded_is_a_box(digits_run: DigitsRun, run: Path, tmp_path: Path) -> None:
    shutil.copytree(digits_run.shard_set, tmp_path / "shards")
    tar = tmp_path / "shards" / "train" / "shard-00000-of-00001.tar"
    tar.write_bytes(bytes(tar.stat().st_size))
    page = build_report(run, tmp_path / "shards").read_text()
    assert build_report(run, digits_run.shard_set).read_text().count('class="noimage"') == 0
    assert page.count('class="noimage"') >= 18, "samples of the training images"
    assert "Confusion matrix" in page


def test_markup_escapes_text_and_attributes() -> None:
    assert tag("p", "<&>", title='"<') == '<p title="&quot;&lt;">&lt;&amp;&gt;</p>'
    assert tag("g", tag("i"), None, ["a", tag("b", 1.5)]) == "<g><i></i>a<b>1.5</b></g>"
    assert printable(b"caf\xc3\xa9 \xff\x07") == "caf\u00e9 \\xff\\x07"


def test_phases_target_and_hardware_are_shown(digits_run: DigitsRun, run: Path) -> None:
    config = loads((run / "config.yaml").read_text(), overrides=["train.phases=[{start: 4, weight_decay: 0.001}]"])
    (run / "config.yaml").write_text(dumps(config))
    with EventLog(run / "metrics.jsonl") as events:
        events.event("resumed", step=1, ranks=2, device="a test machine")
        events.event("target_reached", step=90, epoch=2.5, top1=0.9123)
    text = page_text(run, digits_run.shard_set, " ")
    assert "Weight decay" in text
    assert "Momentum" not in text, "it does not change"
    assert re.search("epoch 2.5 [a-z]+ 91.23\u202f%", text)
    assert "2 x a test machine" in text
    shutil.copytree(digits_run.path, run.with_name("unchanged"))
    plain = page_text(run.with_name("unchanged"), digits_run.shard_set, " ")
    assert "Weight decay" not in plain
    assert "91.23" not in plain
    assert "2 x " not in plain
