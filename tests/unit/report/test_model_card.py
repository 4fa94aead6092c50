"""The model card: figures, limits and how to load, with class names that try to break out of Markdown."""

import json
import re
from pathlib import Path

import yaml
from safetensors.numpy import load_file

from podscale.evaluation.evaluation_json import read_evaluation
from podscale.report.model_card import escape_markdown, write_model_card
from tests.support.digits_run import DIGITS, DigitsRun, make_digits_run


def test_the_card_says_what_the_evaluation_says(digits_run: DigitsRun, run: Path) -> None:
    card = write_model_card(run, digits_run.shard_set).read_text()
    found = read_evaluation(run / "evaluation.json")
    assert f"| top-1 accuracy | {100 * found.scores.top1:.2f}\u202f%" in card
    assert f"`{found.identity.model_sha256}`" in card
    assert "1437 train, 360 validation" in card
    for claimed in ("97.00\u202f%", "2 min 00 s", "one laptop core, this test"):
        assert f"claimed | {claimed} |" in re.sub(r"\| [a-z0-9 -]*claimed[a-z ]*\|", "claimed |", card)
    sections = dict(part.split("\n", 1) for part in card.split("## ")[1:])
    assert list(sections) == ["Scores", "Limits", "Data", "Recipe", "Use"]
    assert "Licence" in sections["Data"]
    weakest = min(found.per_class, key=lambda entry: entry.accuracy or 0)
    assert "bilinear" in card
    assert f"Weakest classes: {weakest.name} (" in card


def test_its_loading_example_works(digits_run: DigitsRun, run: Path) -> None:
    path = write_model_card(run, digits_run.shard_set)
    example = path.read_text().split("```python\n")[1].split("```")[0]
    example = example.replace('"model.', f'"{path.parent}/model.')
    found: dict[str, object] = {}
    exec(example, found)
    assert found["weights"].keys() == load_file(path.parent / "model.safetensors").keys()  # type: ignore[attr-defined]
    assert found["description"]["classes"] == DIGITS  # type: ignore[index]


def test_a_model_that_was_not_evaluated_says_so(run: Path) -> None:
    (run / "evaluation.json").unlink()
    card = write_model_card(run, None).read_text()
    scores = card.partition("## Scores")[2].partition("\n## ")[0]
    assert "evaluation.json" in scores
    assert "|" not in scores, "no table"


def test_class_names_cannot_break_the_markdown(tmp_path: Path) -> None:
    names = [*DIGITS[:8], "a|b\n## Head", "<script>x</script>"]
    run = make_digits_run(tmp_path, names)
    card = write_model_card(run.path, run.shard_set).read_text()
    assert "<script>" not in card
    assert "\n## Head" not in card
    assert "a\\|b\\\\n\\#\\# Head" in card or "a\\|b\\n\\#\\# Head" in card


def test_inline_text_is_literal() -> None:
    assert escape_markdown("*[x](y)*") == "\\*\\[x\\](y)\\*"


def test_the_card_names_the_initial_weights_and_what_was_not_trained(digits_run: DigitsRun, run: Path) -> None:
    description = json.loads((run / "model" / "model.json").read_text())
    origin = {"source": "a*b.pth", "sha256": "5" * 64, "loaded": 7, "head": "replaced", "skipped": ["fc.bias"]}
    description.setdefault("training", {})["started_from"] = {**origin, "initialised": ["fc.bias"]}
    (run / "model" / "model.json").write_text(json.dumps(description))
    path = run / "config.yaml"
    values = yaml.safe_load(path.read_text())
    values["train"] = {**values.get("train", {}), "freeze": ["layer1.*"], "layer_decay": 0.5}
    path.write_text(yaml.safe_dump(values))
    card = write_model_card(run, digits_run.shard_set).read_text()
    for text in ("a\\*b.pth", "5" * 64, "7 arrays", "fc.bias", "layer1.\\*", "0.5"):
        assert text in card, text
