"""Search space of a study for an optimizer such as Katib: its parameters, and the study of one choice of them.

The parameters are the variant, each option of the grid, and a factor on the learning rate in place of its sweep.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from podscale.errors import InputError
from podscale.study.document import StudyDocument
from podscale.study.grid import TrialGrid
from podscale.study.sections import RateSection, SweepSection
from podscale.study.sweep_series import round_rate

VARIANT, RATE_FACTOR = "variant", "rate_factor"
"""Parameters besides the options of the grid."""
QUOTES = frozenset('"\\')
"""Characters that would end a JSON text, in which optimizers replace values."""


@dataclass(frozen=True)
class SearchParameter:
    """One parameter.

    Args:
        name: `variant`, `rate_factor`, or an option of the grid.
        values: Its values as text, by which a trial finds the value of the document.
        has_order: True for numbers.
    """

    name: str
    values: tuple[str, ...]
    has_order: bool = False


def search_space(study: StudyDocument) -> list[SearchParameter]:
    """Return the parameters of a study. Raises InputError if one optimizer cannot choose all of them for each trial."""
    _check_independent(study)
    TrialGrid(study)  # raises if a trial is not a valid run
    parameters = []
    if len(study.variants) > 1:
        names = tuple(_as_text(VARIANT, variant.name) for variant in study.variants)
        parameters.append(SearchParameter(VARIANT, names))
    for option, values in study.grid.items():
        texts = tuple(_as_text(f"grid.{option}", value) for value in values)
        parameters.append(SearchParameter(option, texts, has_order=all(map(_is_number, values))))
    if (sweep := _sweep(study)) is not None:
        parameters.append(SearchParameter(RATE_FACTOR, tuple(map(str, sweep.factors)), has_order=True))
    if not parameters:
        hint = "Add a grid, or a sweep of the learning rate; or train the run itself with `podscale submit`."
        raise InputError("has one variant and no grid, so there is nothing to choose", field="grid", hint=hint)
    return parameters


def count_choices(parameters: list[SearchParameter]) -> int:
    """Return the number of combinations."""
    return math.prod(len(parameter.values) for parameter in parameters)


def narrow_study(study: StudyDocument, choice: Mapping[str, str]) -> StudyDocument:
    """Return the study of one choice: one variant at one point and one learning rate, with every seed.

    Its trials are those of the whole study, so both share their records. Raises InputError for an unknown value.
    """
    variant = study.variant(_find(VARIANT, [entry.name for entry in study.variants], choice))
    grid = {option: (_find(option, list(values), choice),) for option, values in study.grid.items()}
    base = study.model_copy(update={"variants": (variant,), "grid": grid, "criteria": ()})
    rate = TrialGrid(base).series[0].rate_from_rule(lambda key: None)
    if rate is None:
        return base
    chosen = RateSection(at=round_rate(rate * float(choice.get(RATE_FACTOR, "1"))))
    variant = variant.model_copy(update={"learning_rate": chosen})
    return base.model_copy(update={"variants": (variant,)})


def _check_independent(study: StudyDocument) -> None:
    """Raise InputError if a trial depends on the results of others."""
    if study.choose != "accuracy":
        problem, hint = "Katib compares the accuracy of trials", "Use --backend kfp, or set choose=accuracy."
        raise InputError(problem, field="choose", got=study.choose, hint=hint)
    for variant in study.variants:
        if variant.start_from is not None:
            problem = f"{variant.name} starts from the model of another trial, and Katib's are independent"
            raise InputError(problem, field="start_from", got=variant.start_from, hint="Use --backend kfp.")
        if variant.search or variant.search_of is not None:
            problem = f"the options of {variant.name} follow from trials of its selection, and Katib's are independent"
            hint = "Use --backend kfp, or make the values a grid."
            raise InputError(problem, field="search", hint=hint)
        section = study.rate_of(variant)
        if section is not None and isinstance(section.at, str):
            hint = "Give its rate as a number, a rule or a table, or use --backend kfp."
            problem = f"{variant.name} uses the rate that another variant's trials choose, and Katib's are independent"
            raise InputError(problem, field="learning_rate.at", got=section.at, hint=hint)


def _sweep(study: StudyDocument) -> SweepSection | None:
    """Return the sweep of all variants. Raises InputError if they differ."""
    sections = [study.rate_of(variant) for variant in study.variants]
    sweeps = [section.sweep if section is not None else None for section in sections]
    if any(sweep != sweeps[0] for sweep in sweeps):
        hint = "Give all variants the same sweep, or use --backend kfp."
        raise InputError("the variants have different sweeps", field="learning_rate.sweep", hint=hint)
    return sweeps[0]


def _find(name: str, values: list[Any], choice: Mapping[str, str]) -> Any:
    """Return the value whose text was chosen; the only one without a choice."""
    texts = {_as_text(name, value): value for value in values}
    if name not in choice and len(values) == 1:
        return values[0]
    if choice.get(name) not in texts:
        problem = "no such value of the study"
        raise InputError(problem, field=name, got=choice.get(name), hint=f"It has: {', '.join(texts)}")
    return texts[choice[name]]


def _as_text(field: str, value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    if QUOTES & set(text) or "\n" in text:
        hint = "Make it a variant with a short name, or use --backend kfp."
        raise InputError(
            "Katib replaces parameters in JSON, so they must have no quotes", field=field, got=text, hint=hint
        )
    return text


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
