"""Values of an option that takes one of several names, or a plug-in."""

import difflib
import re
from collections.abc import Sequence

from podscale.config.fields import conflict_error
from podscale.util.plugins import PATTERN, PREFIX


def choice_schema(names: Sequence[str]) -> dict[str, object]:
    """Return the JSON schema of such an option."""
    return {"anyOf": [{"enum": list(names)}, {"pattern": PATTERN}], "type": "string"}


def check_choice(key: str, value: str, names: Sequence[str]) -> None:
    """Raise a conflict error if a value is neither one of the names nor the well-formed name of a plug-in."""
    if value in names or re.fullmatch(PATTERN, value):
        return
    similar = difflib.get_close_matches(value, names, 1, 0.6)
    hint = f"Did you mean {similar[0]}?" if similar else f"Choose one of {', '.join(names)}, or {PREFIX}NAME."
    raise conflict_error(key, "unknown", got=value, hint=hint)


def check_plugin_options(value: str, options: object) -> None:
    """Raise a conflict error if options of a plug-in are set without one."""
    if options and not value.startswith(PREFIX):
        raise conflict_error("options", f"only for a plug-in, not for {value}", got=options, hint="Leave it out.")
