"""Code from elsewhere in a run: plug-ins that its options name, with their distributions, and the user's own code."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from podscale.config.run_config import RunConfig
from podscale.errors import InputError
from podscale.util.code_archive import pack_code
from podscale.util.plugins import find_plugin, plugin_name

GROUPS = {
    "model.name": "podscale.models",
    "data.format": "podscale.sources",
    "train.optimizer.name": "podscale.optimizers",
    "input.augment.policy": "podscale.augmentations",
}
"""Groups of entry points, by the option that names one."""


class NamedPlugin(NamedTuple):
    """Plug-in that a document names: its option, the group of entry points and the entry point."""

    option: str
    group: str
    name: str

    @property
    def key(self) -> str:
        """Key in run.plugins."""
        return f"{self.group}:{self.name}"


def named_plugins(config: RunConfig) -> Iterator[NamedPlugin]:
    """Yield the plug-ins that a document names."""
    for option, group in GROUPS.items():
        value: Any = config
        for part in option.split("."):
            value = getattr(value, part)
        if (name := plugin_name(value)) is not None:
            yield NamedPlugin(option, group, name)


def record_plugins(config: RunConfig) -> RunConfig:
    """Return the document with the distribution of each plug-in in run.plugins; one that is recorded stays.

    Raises InputError for a plug-in that is neither recorded nor installed.
    """
    recorded = dict(config.run.plugins)
    plugins = {
        named.key: recorded.get(named.key) or str(find_plugin(named.group, named.name, named.option))
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
            found = find_plugin(named.group, named.name, named.option)
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
