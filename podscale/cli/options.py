"""Arguments and options that several commands share."""

import inspect
import os
import shlex
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from podscale.errors import InputError
from podscale.util import env


def complete_run(incomplete: str) -> list[str]:
    """Return the completions of RUN: presets, documents and folders."""
    from podscale.pipelines import presets

    return [name for name in presets.preset_names() if name.startswith(incomplete)] + complete_document(incomplete)


def complete_document(incomplete: str) -> list[str]:
    paths = Path().glob(f"{incomplete}*")
    return [str(path) for path in paths if path.suffix in (".yaml", ".yml") or path.is_dir()]


def complete_option(incomplete: str) -> list[str]:
    """Return the completions of --set."""
    from podscale.config import option_names

    return [f"{name}=" for name in option_names() if name.startswith(incomplete)]


def open_output_folder(folder: Path) -> None:
    """Create the folder that --out names, before long work starts. Raises InputError if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot be created: {error.strerror}", field="--out", got=str(folder)) from error
    if not os.access(folder, os.W_OK):
        raise InputError("cannot be written", field="--out", got=str(folder), hint="Name a folder that you can write.")


def check_package_file(path: Path) -> None:
    """Raise InputError if the file of a package has another suffix than YAML's, or no folder."""
    if path.suffix not in (".yaml", ".yml"):
        raise InputError("the name of the file must end in .yaml", field=str(path))
    if not path.absolute().parent.is_dir():
        raise InputError("the folder does not exist", field=str(path))


def write_output(path: Path, text: str) -> None:
    """Write the file that an option names. Raises InputError if it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror or error}", field=str(path)) from error


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
    help="Defaults for options that the document leaves open; cluster: those of the chart in the namespace.",
)
Defaults = Annotated[str | None, _from_defaults]
ClusterDefaults = Annotated[str, _from_defaults]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Convert = Annotated[
    bool, typer.Option("--convert", help="Convert images of other formats and depths, as data.policy=convert.")
]
PlainSoftmax = Annotated[
    bool, typer.Option("--plain-softmax", help="Leave the probabilities uncalibrated (temperature 1).")
]
Namespace = Annotated[str | None, typer.Option("--namespace", "-n", help="Short for launch.cluster.namespace.")]
Context = Annotated[str | None, typer.Option(help="Short for launch.cluster.context (of the kubeconfig).")]
ClientCertificate = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="PEM file of a client certificate, for metrics endpoints with mTLS."),
]
ClientKey = Annotated[Path | None, typer.Option(metavar="FILE", help="PEM file of that certificate's key.")]


@dataclass(frozen=True)
class ClusterOptions:
    """Options for the cluster; defaults are in the document or the kubeconfig."""

    namespace: Namespace = None
    context: Context = None

    @property
    def changes(self) -> list[str]:
        """Options as changes of a document."""
        return [f"launch.cluster.{name}={value}" for name, value in vars(self).items() if value is not None]


@dataclass(frozen=True)
class ServerOptions:
    """Options of `podscale render --stage serve`."""

    model: Annotated[
        str | None,
        typer.Option(
            metavar="LOCATION", help="serve: path in the pods, or URL, of the model; default: that of the run."
        ),
    ] = None
    replicas: Annotated[int, typer.Option(help="serve: pods; the fewest, with --max-replicas.")] = 1
    max_replicas: Annotated[int | None, typer.Option(help="serve: most pods of an autoscaler by CPU use.")] = None
    serving_runtime: Annotated[
        str | None, typer.Option(help="serve, kserve: runtime, such as kserve-tritonserver; default: KServe chooses.")
    ] = None


Result = TypeVar("Result")


def expand_option_groups(command: Callable[..., Result]) -> Callable[..., Result]:
    """Replace each dataclass parameter of a command by its fields, so that typer sees options.

    Fields are annotated like parameters of a command: Annotated[type, typer.Option(...)].
    """
    signature = inspect.signature(command)
    groups: dict[str, Any] = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if is_dataclass(parameter.annotation)
    }

    @wraps(command)
    def with_fields(**options: Any) -> Result:
        values = {
            name: group(**{field.name: options.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        return command(**options, **values)

    expanded = [option for parameter in signature.parameters.values() for option in _expand_parameter(parameter)]
    with_fields.__signature__ = signature.replace(parameters=expanded)  # type: ignore[attr-defined]
    with_fields.__annotations__ = {option.name: option.annotation for option in expanded}
    return with_fields


def _expand_parameter(parameter: inspect.Parameter) -> Iterator[inspect.Parameter]:
    if is_dataclass(parameter.annotation):
        for field in fields(parameter.annotation):
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            yield parameter.replace(
                name=field.name, kind=parameter.KEYWORD_ONLY, default=default, annotation=field.type
            )
    else:
        yield parameter.replace(kind=parameter.KEYWORD_ONLY)


def command_without_folders(default: str) -> str:
    """Return the command of this process without the folders of its paths."""
    words = shlex.split(os.environ.get(env.COMMAND, default))
    return " ".join(shlex.quote(Path(word).name if "/" in word else word) for word in words)
