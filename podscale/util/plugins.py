"""Plug-ins: entry points of installed distributions that add models, sources, optimizers and augmentations by name."""

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from podscale.errors import InputError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

PREFIX = "plugin:"
"""Prefix of a plug-in's name in a run document."""
NAME_PATTERN = r"plugin:[A-Za-z0-9][A-Za-z0-9_.\-]*"
"""Regular expression of a plug-in's name in a run document."""
CALLABLE_PATTERN = r"python:[A-Za-z_][\w.]*:[A-Za-z_][\w.]*"
"""Regular expression of the name of a callable, `python:MODULE:CALLABLE`, in a run document."""


@dataclass(frozen=True)
class Plugin:
    """Entry point `name` in a group such as `podscale.models`, of an installed distribution."""

    group: str
    name: str
    distribution: str
    version: str
    entry: "EntryPoint"

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"

    def load(self, field: str) -> Callable[..., Any]:
        """Import the callable; raises InputError with the distribution if that fails. `field` is the option."""
        try:
            found = self.entry.load()
        except Exception as error:
            reason = next(iter(str(error).splitlines()), "")
            raise InputError(
                f"the plug-in of {self} cannot be imported from {self.entry.value}: {type(error).__name__}: {reason}",
                field=field,
                got=f"{PREFIX}{self.name}",
                hint=f"Repair or upgrade {self.distribution}, for example with `pip install --upgrade "
                f"{self.distribution}`",
            ) from error
        if not callable(found):
            problem = f"{self.entry.value} of {self} is not callable"
            raise InputError(problem, field=field, got=f"{PREFIX}{self.name}")
        factory: Callable[..., Any] = found
        return factory


@dataclass(frozen=True)
class NamedCallable:
    """Callable of an importable module, `python:MODULE:CALLABLE` in a run document."""

    value: str

    def __str__(self) -> str:
        return self.value

    def load(self, field: str) -> Callable[..., Any]:
        """Import the callable; raises InputError if that fails. `field` is the option."""
        _, module, path = self.value.split(":")
        try:
            found: Any = import_module(module)
            for part in path.split("."):
                found = getattr(found, part)
        except Exception as error:
            problem = f"cannot be imported: {type(error).__name__}: {error}"
            hint = "Name the folder of your code in launch.code, or install it where the run trains."
            raise InputError(problem, field=field, got=self.value, hint=hint) from error
        if not callable(found):
            raise InputError("not callable", field=field, got=self.value)
        factory: Callable[..., Any] = found
        return factory


def find_factory(group: str, value: str, field: str) -> "Plugin | NamedCallable":
    """Return the plug-in or callable that an option names; raises InputError for a plug-in that is not installed."""
    name = plugin_name(value)
    return find_plugin(group, name, field) if name is not None else NamedCallable(value)


def plugin_name(value: str) -> str | None:
    """Return the name of a plug-in in an option's value; None for another value."""
    return value.removeprefix(PREFIX) if value.startswith(PREFIX) else None


def is_from_elsewhere(value: str) -> bool:
    """Return True for the name of a plug-in or of a callable."""
    return value.startswith((PREFIX, "python:"))


def find_plugin(group: str, name: str, field: str) -> Plugin:
    """Return an installed plug-in; raises InputError with a similar name if there is none.

    Args:
        group: group of entry points.
        name: name of the entry point, without prefix.
        field: option of the run document, for the error.
    """
    plugins = [plugin for plugin in installed_plugins(group) if plugin.name == name]
    if len(plugins) > 1:
        owners = " and ".join(sorted(map(str, plugins)))
        raise InputError(f"{owners} both have it", field=field, got=f"{PREFIX}{name}", hint="Uninstall one of them.")
    if plugins:
        return plugins[0]
    known = sorted({plugin.name for plugin in installed_plugins(group)})
    similar = difflib.get_close_matches(name, known, 1, 0.6)
    hint = f"Did you mean {PREFIX}{similar[0]}?" if similar else f"Installed: {', '.join(known) or 'none'}."
    raise InputError(f"no installed plug-in of the group {group}", field=field, got=f"{PREFIX}{name}", hint=hint)


@cache
def installed_plugins(group: str) -> tuple[Plugin, ...]:
    """Return the plug-ins of a group, without importing them."""
    from importlib.metadata import entry_points  # takes 20 ms, which documents without plug-ins need not

    found = ((entry, entry.dist) for entry in entry_points(group=group))
    return tuple(Plugin(group, entry.name, dist.name, dist.version, entry) for entry, dist in found if dist is not None)


def call_plugin(
    plugin: Plugin | NamedCallable, field: str, *arguments: Any, options: Mapping[str, Any], options_field: str
) -> Any:
    """Load a plug-in and call it with arguments and options; raises InputError for options that it does not take."""
    factory = plugin.load(field)
    try:
        inspect.signature(factory).bind(*arguments, **options)
    except TypeError as error:
        known = list(inspect.signature(factory).parameters)[len(arguments) :]
        wrong = next((name for name in options if name not in known), None)
        similar = difflib.get_close_matches(wrong or "", known, 1, 0.6)
        hint = f"Did you mean {similar[0]}?" if similar else f"It has {', '.join(known) or 'no options'}."
        raise InputError(f"{plugin}: {error}", field=options_field, got=dict(options), hint=hint) from error
    return factory(*arguments, **options)
