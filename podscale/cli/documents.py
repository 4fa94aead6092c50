"""Commands for run documents (`config`, `compile`, `render`, `presets`), and `load_run_document`."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any

import typer

from podscale.cli.options import ClusterOptions, Defaults, Json, Kfp, Run, ServerOptions, Set, expand_option_groups
from podscale.cli.predict_job import PredictionOptions, render_prediction
from podscale.errors import InputError
from podscale.pipelines import presets
from podscale.pipelines.presets import CHART_CLAIM, CHART_WORKSPACE
from podscale.util import env
from podscale.util.terminal import terminal_width

if TYPE_CHECKING:
    from podscale import config
    from podscale.config import RunConfig
    from podscale.kubernetes.job_spec import JobSpec
    from podscale.kubernetes.render import Manifest
    from podscale.runs.stage_outcomes import StageName

app = typer.Typer()

CLUSTER_DEFAULTS = "cluster"
"""Value of --defaults for the chart's defaults in the document's namespace."""
STAGES: tuple["StageName", ...] = ("shard", "train", "evaluate", "report")
SERVE = "serve"
"""Value of --stage for the server of a run's model."""
IMAGENET_IMAGES = 1_281_167
"""Training images assumed before sharding; only momentum corrections depend on them."""


@app.command("config")
def show_config(
    document: Run = None,
    changes: Set = [],
    as_json: Json = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of run documents.")] = False,
    plot: Annotated[
        bool, typer.Option("--plot", help="Plot learning rate, momentum and weight decay over the run instead.")
    ] = False,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Write that plot as an SVG file too.")] = None,
) -> None:
    """Print the resolved run document: every option with its value."""
    if schema:
        sys.stdout.write(json_schema_text())
        return
    from podscale import config

    resolved = load_run_document(document, changes)
    if plot or svg is not None:
        print(plot_schedules(resolved, svg))
        return
    sys.stdout.write(resolved.model_dump_json(indent=2) + "\n" if as_json else config.dumps(resolved))


@app.command("compile")
@expand_option_groups
def compile_pipeline(
    document: Run = None,
    changes: Set = [],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")] = Path("pipeline.yaml"),
    defaults: Defaults = None,
    kfp: Kfp = "2.16",
    *,
    cluster: ClusterOptions,
) -> None:
    """Compile the pipeline of a run document into a KFP package for a cluster.

    Without --defaults, the chart's workspace is assumed if the document names none; a comment at the top names it.
    """
    config, comment = load_for_cluster(document, [*changes, *cluster.changes], defaults)
    if output.suffix not in (".yaml", ".yml"):
        raise InputError("the name of a pipeline package must end in .yaml", field=str(output))
    if not output.absolute().parent.is_dir():
        raise InputError("the folder does not exist", field=str(output))
    _print_problems(config)
    check_policy(config, defaults)
    from podscale.pipelines.package import package_pipeline

    output.write_text(comment + package_pipeline(config, kfp=kfp), encoding="utf-8")
    print(f"{output}: the pipeline of run {config.run.id}")


@app.command("presets")
def list_presets(as_json: Json = False) -> None:
    """List the run documents that come with Podscale."""
    summaries = {name: presets.preset_summary(name) for name in presets.preset_names()}
    if as_json:
        print(json.dumps(summaries, indent=2))
        return
    width = max(map(len, summaries))
    for name, line in summaries.items():
        print(f"{name:<{width}}  {line}")


@app.command()
@expand_option_groups
def render(
    document: Run = None,
    changes: Set = [],
    backend: Annotated[
        str | None,
        typer.Option(
            help="pytorchjob, jaxjob, trainjob, jobset or job; default: by the document or the hardware. "
            "serve: deployment or kserve."
        ),
    ] = None,
    stage: Annotated[
        str, typer.Option(help="shard, train, evaluate, report, or all of them; predict, with --images; or serve.")
    ] = "train",
    defaults: Defaults = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write a file instead.")] = None,
    *,
    server: ServerOptions,
    cluster: ClusterOptions,
    prediction: PredictionOptions,
) -> None:
    """Print the Kubernetes objects of a run: `podscale render RUN | kubectl apply -f -`.

    Without --defaults, the chart's workspace is assumed if the document names none; a comment at the top names it.
    """
    from podscale.kubernetes.render.common import to_yaml

    config, comment = load_for_cluster(document, [*changes, *cluster.changes], defaults)
    if stage == SERVE:
        objects = render_server(config, backend, server)
    elif (job := prediction.job(stage)) is not None:
        objects = render_prediction(config, job, from_cluster=defaults == CLUSTER_DEFAULTS)
    else:
        stages = parse_stages(stage)
        check_policy(config, defaults, stages)
        objects = render_stages(config, stages, backend)
    text = comment + to_yaml(objects)
    _print_problems(config)
    if output is None:
        sys.stdout.write(text)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror or error}", field=str(output)) from error


def load_with_defaults(
    document: str | None, changes: Sequence[str], defaults: str | None, *, namespace: str | None = None
) -> "RunConfig":
    """Load a run document over the defaults of --defaults (a file or CLUSTER_DEFAULTS).

    `namespace` is that of the defaults; None for the document's. Raises NoDefaults if the namespace has none, or they
    may not be read, and the document does not name its workspace itself.
    """
    return load_run_document(document, changes, _load_defaults(document, changes, defaults, namespace))


def load_for_cluster(document: str | None, changes: Sequence[str], defaults: str | None) -> "tuple[RunConfig, str]":
    """Load a run document for pods; return with it a YAML comment on what was assumed.

    Without --defaults, the chart's workspace holds for what neither the document nor --set says.
    """
    if defaults is not None or (document is None and env.RUN_DOCUMENT in os.environ):
        return load_with_defaults(document, changes, defaults), ""
    from podscale import config
    from podscale.config.document import format_overrides

    assumed = _assumed_workspace(document, changes)
    loaded = load_run_document(document, changes, config.Defaults(json.dumps(assumed), "the chart's defaults"))
    if not assumed:
        return loaded, ""
    settings = " ".join(f"--set {setting}" for setting in format_overrides(assumed)).replace('"', "")
    return loaded, (
        f"# Assumed (the chart's defaults): {settings}\n"
        "# Set what is different, or read the settings of the namespace with --defaults cluster.\n"
    )


def _assumed_workspace(document: str | None, changes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the chart's workspace path and claim, as far as a document leaves them open."""
    from podscale.config.document import is_set, peek

    path, assumed = presets.resolve_preset(document), dict[str, dict[str, Any]]()
    if not is_set(path, "run.workspace", changes):
        assumed["run"] = {"workspace": CHART_WORKSPACE}
    workspace = PurePosixPath(str(peek(path, "run.workspace", changes) or CHART_WORKSPACE))
    volumes = peek(path, "launch.cluster.volumes", changes)
    paths = [volume.get("path") for volume in volumes if isinstance(volume, dict)] if isinstance(volumes, list) else []
    is_mounted = any(workspace.is_relative_to(str(mount)) for mount in paths)
    if not (is_mounted or is_set(path, "launch.cluster.workspace_claim", changes)):
        assumed["launch"] = {"cluster": {"workspace_claim": CHART_CLAIM}}
    return assumed


def load_run_document(
    document: str | None, changes: Sequence[str], defaults: "config.Defaults | None" = None
) -> "RunConfig":
    """Load the run document of a command, and print the origin of its recipe.

    `document` is a path or preset; None is the document in the environment (in pods), else the default preset.
    """
    from podscale import config

    if document is None and env.RUN_DOCUMENT in os.environ:
        return config.loads(os.environ[env.RUN_DOCUMENT], env.RUN_DOCUMENT, changes, defaults)
    loaded = config.load(presets.resolve_preset(document), changes, defaults)
    if loaded.train.recipe_origin:
        print(f"recipe {loaded.train.recipe_origin}", file=sys.stderr)
    return loaded


def _load_defaults(
    document: str | None, changes: Sequence[str], location: str | None, namespace: str | None
) -> "config.Defaults | None":
    from podscale.config.document import peek

    if location is None or location != CLUSTER_DEFAULTS:
        return read_defaults(location)
    from podscale.kubernetes.cluster_defaults import NoDefaults

    path = presets.resolve_preset(document)
    named, context = (peek(path, f"launch.cluster.{name}", changes) for name in ("namespace", "context"))
    try:
        return read_defaults(location, namespace or named, context)
    except NoDefaults:
        in_environment = document is None and env.RUN_DOCUMENT in os.environ
        if not in_environment and _assumed_workspace(document, changes):
            raise
        return None


def read_defaults(
    location: str | None, namespace: str | None = None, context: str | None = None
) -> "config.Defaults | None":
    """Return the defaults of a file, or those of a namespace. Raises NoDefaults if the namespace has none."""
    from podscale import config
    from podscale.config.document import read_text

    if location is None:
        return None
    if location != CLUSTER_DEFAULTS:
        return config.Defaults(read_text(Path(location)), location)
    from podscale.kubernetes.client import connect_cluster
    from podscale.kubernetes.cluster_defaults import read_cluster_defaults
    from podscale.kubernetes.transport import NamedCluster

    return read_cluster_defaults(connect_cluster(NamedCluster(namespace, context)))


def check_policy(config: "RunConfig", defaults: str | None, stages: "Sequence[StageName]" = ()) -> None:
    """Raise InputError if the policy of the namespace refuses the pipeline, or the jobs of these stages.

    The policy is read only with the defaults of the namespace.
    """
    if defaults == CLUSTER_DEFAULTS:
        from podscale.kubernetes.client import connect_cluster
        from podscale.kubernetes.cluster_policy import check_pipeline, check_stages

        api = connect_cluster(config.launch.cluster)
        if stages:
            check_stages(api, config, stages)
        else:
            check_pipeline(api, config)


def _print_problems(config: "RunConfig") -> None:
    """Print the problems that a document has on a cluster, as notes."""
    from podscale.config.preflight import find_problems

    for problem in find_problems(config, "cluster"):
        print(f"note: {problem}", file=sys.stderr)


def json_schema_text() -> str:
    """Return the JSON schema as committed in podscale/config/schema.json."""
    from podscale import config

    return json.dumps(config.json_schema(), indent=2) + "\n"


def parse_stages(name: str) -> "tuple[StageName, ...]":
    """Return the stages of --stage; raises InputError for an unknown name."""
    if name == "all":
        return STAGES
    stages = tuple(stage for stage in STAGES if stage == name)
    if not stages:
        raise InputError(
            "unknown stage", field="--stage", got=name, hint=f"Choose one of {', '.join(STAGES)}, all, {SERVE}."
        )
    return stages


def render_stages(config: "RunConfig", stages: "Sequence[StageName]", backend: str | None) -> "list[Manifest]":
    """Return the objects of some stages in order of creation; default backend: that of the document."""
    from podscale.kubernetes.job_spec import build_job_spec
    from podscale.kubernetes.render import RENDERERS_BY_KIND, choose_backend, render_job

    if backend is not None and backend not in RENDERERS_BY_KIND:
        hint = f"Choose one of {', '.join(RENDERERS_BY_KIND)}."
        raise InputError("unknown kind of job", field="--backend", got=backend, hint=hint)
    specs = [build_job_spec(config, stage) for stage in stages]
    return [
        manifest
        for spec in specs
        for manifest in render_job(spec, choose_backend(spec, backend or likely_backend(config, spec))).all_objects
    ]


def render_server(config: "RunConfig", backend: str | None, options: ServerOptions) -> "list[Manifest]":
    """Return the objects that serve the model of a run, in order of creation."""
    from podscale.kubernetes.render.kserve import render_inference_service
    from podscale.kubernetes.render.serving import ServingOptions, build_serving_spec, render_deployment

    renderers = {"deployment": render_deployment, "kserve": render_inference_service}
    if backend is not None and backend not in renderers:
        hint = f"Choose one of {', '.join(renderers)}."
        raise InputError("cannot serve", field="--backend", got=backend, hint=hint)
    named = ServingOptions(
        model=options.model,
        replicas=options.replicas,
        max_replicas=options.max_replicas,
        runtime=options.serving_runtime,
    )
    return renderers[backend or "deployment"](build_serving_spec(config, named))


def likely_backend(config: "RunConfig", spec: "JobSpec") -> str:
    """Return the document's backend; for `local` or `auto`, the best one for the job."""
    from podscale.kubernetes.render import suitable_backends

    return suitable_backends(spec)[0] if config.launch.backend in ("local", "auto") else config.launch.backend


def plot_schedules(config: "RunConfig", svg: Path | None) -> str:
    """Return the schedules as a chart for a terminal, and write them to `svg` if it is given."""
    from podscale.config.preflight.storage import shard_set_counts
    from podscale.report.charts.standalone import schedule_curves, schedule_svg
    from podscale.report.charts.terminal import terminal_chart

    samples = shard_set_counts(config).get("train", IMAGENET_IMAGES)
    curves = schedule_curves(config.train, samples)
    if svg is not None:
        try:
            svg.write_text(schedule_svg(curves), encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot write the plot: {error.strerror}", field=str(svg)) from error
    return terminal_chart(curves, config.train.epochs, terminal_width())
