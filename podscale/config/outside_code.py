"""Code from elsewhere in a run: plug-ins that its options name, with their distributions, and the user's own code."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from podscale.config.run_config import RunConfig
from podscale.errors import InputError
from podscale.util.code_archive import pack_code
from podscale.util.plugins import GROUPS, find_plugin, plugin_name


class NamedPlugin(NamedTuple):
    """Plug-in that an option of a document names."""

    option: str
    name: str

    @property
    def key(self) -> str:
        """Key in run.plugins."""
        return f"{GROUPS[self.option]}:{self.name}"


def named_plugins(config: RunConfig) -> Iterator[NamedPlugin]:
    """Yield the plug-ins that a document names."""
    for option in GROUPS:
        value: Any = config
        for part in option.split("."):
            value = getattr(value, part)
        if (name := plugin_name(value)) is not None:
            yield NamedPlugin(option, name)


def record_plugins(config: RunConfig) -> RunConfig:
    """Return the document with the distribution of each plug-in in run.plugins; one that is recorded stays.

    Raises InputError for a plug-in that is neither recorded nor installed.
    """
    recorded = dict(config.run.plugins)
    plugins = {
        named.key: recorded.get(named.key) or str(find_plugin(named.option, named.name))
        for named in named_plugins(config)
    }
    if plugins == recorded:
        return config
    return config.model_copy(update={"run": config.run.model_copy(update={"plugins": plugins})})


def record_code(config: RunConfig, *, anew: bool = False) -> RunConfig:
    """Return the document with the hash of the code in launch.code; one that is recorded stays.

    Args:
        anew: replace a recorded hash, too, if the folder exists.
    """
    if config.launch.code is None or (config.run.code is not None and not (anew and Path(config.launch.code).is_dir())):
        return config
    run = config.run.model_copy(update={"code": pack_code(Path(config.launch.code)).sha256})
    launch = config.launch.model_copy(update={"code_bundle": None}) if config.launch.code_bundle else config.launch
    return config.model_copy(update={"run": run, "launch": launch})


def plugin_problems(config: RunConfig) -> Iterator[InputError]:
    """Yield an error for each plug-in that is not installed here, or in another version than the run's."""
    for named in named_plugins(config):
        try:
            found = find_plugin(named.option, named.name)
        except InputError as error:
            yield error
            continue
        recorded = config.run.plugins.get(named.key, str(found))
        if recorded != str(found):
            yield InputError(
                f"the run has {recorded}, and {found} is installed here",
                field=named.option,
                hint="Install that version, or give the new run another run.id.",
            )
