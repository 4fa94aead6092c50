"""Run document with its recipe filled in and its sections checked against each other."""

from typing import Any

from pydantic import model_validator

from podscale.config.checks import check_sections
from podscale.config.ensemble import fill_cycles
from podscale.config.recipes import fill_recipe
from podscale.config.run import RunDocument


class RunConfig(RunDocument):
    """One run, from images to report."""

    @model_validator(mode="before")
    @classmethod
    def _fill_open_options(cls, values: Any) -> Any:
        return fill_cycles(fill_recipe(values))

    @model_validator(mode="after")
    def _check_sections(self) -> "RunConfig":
        check_sections(self)
        return self
