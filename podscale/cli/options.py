"""Arguments and options that more than one command takes, each written once.

Options that go together: a command takes one dataclass, and the command line takes each of its fields.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer


def complete_run(incomplete: str) -> list[str]:
    """What a shell offers for RUN: presets, run documents here, and folders on the way to others."""
    from podscale.pipelines import presets

    files = [str(path) for path in Path().glob(f"{incomplete}*") if path.suffix in (".yaml", ".yml") or path.is_dir()]
    return [name for name in presets.preset_names() if name.startswith(incomplete)] + files


def complete_option(incomplete: str) -> list[str]:
    """What a shell offers for --set."""
    from podscale.config import option_names

    return [f"{name}=" for name in option_names() if name.startswith(incomplete)]


Run = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        help="Run document: a path or a preset's name (see `podscale presets`).",
        autocompletion=complete_run,
    ),
]
Set = Annotated[
    list[str],
    typer.Option(
        "--set", "-s", metavar="A.B=C", help="Change one option; may be repeated.", autocompletion=complete_option
    ),
]
ShardSetLocation = Annotated[
    str | None,
    typer.Option(metavar="LOCATION", help="Read this shard set (a directory or fsspec URL) instead of the document's."),
]
Kfp = Annotated[str, typer.Option(help="Oldest KFP that must accept the package: 2.15, or 2.16 and newer.")]
_from_defaults = typer.Option(
    "--defaults",
    metavar="FILE|cluster",
    help="Options that hold where the document says nothing; cluster: what the chart left in the namespace.",
)
Defaults = Annotated[str | None, _from_defaults]
ClusterDefaults = Annotated[str, _from_defaults]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Namespace = Annotated[str | None, typer.Option("--namespace", "-n", help="Short for launch.cluster.namespace.")]
Context = Annotated[str | None, typer.Option(help="Short for launch.cluster.context (of the kubeconfig).")]
ClientCertificate = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="PEM file of a certificate, for metrics endpoints that want one (mTLS)."),
]
ClientKey = Annotated[Path | None, typer.Option(metavar="FILE", help="PEM file of that certificate's key.")]


Result = TypeVar("Result")


def expand_option_groups(command: Callable[..., Result]) -> Callable[..., Result]:
    """Puts the fields of each parameter that is a dataclass in its place, so that typer sees options.

    A field is annotated as a parameter of a command would be: Annotated[type, typer.Option(...)], with a default.
    """
    signature = inspect.signature(command)
    groups: dict[str, Any] = {
        name: one.annotation for name, one in signature.parameters.items() if is_dataclass(one.annotation)
    }

    @wraps(command)
    def with_fields(**given: Any) -> Result:
        made = {
            name: group(**{field.name: given.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        return command(**given, **made)

    seen = [one for parameter in signature.parameters.values() for one in _expand_parameter(parameter)]
    with_fields.__signature__ = signature.replace(parameters=seen)  # type: ignore[attr-defined]
    with_fields.__annotations__ = {one.name: one.annotation for one in seen}
    return with_fields


def _expand_parameter(parameter: inspect.Parameter) -> Iterator[inspect.Parameter]:
    if is_dataclass(parameter.annotation):
        for field in fields(parameter.annotation):
            yield parameter.replace(
                name=field.name, kind=parameter.KEYWORD_ONLY, default=_field_default(field), annotation=field.type
            )
    else:
        yield parameter.replace(kind=parameter.KEYWORD_ONLY)


def _field_default(field: "Field[Any]") -> Any:
    return inspect.Parameter.empty if field.default is MISSING else field.default
