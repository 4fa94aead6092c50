"""Commands about run documents: show one resolved, compile one, list the presets."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from podscale import config
from podscale.config import RunConfig
from podscale.config.preflight import find_problems
from podscale.errors import InputError
from podscale.pipelines import presets


def load(document: str | None, changes: Sequence[str]) -> RunConfig:
    """The run document that a person named, with the changes of the command line; tells what a recipe filled in."""
    resolved = config.load(presets.resolve(document), changes)
    if resolved.train.recipe_origin:
        print(f"recipe {resolved.train.recipe_origin}", file=sys.stderr)
    return resolved


def show(
    document: str | None, changes: Sequence[str], *, as_json: bool, schema: bool, plot: bool, svg: Path | None
) -> None:
    """Prints the resolved document as YAML or JSON, the schema of all documents, or a drawing of its schedules."""
    if schema:
        sys.stdout.write(schema_text())
        return
    resolved = load(document, changes)
    if plot or svg is not None:
        from podscale.commands.plot import plot as drawn

        print(drawn(resolved, svg))
        return
    text = resolved.model_dump_json(indent=2) + "\n" if as_json else config.dumps(resolved)
    sys.stdout.write(text)


def schema_text() -> str:
    """The JSON schema as it is committed: `podscale config --schema > podscale/config/schema.json`."""
    return json.dumps(config.json_schema(), indent=2) + "\n"


def compile_package(document: str | None, changes: Sequence[str], output: Path) -> None:
    """Writes the KFP package of a run document; what would not work on a cluster is told but not refused."""
    resolved = load(document, changes)
    if output.suffix not in (".yaml", ".yml"):
        raise InputError(f"{output}: a pipeline package ends in .yaml")
    if not output.absolute().parent.is_dir():
        raise InputError(f"{output}: the folder does not exist")
    for problem in find_problems(resolved, "cluster"):
        print(f"note: {problem}", file=sys.stderr)
    from podscale.pipelines.package import package

    output.write_text(package(resolved), encoding="utf-8")
    print(f"{output}: the pipeline of run {resolved.run.id}")


def list_presets(*, as_json: bool) -> None:
    """Prints name and first line of each preset."""
    found = {name: presets.claim_line(name) for name in presets.names()}
    if as_json:
        print(json.dumps(found, indent=2))
        return
    width = max(map(len, found))
    for name, line in found.items():
        print(f"{name:<{width}}  {line}")
