"""Initial weights of a run: another run, or weights from elsewhere, and what the run does with them."""

import re
from pathlib import PurePath
from typing import Any

from pydantic import GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from podscale.config.fields import Section, conflict_error, result_field

WEIGHT_FILE_SUFFIXES = (".safetensors", ".pt", ".pth")
WEIGHT_SCHEMES = ("hf://", "torchvision:", "timm:")
HUB_PATTERN = re.compile(r"hf://([\w.-]+/[\w.-]+)@([0-9a-f]{40})(?:/(.+))?")
"""hf://OWNER/NAME@COMMIT, with a file of the repository if it is not the only one with weights."""


def names_weights(text: str) -> bool:
    """Return True if a text names weights from elsewhere, not a run."""
    return text.startswith(WEIGHT_SCHEMES) or PurePath(text).suffix in WEIGHT_FILE_SUFFIXES


class StartSection(Section):
    """Initial weights and batch-norm statistics, at step 0 and with empty momentum.

    A text in place of the section is `weights` if it names a file or another source of weights, else `run`.
    """

    run: str | None = result_field(
        None,
        "Run to start from: its id, if it has the same workspace, or its directory. Default: random initial weights.",
    )
    epoch: float | None = result_field(
        None,
        "Epoch of that run, one of its kept checkpoints (checkpoint.snapshots); default: its newest checkpoint.",
        gt=0,
    )
    weights: str | None = result_field(
        None,
        "Weights to start from, instead of a run: a file (.safetensors, .pt or .pth; a pickle is read for tensors "
        "alone), the directory of a model of Podscale, `hf://OWNER/NAME@COMMIT` (extra `hub`), "
        "`torchvision:ENUM.MEMBER`, or `timm:NAME.TAG`.",
    )
    rename: tuple[tuple[str, str], ...] = result_field(
        (),
        "Changes of the names in `weights` before they are compared with the model: pairs of a regular expression and "
        "its replacement, applied to each name in this order.",
    )

    @model_validator(mode="before")
    @classmethod
    def _read_text(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"weights" if names_weights(value) else "run": value}
        return value

    @model_validator(mode="after")
    def _check_start(self) -> "StartSection":
        if self.run is not None and self.weights is not None:
            raise conflict_error("weights", "there is a run to start from, too", got=self.weights, hint="Give one.")
        if self.epoch is not None and self.run is None:
            raise conflict_error("epoch", "needs a run", hint="Set train.start_from.run too.")
        if self.rename and self.weights is None:
            raise conflict_error("rename", "needs weights", hint="Set train.start_from.weights too.")
        for pattern, replacement in self.rename:
            try:
                re.sub(pattern, replacement, "")
            except (re.error, IndexError) as error:
                got = [pattern, replacement]
                raise conflict_error("rename", f"no regular expression and replacement: {error}", got=got) from None
        if self.weights is not None and self.weights.startswith("hf://") and not HUB_PATTERN.fullmatch(self.weights):
            raise conflict_error(
                "weights",
                "names no commit of a repository",
                got=self.weights,
                hint="Write hf://OWNER/NAME@COMMIT with the 40 digits of the commit, and /FILE if it has several.",
            )
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [handler(schema), {"type": "string"}]}
