"""Commands about run documents: show one resolved, compile one, list the presets."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from podscale import config
from podscale.config import Defaults, RunConfig
from podscale.config.document import peek, read_text
from podscale.config.preflight import find_problems
from podscale.errors import InputError
from podscale.pipelines import presets
from podscale.util import env

CLUSTER_DEFAULTS = "cluster"
"""For `resolved`: the defaults that the chart left in the document's namespace."""


def load_with_defaults(document: str | None, changes: Sequence[str], defaults: str | None) -> RunConfig:
    """As `load`, over the defaults that a person named: those of a file, those FROM_CLUSTER, or None."""
    return load_run_document(document, changes, _load_defaults(document, changes, defaults))


def load_run_document(document: str | None, changes: Sequence[str], defaults: Defaults | None = None) -> RunConfig:
    """The run document that a person named, with the changes of the command line; tells what a recipe filled in.

    Where nobody names one it is the document in the environment, which pods have, else the default preset.
    defaults: what holds where the document says nothing.
    """
    if document is None and env.RUN_DOCUMENT in os.environ:
        return config.loads(os.environ[env.RUN_DOCUMENT], env.RUN_DOCUMENT, changes, defaults)
    found = config.load(presets.resolve_preset(document), changes, defaults)
    if found.train.recipe_origin:
        print(f"recipe {found.train.recipe_origin}", file=sys.stderr)
    return found


def _load_defaults(document: str | None, changes: Sequence[str], named: str | None) -> Defaults | None:
    if named is None:
        return None
    if named != CLUSTER_DEFAULTS:
        return Defaults(read_text(Path(named)), named)
    from podscale.kubernetes.client import connect_cluster
    from podscale.kubernetes.inventory import find_cluster_defaults
    from podscale.kubernetes.transport import NamedCluster

    path = presets.resolve_preset(document)
    choice = NamedCluster(*(peek(path, f"launch.cluster.{name}", changes) for name in ("namespace", "context")))
    return find_cluster_defaults(connect_cluster(choice))


def show_document(
    document: str | None, changes: Sequence[str], *, as_json: bool, schema: bool, plot: bool, svg: Path | None
) -> None:
    """Prints the resolved document as YAML or JSON, the schema of all documents, or a drawing of its schedules."""
    if schema:
        sys.stdout.write(json_schema_text())
        return
    found = load_run_document(document, changes)
    if plot or svg is not None:
        from podscale.commands.plot import plot_schedules as drawn

        print(drawn(found, svg))
        return
    text = found.model_dump_json(indent=2) + "\n" if as_json else config.dumps(found)
    sys.stdout.write(text)


def json_schema_text() -> str:
    """The JSON schema as it is committed: `podscale config --schema > podscale/config/schema.json`."""
    return json.dumps(config.json_schema(), indent=2) + "\n"


def compile_package(
    document: str | None, changes: Sequence[str], output: Path, *, defaults: str | None, kfp: str
) -> None:
    """Writes the KFP package of a run document; what would not work on a cluster is told but not refused."""
    found = load_with_defaults(document, changes, defaults)
    if output.suffix not in (".yaml", ".yml"):
        raise InputError("a pipeline package ends in .yaml", field=str(output))
    if not output.absolute().parent.is_dir():
        raise InputError("the folder does not exist", field=str(output))
    for problem in find_problems(found, "cluster"):
        print(f"note: {problem}", file=sys.stderr)
    from podscale.pipelines.package import package_pipeline

    output.write_text(package_pipeline(found, kfp=kfp), encoding="utf-8")
    print(f"{output}: the pipeline of run {found.run.id}")


def list_presets(*, as_json: bool) -> None:
    """Prints name and first line of each preset."""
    found = {name: presets.preset_summary(name) for name in presets.preset_names()}
    if as_json:
        print(json.dumps(found, indent=2))
        return
    width = max(map(len, found))
    for name, line in found.items():
        print(f"{name:<{width}}  {line}")
