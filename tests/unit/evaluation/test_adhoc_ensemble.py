"""Run documents of models that are evaluated together outside of a run directory."""

import json
from pathlib import Path
from typing import Any

import pytest

from podscale.config import RunConfig
from podscale.evaluation.adhoc_ensemble import adhoc_ensemble_document
from podscale.runs.ensemble_members import MODEL_JSON
from podscale.runs.model_files import preprocessing_of

INPUT: dict[str, Any] = {"image_size": 40, "interpolation": "bicubic", "per_image_standardization": True}
TRAINED = RunConfig.model_validate({"input": INPUT, "evaluate": {"crop_fraction": 1.0}})


def models(directory: Path, without: tuple[str, ...] = ()) -> list[str]:
    """Write two models and return their directories."""
    preprocessing = {key: value for key, value in preprocessing_of(TRAINED).items() if key not in without}
    description = {
        "run": "r",
        "architecture": TRAINED.model.model_dump(mode="json"),
        "classes": ["ant", "bee"],
        "training": {},
        "preprocessing": preprocessing,
    }
    for name in ("one", "two"):
        (directory / name).mkdir()
        (directory / name / MODEL_JSON).write_text(json.dumps(description))
    return [str(directory / name) for name in ("one", "two")]


def test_images_are_prepared_as_in_the_training(tmp_path: Path) -> None:
    document = adhoc_ensemble_document(models(tmp_path), [], "shards")
    assert preprocessing_of(document) == preprocessing_of(TRAINED)


def test_a_model_trained_with_random_filters_is_evaluated_with_the_bicubic_one() -> None:
    document = RunConfig.model_validate({"input": {"interpolation": "random"}})
    assert preprocessing_of(document)["interpolation"] == "bicubic"


@pytest.mark.parametrize("option", ["interpolation", "per_image_standardization"])
def test_an_option_that_an_older_model_does_not_name_has_its_default(option: str, tmp_path: Path) -> None:
    document = adhoc_ensemble_document(models(tmp_path, (option,)), [], "shards")
    want = {**preprocessing_of(TRAINED), option: preprocessing_of(RunConfig())[option]}
    assert preprocessing_of(document) == want
