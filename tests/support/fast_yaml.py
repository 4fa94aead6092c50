"""Loader of large YAML texts."""

from typing import Any

import yaml

FastLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Safe loader of libyaml if PyYAML was built with it."""
