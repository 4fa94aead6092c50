"""Values of an option that takes one of several names, or a plug-in."""

import re
from collections.abc import Sequence

from podscale.config.fields import conflict_error
from podscale.util.formatting import suggest_similar
from podscale.util.plugins import CALLABLE_PATTERN, NAME_PATTERN, is_from_elsewhere

PLUGINS = f"^{NAME_PATTERN}$"
"""Regular expression of an option that takes plug-ins."""
PLUGINS_AND_CALLABLES = f"^({NAME_PATTERN}|{CALLABLE_PATTERN})$"
"""Regular expression of an option that takes plug-ins and callables of the user's code."""


def choice_schema(names: Sequence[str], pattern: str = PLUGINS_AND_CALLABLES) -> dict[str, object]:
    """Return the JSON schema of such an option."""
    return {"anyOf": [{"enum": list(names)}, {"pattern": pattern}], "type": "string"}


def check_choice(key: str, value: str, names: Sequence[str], pattern: str = PLUGINS_AND_CALLABLES) -> None:
    """Raise a conflict error if a value is neither one of the names nor a well-formed name from elsewhere."""
    if value in names or re.fullmatch(pattern, value):
        return
    forms = "plugin:NAME" if pattern == PLUGINS else "plugin:NAME, or python:MODULE:CALLABLE"
    hint = suggest_similar(value, names) or f"Choose one of {', '.join(names)}, {forms}."
    raise conflict_error(key, "unknown", got=value, hint=hint)


def check_plugin_options(value: str, options: object) -> None:
    """Raise a conflict error if options of a plug-in are set without one."""
    if options and not is_from_elsewhere(value):
        raise conflict_error(
            "options", f"only for a plug-in or your own code, not for {value}", got=options, hint="Leave it out."
        )
