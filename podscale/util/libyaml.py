"""Safe YAML loader and dumper of libyaml, four times as fast as PyYAML's own, which are used if it lacks libyaml."""

from typing import TYPE_CHECKING

import yaml

if TYPE_CHECKING:
    from yaml import SafeDumper, SafeLoader
else:
    SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    SafeDumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

__all__ = ["SafeDumper", "SafeLoader"]
