"""Plug-ins: entry points of installed distributions that add models, sources, optimizers and augmentations by name."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from podscale.errors import InputError
from podscale.util.formatting import first_line, suggest_similar

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUPS = {
    "model.name": "podscale.models",
    "data.format": "podscale.sources",
    "train.optimizer.name": "podscale.optimizers",
    "input.augment.policy": "podscale.augmentations",
}
"""Groups of entry points, by the option of the run document that names one."""
PREFIX = "plugin:"
"""Prefix of a plug-in's name in a run document."""
NAME_PATTERN = r"plugin:[A-Za-z0-9][A-Za-z0-9_.\-]*"
"""Regular expression of a plug-in's name in a run document."""
CALLABLE_PATTERN = r"python:[A-Za-z_][\w.]*:[A-Za-z_][\w.]*"
"""Regular expression of the name of a callable, `python:MODULE:CALLABLE`, in a run document."""


@dataclass(frozen=True)
class Plugin:
    """Entry point `name` of an installed distribution, in the group of an option."""

    option: str
    name: str
    distribution: str
    version: str
    entry: "EntryPoint"

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"

    def load(self) -> Callable[..., Any]:
        """Import the callable; raises InputError with the distribution if that fails."""
        try:
            found = self.entry.load()
        except Exception as error:
            raise InputError(
                f"the plug-in of {self} cannot be imported from {self.entry.value}: {type(error).__name__}: "
                f"{first_line(error)}",
                field=self.option,
                got=f"{PREFIX}{self.name}",
                hint=f"Repair or upgrade {self.distribution}, for example with `pip install --upgrade "
                f"{self.distribution}`",
            ) from error
        if not callable(found):
            problem = f"{self.entry.value} of {self} is not callable"
            raise InputError(problem, field=self.option, got=f"{PREFIX}{self.name}")
        factory: Callable[..., Any] = found
        return factory


@dataclass(frozen=True)
class NamedCallable:
    """Callable of an importable module, `python:MODULE:CALLABLE` in an option of a run document."""

    option: str
    value: str

    def __str__(self) -> str:
        return self.value

    def load(self) -> Callable[..., Any]:
        """Import the callable; raises InputError if that fails."""
        _, module, path = self.value.split(":")
        try:
            found: Any = import_module(module)
            for part in path.split("."):
                owner, found = found, getattr(found, part, None)
                if found is None:
                    break
        except Exception as error:  # a module may import a name at its first use
            problem = f"the module {module} cannot be imported: {type(error).__name__}: {first_line(error)}"
            hint = "Name its folder in launch.code, install it where the run trains, or add its folder to PYTHONPATH."
            raise InputError(problem, field=self.option, got=self.value, hint=hint) from error
        if found is None:
            hint = suggest_similar(part, dir(owner))
            raise InputError(f"{module} has no {path}", field=self.option, got=self.value, hint=hint)
        if not callable(found):
            raise InputError(f"{path} is not callable", field=self.option, got=self.value)
        factory: Callable[..., Any] = found
        return factory


def find_factory(option: str, value: str) -> Plugin | NamedCallable:
    """Return the plug-in or callable that an option names; raises InputError for a plug-in that is not installed."""
    name = plugin_name(value)
    return find_plugin(option, name) if name is not None else NamedCallable(option, value)


def plugin_name(value: str) -> str | None:
    """Return the name of a plug-in in an option's value; None for another value."""
    return value.removeprefix(PREFIX) if value.startswith(PREFIX) else None


def is_from_elsewhere(value: str) -> bool:
    """Return True for the name of a plug-in or of a callable."""
    return value.startswith((PREFIX, "python:"))


def find_plugin(option: str, name: str) -> Plugin:
    """Return the plug-in of a name, without prefix; raises InputError with a similar name if none is installed."""
    plugins = [plugin for plugin in installed_plugins(option) if plugin.name == name]
    if len(plugins) > 1:
        owners = " and ".join(sorted(map(str, plugins)))
        raise InputError(f"{owners} both have it", field=option, got=f"{PREFIX}{name}", hint="Uninstall one of them.")
    if plugins:
        return plugins[0]
    known = sorted({plugin.name for plugin in installed_plugins(option)})
    hint = suggest_similar(name, known, PREFIX) or f"Installed: {', '.join(known) or 'none'}."
    problem = f"no installed plug-in of the group {GROUPS[option]}"
    raise InputError(problem, field=option, got=f"{PREFIX}{name}", hint=hint)


@cache
def installed_plugins(option: str) -> tuple[Plugin, ...]:
    """Return the plug-ins that an option may name, without importing them."""
    from importlib.metadata import entry_points  # takes 20 ms, which documents without plug-ins need not

    found = ((entry, entry.dist) for entry in entry_points(group=GROUPS[option]))
    return tuple(
        Plugin(option, entry.name, dist.name, dist.version, entry) for entry, dist in found if dist is not None
    )


def call_plugin(plugin: Plugin | NamedCallable, *arguments: Any, options: Mapping[str, Any], options_field: str) -> Any:
    """Load a plug-in and call it with arguments and options; raises InputError for options that it does not take."""
    factory = plugin.load()
    try:
        inspect.signature(factory).bind(*arguments, **options)
    except TypeError as error:
        known = list(inspect.signature(factory).parameters)[len(arguments) :]
        wrong = next((name for name in options if name not in known), None)
        hint = suggest_similar(wrong or "", known) or f"It has {', '.join(known) or 'no options'}."
        raise InputError(f"{plugin}: {error}", field=options_field, got=dict(options), hint=hint) from error
    return factory(*arguments, **options)
