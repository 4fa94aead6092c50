"""Names of models in a run document: our catalogue, torchvision's, timm's, plug-ins, and the user's own code."""

import difflib
import re
from typing import NamedTuple

from podscale.util.plugins import CALLABLE_PATTERN, NAME_PATTERN

CATALOGUE_NAMES = (
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnet20",
    "resnet32",
    "resnet44",
    "resnet56",
    "resnet110",
    "inception_v3",
    "inception_resnet_v2",
    "alexnet",
)
"""Names of Podscale's own networks (docs/reference/models.md)."""
LIBRARIES = ("torchvision", "timm", "python", "plugin")
"""Prefixes of models from elsewhere."""
EXTERNAL_PATTERN = rf"^(torchvision:[A-Za-z0-9_]+|timm:[A-Za-z0-9_.\-]+|{CALLABLE_PATTERN}|{NAME_PATTERN})$"
EXTERNAL_FORMS = "torchvision:NAME, timm:NAME, python:MODULE:CALLABLE or plugin:NAME"


class ModelSource(NamedTuple):
    """Origin of a model from elsewhere; `name` is the name in the library, or MODULE:CALLABLE."""

    library: str
    name: str


def model_source(name: str) -> ModelSource | None:
    """Return the library of a model's name and its name there; None for our catalogue."""
    library, colon, rest = name.partition(":")
    return ModelSource(library, rest) if colon else None


def is_model_name(name: str) -> bool:
    """Return True for a name of the catalogue or a well-formed name of a model from elsewhere."""
    return name in CATALOGUE_NAMES or re.fullmatch(EXTERNAL_PATTERN, name) is not None


def suggest_model_name(name: str) -> str:
    """Return the hint for an unknown name: similar names of the catalogue, and the forms of models from elsewhere."""
    library, colon, rest = name.partition(":")
    if colon and library not in LIBRARIES and (similar := difflib.get_close_matches(library, LIBRARIES, 1, 0.5)):
        return f"Did you mean {similar[0]}:{rest}?"
    if colon and library in LIBRARIES:
        return f"Write {EXTERNAL_FORMS}."
    similar = difflib.get_close_matches(name, CATALOGUE_NAMES, 1, 0.75)
    if similar:
        return f"Did you mean {similar[0]}?"
    advice = f"The catalogue has {', '.join(CATALOGUE_NAMES)}. Models from elsewhere are named {EXTERNAL_FORMS}"
    return f"{advice}, for example torchvision:{name}." if name.isidentifier() else f"{advice}."


def model_name_schema() -> dict[str, object]:
    """Return the JSON schema of `model.name`."""
    return {"anyOf": [{"enum": list(CATALOGUE_NAMES)}, {"pattern": EXTERNAL_PATTERN}], "type": "string"}
