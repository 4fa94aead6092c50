"""A recipe put into a document before it is checked: what the person wrote stands, the rest is filled in."""

from copy import deepcopy
from typing import Any

from podscale import recipes
from podscale.config.conflict import conflict_error

RECIPE_ORIGIN_KEY = "train.recipe_origin"


def fill_recipe(values: Any) -> Any:
    """The raw values of a document with those of its recipe, if it names one, wherever an option is not given.

    A resolved document gives every option, so it comes back as it is. Raises PydanticCustomError for an unknown recipe
    and for a batch outside its table; values of wrong types are left for the model to refuse.
    """
    name = _get_key(values, "train.recipe")
    if name is None:
        return values
    batch = _get_key(values, "train.global_batch", 256)
    if not isinstance(name, str) or not isinstance(batch, int):
        return values
    try:
        setting = recipes.recipe_values(name, batch)
    except recipes.RecipeError as error:
        raise conflict_error(error.key, error.problem, got=error.got, hint=error.hint) from None
    given_optimizer = _get_key(values, "train.optimizer.name", "lars")
    if given_optimizer != "lars":
        raise conflict_error(
            "train.optimizer.name",
            f"train.recipe={name} is for lars",
            got=given_optimizer,
            hint="Leave one of them out.",
        )
    filled = deepcopy(values)
    given_group = _get_key(values, "model.batch_norm.group") is not None  # says the same as a span in another way
    skipped = {"model.batch_norm.span"} if given_group else set()
    for key, value in {**setting.values, RECIPE_ORIGIN_KEY: setting.origin}.items():
        if key not in skipped:
            set_if_absent(filled, key, value)
    return filled


def _get_key(values: Any, key: str, default: Any = None) -> Any:
    """The value of a dotted key, or the default where it is not given."""
    for part in key.split("."):
        if not isinstance(values, dict) or part not in values:
            return default
        values = values[part]
    return values


def set_if_absent(values: dict[str, Any], key: str, value: Any) -> None:
    """Sets a dotted key unless it is given; a section that is no mapping is left for the model to refuse."""
    *parents, last = key.split(".")
    for parent in parents:
        inner = values.setdefault(parent, {})
        if not isinstance(inner, dict):
            return
        values = inner
    values.setdefault(last, value)
