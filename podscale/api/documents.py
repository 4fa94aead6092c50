"""Run documents from what a user names: a path, a preset, values, or the document of the environment."""

import json
import os
from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import Path, PurePosixPath
from typing import Any

from podscale.api.results import Run
from podscale.config import Defaults, RunConfig
from podscale.config import load as load_file
from podscale.config.document import Overrides, format_overrides, is_set, loads, peek, plain_value, read_text
from podscale.config.yaml_reader import dump_yaml
from podscale.pipelines import presets
from podscale.pipelines.presets import CHART_CLAIM, CHART_WORKSPACE, CLUSTER_DEFAULTS
from podscale.util import env

Document = str | PathLike[str] | Mapping[str, Any] | RunConfig | Run
"""Run document: a path, the name of a preset, values by section, or the document of another call."""


def load(document: Document | None = None, **overrides: Any) -> RunConfig:
    """Load a run document and change some of its options.

        config = podscale.load("digits", train={"epochs": 5}, run={"workspace": "work"})
        config = podscale.load(config, **{"train.epochs": 5})

    Args:
        document: path, name of a preset, values by section, or a loaded document; None: the document of the
            environment (in pods), else the preset `digits`.
        overrides: options by section, or by dotted name.

    Raises:
        InputError: The document cannot be read, or has an unknown key or a wrong value.
    """
    return load_document(document, overrides)


def load_document(document: Document | None, changes: Overrides = (), defaults: Defaults | None = None) -> RunConfig:
    """Load a run document over `defaults`, with changes as `a.b=c` texts or as values."""
    if isinstance(document, RunConfig | Run) and not changes and defaults is None:
        return document if isinstance(document, RunConfig) else document.config
    if is_in_environment(document):
        return loads(os.environ[env.RUN_DOCUMENT], env.RUN_DOCUMENT, changes, defaults)
    source = _source_of(document)
    if isinstance(source, Path):
        return load_file(source, changes, defaults)
    return loads(dump_yaml(source), "document", changes, defaults)


def is_in_environment(document: Document | None) -> bool:
    """Return True if the document is that of the environment, as in pods."""
    return document is None and env.RUN_DOCUMENT in os.environ


def _source_of(document: Document | None) -> Path | dict[str, Any]:
    """Return the file or the values of a document; of a loaded one, the values that are not defaults."""
    if isinstance(document, Run):
        document = document.config
    if isinstance(document, RunConfig):
        return document.model_dump(mode="json", exclude_unset=True)
    if isinstance(document, Mapping):
        return {str(name): plain_value(value) for name, value in document.items()}
    path: Path = presets.resolve_preset(None if document is None else fspath(document))
    return path


def load_with_defaults(
    document: Document | None, changes: Overrides, defaults: str | None, *, namespace: str | None = None
) -> RunConfig:
    """Load a run document over defaults: a file, or CLUSTER_DEFAULTS.

    `namespace` is that of the defaults; None for the document's. Raises NoDefaults if the namespace has none, or they
    may not be read, and the document does not name its workspace itself.
    """
    return load_document(document, changes, _load_defaults(document, changes, defaults, namespace))


def load_for_cluster(document: Document | None, changes: Overrides, defaults: str | None) -> tuple[RunConfig, str]:
    """Load a run document for pods; return with it a YAML comment on what was assumed.

    Without defaults, the chart's workspace holds for what neither the document nor the changes say.
    """
    if defaults is not None or is_in_environment(document):
        return load_with_defaults(document, changes, defaults), ""
    assumed = _assumed_workspace(document, changes)
    loaded = load_document(document, changes, Defaults(json.dumps(assumed), "the chart's defaults"))
    if not assumed:
        return loaded, ""
    settings = " ".join(f"--set {setting}" for setting in format_overrides(assumed)).replace('"', "")
    return loaded, (
        f"# Assumed (the chart's defaults): {settings}\n"
        "# Set what is different, or read the settings of the namespace with --defaults cluster.\n"
    )


def _assumed_workspace(document: Document | None, changes: Overrides) -> dict[str, dict[str, Any]]:
    """Return the chart's workspace path and claim, as far as a document leaves them open."""
    source, assumed = _source_of(document), dict[str, dict[str, Any]]()
    if not is_set(source, "run.workspace", changes):
        assumed["run"] = {"workspace": CHART_WORKSPACE}
    workspace = PurePosixPath(str(peek(source, "run.workspace", changes) or CHART_WORKSPACE))
    volumes = peek(source, "launch.cluster.volumes", changes)
    paths = [volume.get("path") for volume in volumes if isinstance(volume, dict)] if isinstance(volumes, list) else []
    is_mounted = any(workspace.is_relative_to(str(mount)) for mount in paths)
    if not (is_mounted or is_set(source, "launch.cluster.workspace_claim", changes)):
        assumed["launch"] = {"cluster": {"workspace_claim": CHART_CLAIM}}
    return assumed


def _load_defaults(
    document: Document | None, changes: Overrides, location: str | None, namespace: str | None
) -> Defaults | None:
    if location != CLUSTER_DEFAULTS:
        return read_defaults(location)
    from podscale.kubernetes.namespace import NoDefaults

    source = _source_of(document)
    named, context = (peek(source, f"launch.cluster.{name}", changes) for name in ("namespace", "context"))
    try:
        return read_defaults(location, namespace or named, context)
    except NoDefaults:
        if not is_in_environment(document) and _assumed_workspace(document, changes):
            raise
        return None


def read_defaults(location: str | None, namespace: str | None = None, context: str | None = None) -> Defaults | None:
    """Return the defaults of a file, or those of a namespace. Raises NoDefaults if the namespace has none."""
    if location is None:
        return None
    if location != CLUSTER_DEFAULTS:
        return Defaults(read_text(Path(location)), location)
    from podscale.kubernetes.client import connect_cluster
    from podscale.kubernetes.namespace import read_cluster_defaults
    from podscale.kubernetes.transport import NamedCluster

    return read_cluster_defaults(connect_cluster(NamedCluster(namespace, context)))
