"""Commands for run documents (`config`, `compile`, `render`, `presets`), and `load_run_document`."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from podscale.cli.options import (
    ClusterOptions,
    Defaults,
    Json,
    Kfp,
    Run,
    ServerOptions,
    Set,
    check_package_file,
    expand_option_groups,
    write_output,
)
from podscale.cli.predict import PredictionOptions, render_prediction
from podscale.errors import InputError
from podscale.pipelines import presets
from podscale.pipelines.presets import CLUSTER_DEFAULTS
from podscale.util.terminal import terminal_width

if TYPE_CHECKING:
    from podscale import config
    from podscale.config import RunConfig
    from podscale.kubernetes.job_spec import JobSpec
    from podscale.kubernetes.render import Manifest
    from podscale.runs.stage_outcomes import StageName

app = typer.Typer()

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
    check_package_file(output)
    _print_problems(config)
    check_policy(config, defaults)
    from podscale.pipelines.package import package_pipeline

    write_output(output, comment + package_pipeline(config, kfp=kfp))
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
    from podscale.api.cluster import parse_stages
    from podscale.kubernetes.render.common import to_yaml

    job = prediction.job(stage)
    if stage != SERVE and server != ServerOptions():
        hint = "Add --stage serve, or leave out --model, --replicas, --max-replicas and --serving-runtime."
        raise InputError("only servers have these options", field="--stage", got=stage, hint=hint)
    config, comment = load_for_cluster(document, [*changes, *cluster.changes], defaults)
    if stage == SERVE:
        objects = render_server(config, backend, server)
    elif job is not None:
        objects = render_prediction(config, job, from_cluster=defaults == CLUSTER_DEFAULTS)
    else:
        stages = parse_stages(stage)
        check_policy(config, defaults, stages)
        objects = render_stages(config, stages, backend)
    text = comment + to_yaml(objects)
    _print_problems(config)
    if output is None:
        sys.stdout.write(text)
    else:
        write_output(output, text)


def load_run_document(
    document: str | None, changes: Sequence[str], defaults: "config.Defaults | None" = None
) -> "RunConfig":
    """Load the run document of a command, and print the origin of its recipe.

    `document` is a path or preset; None is the document in the environment (in pods), else the default preset.
    """
    from podscale.api.documents import load_document

    return _with_recipe_printed(document, load_document(document, changes, defaults))


def load_with_defaults(
    document: str | None, changes: Sequence[str], defaults: str | None, *, namespace: str | None = None
) -> "RunConfig":
    """Load a run document over the defaults of --defaults (a file or `cluster`), and print the origin of its recipe."""
    from podscale.api import documents

    return _with_recipe_printed(
        document, documents.load_with_defaults(document, changes, defaults, namespace=namespace)
    )


def load_for_cluster(document: str | None, changes: Sequence[str], defaults: str | None) -> "tuple[RunConfig, str]":
    """Load a run document for pods, print the origin of its recipe, and return with it a comment on assumptions."""
    from podscale.api import documents

    loaded, comment = documents.load_for_cluster(document, changes, defaults)
    return _with_recipe_printed(document, loaded), comment


def _with_recipe_printed(document: str | None, loaded: "RunConfig") -> "RunConfig":
    from podscale.api.documents import is_in_environment

    if loaded.train.recipe_origin and not is_in_environment(document):
        print(f"recipe {loaded.train.recipe_origin}", file=sys.stderr)
    return loaded


def check_policy(config: "RunConfig", defaults: str | None, stages: "Sequence[StageName]" = ()) -> None:
    """Raise InputError if the policy of the namespace refuses the pipeline, or the jobs of these stages.

    The policy is read only with the defaults of the namespace.
    """
    if defaults == CLUSTER_DEFAULTS:
        from podscale.kubernetes.client import connect_cluster
        from podscale.kubernetes.namespace import check_pipeline, check_stages

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
    from podscale.kubernetes.render.serving import (
        ServingOptions,
        build_serving_spec,
        render_deployment,
        render_inference_service,
    )

    renderers = {"deployment": render_deployment, "kserve": render_inference_service}
    if backend is not None and backend not in renderers:
        hint = f"Choose one of {', '.join(renderers)}."
        raise InputError("cannot serve", field="--backend", got=backend, hint=hint)
    return renderers[backend or "deployment"](build_serving_spec(config, ServingOptions(**vars(options))))


def likely_backend(config: "RunConfig", spec: "JobSpec") -> str:
    """Return the document's backend; for `local` or `auto`, the best one for the job."""
    from podscale.kubernetes.render import suitable_backends

    return suitable_backends(spec)[0] if config.launch.backend in ("local", "auto") else config.launch.backend


def plot_schedules(config: "RunConfig", svg: Path | None) -> str:
    """Return the schedules as a chart for a terminal, and write them to `svg` if it is given."""
    from podscale.config.preflight.storage import shard_set_counts
    from podscale.report.charts.schedules import schedule_curves, schedule_svg, terminal_chart

    samples = shard_set_counts(config).get("train", IMAGENET_IMAGES)
    curves = schedule_curves(config.train, samples)
    if svg is not None:
        write_output(svg, schedule_svg(curves))
    return terminal_chart(curves, config.train.epochs, terminal_width())
