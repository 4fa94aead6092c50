"""Commands about run documents (`config`, `compile`, `render`, `presets`), and loading the document of any command."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from podscale.cli.options import Defaults, Json, Kfp, Run, Set
from podscale.errors import InputError
from podscale.pipelines import presets
from podscale.util import env
from podscale.util.terminal import terminal_width

if TYPE_CHECKING:
    from podscale import config
    from podscale.config import RunConfig
    from podscale.kubernetes.job_spec import JobSpec, StageName
    from podscale.kubernetes.render import Manifest
    from podscale.report.charts.standalone import Curves

app = typer.Typer()

CLUSTER_DEFAULTS = "cluster"
"""Value of --defaults for the defaults that the chart left in the document's namespace."""
STAGES: tuple["StageName", ...] = ("shard", "train", "evaluate", "report")
IMAGENET_IMAGES = 1_281_167
"""Training images assumed while no shards are made; only momentum corrections depend on it."""
_ROWS = 8
_LEFT = 11
_EIGHTHS = " ▁▂▃▄▅▆▇█"


@app.command("config")
def show_config(
    document: Run = None,
    changes: Set = [],
    as_json: Json = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of run documents.")] = False,
    plot: Annotated[
        bool, typer.Option("--plot", help="Draw learning rate, momentum and weight decay over the run instead.")
    ] = False,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Write that drawing as an SVG file too.")] = None,
) -> None:
    """Print the resolved run document: every option with its value."""
    if schema:
        sys.stdout.write(json_schema_text())
        return
    from podscale import config

    found = load_run_document(document, changes)
    if plot or svg is not None:
        print(plot_schedules(found, svg))
        return
    sys.stdout.write(found.model_dump_json(indent=2) + "\n" if as_json else config.dumps(found))


@app.command("compile")
def compile_pipeline(
    document: Run = None,
    changes: Set = [],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")] = Path("pipeline.yaml"),
    defaults: Defaults = None,
    kfp: Kfp = "2.16",
) -> None:
    """Compile the pipeline of a run document into a KFP package for a cluster."""
    found = load_with_defaults(document, changes, defaults)
    if output.suffix not in (".yaml", ".yml"):
        raise InputError("a pipeline package ends in .yaml", field=str(output))
    if not output.absolute().parent.is_dir():
        raise InputError("the folder does not exist", field=str(output))
    _print_problems(found)
    from podscale.pipelines.package import package_pipeline

    output.write_text(package_pipeline(found, kfp=kfp), encoding="utf-8")
    print(f"{output}: the pipeline of run {found.run.id}")


@app.command("presets")
def list_presets(as_json: Json = False) -> None:
    """List the run documents that come with Podscale."""
    found = {name: presets.preset_summary(name) for name in presets.preset_names()}
    if as_json:
        print(json.dumps(found, indent=2))
        return
    width = max(map(len, found))
    for name, line in found.items():
        print(f"{name:<{width}}  {line}")


@app.command()
def render(
    document: Run = None,
    changes: Set = [],
    backend: Annotated[
        str | None,
        typer.Option(help="pytorchjob, jaxjob, trainjob, jobset or job; default: what the document or hardware says."),
    ] = None,
    stage: Annotated[str, typer.Option(help="shard, train, evaluate, report, or all of them.")] = "train",
    defaults: Defaults = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write a file instead.")] = None,
) -> None:
    """Print the Kubernetes objects that carry out a run: `podscale render RUN | kubectl apply -f -`."""
    from podscale.kubernetes.render.common import to_yaml

    config = load_with_defaults(document, changes, defaults)
    text = to_yaml(render_stages(config, parse_stages(stage), backend))
    _print_problems(config)
    if output is None:
        sys.stdout.write(text)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror or error}", field=str(output)) from error


def load_with_defaults(document: str | None, changes: Sequence[str], defaults: str | None) -> "RunConfig":
    """Load a run document over the defaults of --defaults: a file, CLUSTER_DEFAULTS, or None."""
    return load_run_document(document, changes, _load_defaults(document, changes, defaults))


def load_run_document(
    document: str | None, changes: Sequence[str], defaults: "config.Defaults | None" = None
) -> "RunConfig":
    """Load the run document of a command, and print which recipe filled it in.

    Args:
        document: path or preset; None: the document in the environment, which pods have, else the default preset.
        changes: options of the command line, A.B=C.
        defaults: options that hold if the document does not set them.
    """
    from podscale import config

    if document is None and env.RUN_DOCUMENT in os.environ:
        return config.loads(os.environ[env.RUN_DOCUMENT], env.RUN_DOCUMENT, changes, defaults)
    found = config.load(presets.resolve_preset(document), changes, defaults)
    if found.train.recipe_origin:
        print(f"recipe {found.train.recipe_origin}", file=sys.stderr)
    return found


def _load_defaults(document: str | None, changes: Sequence[str], named: str | None) -> "config.Defaults | None":
    from podscale import config
    from podscale.config.document import peek, read_text

    if named is None:
        return None
    if named != CLUSTER_DEFAULTS:
        return config.Defaults(read_text(Path(named)), named)
    from podscale.kubernetes.client import connect_cluster
    from podscale.kubernetes.inventory import find_cluster_defaults
    from podscale.kubernetes.transport import NamedCluster

    path = presets.resolve_preset(document)
    choice = NamedCluster(*(peek(path, f"launch.cluster.{name}", changes) for name in ("namespace", "context")))
    return find_cluster_defaults(connect_cluster(choice))


def _print_problems(config: "RunConfig") -> None:
    """Print what would not work on a cluster; the command goes on."""
    from podscale.config.preflight import find_problems

    for problem in find_problems(config, "cluster"):
        print(f"note: {problem}", file=sys.stderr)


def json_schema_text() -> str:
    """Return the JSON schema as it is committed: `podscale config --schema > podscale/config/schema.json`."""
    from podscale import config

    return json.dumps(config.json_schema(), indent=2) + "\n"


def parse_stages(name: str) -> "tuple[StageName, ...]":
    """Return the stages of --stage. Raises InputError for an unknown name."""
    if name == "all":
        return STAGES
    found = tuple(stage for stage in STAGES if stage == name)
    if not found:
        raise InputError("unknown stage", field="--stage", got=name, hint=f"Choose one of {', '.join(STAGES)}, all.")
    return found


def render_stages(config: "RunConfig", stages: "Sequence[StageName]", backend: str | None) -> "list[Manifest]":
    """Return the objects of some stages in the order of their creation. backend: default: that of the document."""
    from podscale.kubernetes.job_spec import build_job_spec
    from podscale.kubernetes.render import RENDERERS_BY_KIND, choose_backend, render_job

    if backend is not None and backend not in RENDERERS_BY_KIND:
        hint = f"Choose one of {', '.join(RENDERERS_BY_KIND)}."
        raise InputError("no kind of job", field="--backend", got=backend, hint=hint)
    specs = [build_job_spec(config, stage) for stage in stages]
    return [
        one
        for spec in specs
        for one in render_job(spec, choose_backend(spec, backend or likely_backend(config, spec))).all_objects
    ]


def likely_backend(config: "RunConfig", spec: "JobSpec") -> str:
    """Return the document's backend; if it is open, the best one for the job on a cluster that has all of them."""
    from podscale.kubernetes.render import suitable_backends

    return suitable_backends(spec)[0] if config.launch.backend in ("local", "auto") else config.launch.backend


def plot_schedules(config: "RunConfig", svg: Path | None) -> str:
    """Return the schedules as text for a terminal, and write them to `svg` if it is given."""
    from podscale.config.preflight.storage import shard_set_counts
    from podscale.report.charts.standalone import schedule_curves, schedule_svg

    samples = shard_set_counts(config).get("train", IMAGENET_IMAGES)
    curves = schedule_curves(config.train, samples)
    if svg is not None:
        try:
            svg.write_text(schedule_svg(curves), encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot write the drawing: {error.strerror}", field=str(svg)) from error
    return _terminal_chart(curves, config.train.epochs, terminal_width())


def _terminal_chart(curves: "Curves", epochs: float, width: int) -> str:
    """Draw each curve as filled columns of a character each, `width` characters wide in all."""
    from podscale.report.charts.standalone import COLUMN_TITLES

    return "\n\n".join(
        _schedule_rows(COLUMN_TITLES[name], points, epochs, max(20, width - _LEFT - 1))
        for name, points in curves.items()
    )


def _schedule_rows(title: str, points: list[tuple[float, float]], epochs: float, width: int) -> str:
    """Draw the value at the middle of each column's stretch of epochs, in eighths of a row from zero."""
    heights, high = [], max(value for _, value in points) or 1.0
    position = 0
    for column in range(width):
        middle = (column + 0.5) * epochs / width
        while position + 1 < len(points) and points[position + 1][0] <= middle:
            position += 1
        heights.append(round(8 * _ROWS * points[position][1] / high))
    rows = [
        f"{_label(row, high):>{_LEFT - 2}} |{''.join(_EIGHTHS[min(8, max(0, h - 8 * row))] for h in heights)}"
        for row in reversed(range(_ROWS))
    ]
    axis = f"{'0':>{_LEFT - 2}} +{'-' * width}"
    scale = f"{'':{_LEFT}}0{f'{epochs:g} epochs':>{width - 1}}"
    return "\n".join([title, *rows, axis, scale])


def _label(row: int, high: float) -> str:
    """Return the value at the top of the highest and of the middle row."""
    return f"{high * (row + 1) / _ROWS:.4g}" if row + 1 in (_ROWS, _ROWS // 2) else ""
