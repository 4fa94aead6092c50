"""The command line. Each command imports what it needs when it runs, so that `--help` answers at once."""

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from podscale.errors import ExitCode, InputError, PodscaleError
from podscale.stopping import stoppable
from podscale.version import VERSION

EXIT_CODES = (
    "Exit codes: 0 done; 1 failed; 2 bad input, nothing was started; 75 stopped after saving, the same command "
    "continues; 76 hang detected; 77 a peer was lost; 130 interrupted."
)

WrongUsage: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""What a wrong option raises: click's own class, or that of the click which newer versions of typer carry inside."""

app = typer.Typer(
    name="podscale",
    help="Train image classifiers at supercomputer scale on Kubernetes, and on this machine. One run document (YAML) "
    "says everything; without one, commands use the embedded digits.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _complete_run(incomplete: str) -> list[str]:
    from podscale.pipelines import presets

    files = [str(path) for path in Path().glob(f"{incomplete}*") if path.suffix in (".yaml", ".yml") or path.is_dir()]
    return [name for name in presets.names() if name.startswith(incomplete)] + files


def _complete_option(incomplete: str) -> list[str]:
    from podscale.config import options

    return [f"{name}=" for name in options() if name.startswith(incomplete)]


Run = Annotated[
    Optional[str],
    typer.Argument(
        metavar="RUN",
        help="Run document: a path or a preset's name (see `podscale presets`).",
        autocompletion=_complete_run,
    ),
]
Set = Annotated[
    list[str],
    typer.Option(
        "--set", "-s", metavar="A.B=C", help="Change one option; may be repeated.", autocompletion=_complete_option
    ),
]
ShardSetLocation = Annotated[
    Optional[str],
    typer.Option(metavar="LOCATION", help="Read this shard set (a directory or fsspec URL) instead of the document's."),
]
Kfp = Annotated[str, typer.Option(help="Oldest KFP that must accept the package: 2.15, or 2.16 and newer.")]
FromDefaults = typer.Option(
    "--defaults",
    metavar="FILE|cluster",
    help="Options that hold where the document says nothing; cluster: what the chart left in the namespace.",
)
Defaults = Annotated[Optional[str], FromDefaults]
ClusterDefaults = Annotated[str, FromDefaults]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and start nothing.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.callback(invoke_without_command=True)
def _top(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(f"podscale {VERSION}")
        raise typer.Exit


@app.command()
def run(
    document: Run = None,
    changes: Set = [],
    dry_run: DryRun = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Move a former run of this id aside and start anew.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show what kfp and the stages print.")] = False,
    runner: Annotated[
        str, typer.Option(metavar="process|docker", help="docker: each stage in a container of launch.image.")
    ] = "process",
) -> None:
    """The whole pipeline here: shard, train, evaluate, report. The same command again continues."""
    from podscale.commands import run as command

    raise typer.Exit(command.run(document, changes, runner=runner, dry_run=dry_run, fresh=fresh, verbose=verbose))


@app.command()
def shard(
    document: Run = None,
    changes: Set = [],
    workers: Annotated[int, typer.Option(help="Packing processes; 0 = as the document says.", min=0)] = 0,
    index: Annotated[int, typer.Option("--index", help="This pod's part, from 0.", min=0)] = 0,
    of: Annotated[int, typer.Option("--of", help="Number of parts.", min=1)] = 1,
    verify: Annotated[bool, typer.Option("--verify", help="Read every shard again and check its hash.")] = False,
    inspect: Annotated[
        Optional[Path],
        typer.Option("--inspect", metavar="DIR", help="Tell what a shard set holds instead of making one."),
    ] = None,
    contact_sheet: Annotated[
        Optional[Path],
        typer.Option("--contact-sheet", metavar="FOLDER", help="With --inspect: a picture of each split, to look at."),
    ] = None,
    dedup: Annotated[Optional[str], typer.Option(help="Short for --set data.dedup=...")] = None,
    resize_short: Annotated[Optional[int], typer.Option(help="Short for --set data.resize_short=...")] = None,
    quality: Annotated[Optional[int], typer.Option(help="Short for --set data.quality=...")] = None,
    json: Json = False,
) -> None:
    """Stage 1: images to a shard set. Finished shards are not made again."""
    from podscale.commands import stage

    if inspect is not None:
        return stage.inspect(inspect, verify=verify, contact_sheets=contact_sheet, as_json=json)
    if contact_sheet is not None or json:
        raise InputError("--contact-sheet and --json go with --inspect DIR")
    short = {"data.dedup": dedup, "data.resize_short": resize_short, "data.quality": quality}
    changes = [*changes, *(f"{name}={value}" for name, value in short.items() if value is not None)]
    return stage.shard(document, changes, workers=workers, index=index, of=of, verify=verify)


@app.command()
def train(
    document: Run = None,
    changes: Set = [],
    resume: Annotated[
        Optional[str],
        typer.Option(metavar="auto|never|DIR", help="Short for --set checkpoint.resume=..."),
    ] = None,
    shard_set: ShardSetLocation = None,
) -> None:
    """Stage 2: train on a finished shard set, or continue an interrupted training."""
    from podscale.commands import stage

    stage.train(document, [*changes, *([f"checkpoint.resume={resume}"] if resume is not None else [])], shard_set)


@app.command()
def evaluate(document: Run = None, changes: Set = [], shard_set: ShardSetLocation = None) -> None:
    """Stage 3: evaluate the trained model on every validation image."""
    from podscale.commands import stage

    stage.evaluate(document, changes, shard_set)


@app.command()
def report(document: Run = None, changes: Set = [], shard_set: ShardSetLocation = None) -> None:
    """Stage 4: write report.html and the model card."""
    from podscale.commands import stage

    stage.report(document, changes, shard_set)


@app.command("config")
def show_config(
    document: Run = None,
    changes: Set = [],
    json: Json = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of run documents.")] = False,
    plot: Annotated[
        bool, typer.Option("--plot", help="Draw learning rate, momentum and weight decay over the run instead.")
    ] = False,
    svg: Annotated[Optional[Path], typer.Option(metavar="FILE", help="Write that drawing as an SVG file too.")] = None,
) -> None:
    """Print the resolved run document: every option with its value."""
    from podscale.commands import documents

    documents.show(document, changes, as_json=json, schema=schema, plot=plot, svg=svg)


@app.command("compile")
def compile_pipeline(
    document: Run = None,
    changes: Set = [],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")] = Path("pipeline.yaml"),
    defaults: Defaults = None,
    kfp: Kfp = "2.16",
) -> None:
    """Compile the pipeline of a run document into a KFP package for a cluster."""
    from podscale.commands import documents

    documents.compile_package(document, changes, output, defaults=defaults, kfp=kfp)


pipeline = typer.Typer(help="Hand the pipeline of a run document to Kubeflow Pipelines.", no_args_is_help=True)
app.add_typer(pipeline, name="pipeline")

Host = Annotated[
    Optional[str], typer.Option(metavar="URL", help="KFP's API or user interface; else KF_PIPELINES_ENDPOINT.")
]
UserNamespace = Annotated[str, typer.Option("--namespace", "-n", help="Yours, where several users share the KFP.")]
Ui = Annotated[Optional[str], typer.Option(metavar="URL", help="User interface for the links; default: the host.")]
TokenFile = Annotated[
    Optional[Path], typer.Option(metavar="FILE", help="Bearer token; else PODSCALE_KFP_TOKEN or _COOKIES.")
]
CaFile = Annotated[Optional[Path], typer.Option(metavar="FILE", help="Certificate authority of the host (PEM).")]
PipelineName = Annotated[str, typer.Option("--pipeline", help="Name of the pipeline that gets a new version.")]
Experiment = Annotated[str, typer.Option(help="Experiment that the run belongs to.")]
RunName = Annotated[Optional[str], typer.Option("--name", help="Name to show; default: run.id.")]
ServiceAccount = Annotated[
    Optional[str], typer.Option(metavar="NAME", help="Service account of the tasks; default: KFP's own.")
]
Cache = Annotated[bool, typer.Option("--cache/--no-cache", help="KFP may reuse the shard stage's former result.")]


@pipeline.command("upload")
def pipeline_upload(
    document: Run = None,
    changes: Set = [],
    host: Host = None,
    namespace: UserNamespace = "",
    ui: Ui = None,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
    name: PipelineName = "podscale-training",
    defaults: Defaults = None,
    cache: Cache = True,
    kfp: Kfp = "2.16",
    json: Json = False,
) -> None:
    """Make the package of a run document the newest version of a pipeline; the same package is sent once."""
    from podscale.commands import pipeline as command
    from podscale.pipelines.endpoint import endpoint

    what = command.What(document, changes, name, defaults, cache=cache, kfp=kfp)
    place = endpoint(host, namespace=namespace, ui=ui, token_file=token_file, ca_file=ca_file)
    command.upload(what, place, as_json=json)


@pipeline.command("run")
def pipeline_run(
    document: Run = None,
    changes: Set = [],
    host: Host = None,
    namespace: UserNamespace = "",
    ui: Ui = None,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
    name: PipelineName = "podscale-training",
    defaults: Defaults = None,
    experiment: Experiment = "podscale",
    run_name: RunName = None,
    service_account: ServiceAccount = None,
    wait: Annotated[bool, typer.Option("--wait", help="Show the stages as they go; fail where the run fails.")] = False,
    cache: Cache = True,
    kfp: Kfp = "2.16",
    json: Json = False,
) -> None:
    """Upload, and start a run. Interrupting --wait leaves the run at work."""
    from podscale.commands import pipeline as command
    from podscale.pipelines.endpoint import endpoint

    what = command.What(document, changes, name, defaults, experiment, run_name, service_account, cache, kfp)
    place = endpoint(host, namespace=namespace, ui=ui, token_file=token_file, ca_file=ca_file)
    raise typer.Exit(command.run(what, place, wait=wait, as_json=json))


@pipeline.command("schedule")
def pipeline_schedule(
    cron: Annotated[str, typer.Option(metavar="'M H D M W'", help="When, in UTC: five fields, or six with seconds.")],
    document: Run = None,
    changes: Set = [],
    host: Host = None,
    namespace: UserNamespace = "",
    ui: Ui = None,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
    name: PipelineName = "podscale-training",
    defaults: Defaults = None,
    experiment: Experiment = "podscale",
    run_name: RunName = None,
    service_account: ServiceAccount = None,
    replace: Annotated[bool, typer.Option("--replace", help="Take the place of a schedule of this name.")] = False,
    cache: Cache = True,
    kfp: Kfp = "2.16",
    json: Json = False,
) -> None:
    """Upload, and start a run at every time of a cron expression; each is named <run.id>-<time>."""
    from podscale.commands import pipeline as command
    from podscale.pipelines.endpoint import endpoint

    what = command.What(document, changes, name, defaults, experiment, run_name, service_account, cache, kfp)
    place = endpoint(host, namespace=namespace, ui=ui, token_file=token_file, ca_file=ca_file)
    command.schedule(what, place, cron=cron, replace=replace, as_json=json)


@app.command()
def render(
    document: Run = None,
    changes: Set = [],
    backend: Annotated[
        Optional[str],
        typer.Option(help="pytorchjob, jaxjob, trainjob, jobset or job; default: what the document or hardware says."),
    ] = None,
    stage: Annotated[str, typer.Option(help="shard, train, evaluate, report, or all of them.")] = "train",
    defaults: Defaults = None,
    output: Annotated[
        Optional[Path], typer.Option("--output", "-o", metavar="FILE", help="Write a file instead.")
    ] = None,
) -> None:
    """Print the Kubernetes objects that carry out a run: `podscale render RUN | kubectl apply -f -`."""
    from podscale.commands import render as command

    command.render_run(document, changes, backend=backend, stage=stage, defaults=defaults, output=output)


Stage = Annotated[Optional[str], typer.Option(metavar="STAGE", help="shard, train, evaluate or report.")]
Namespace = Annotated[Optional[str], typer.Option("--namespace", "-n", help="Short for launch.cluster.namespace.")]
Context = Annotated[Optional[str], typer.Option(help="Short for launch.cluster.context (of the kubeconfig).")]
RunOrId = Annotated[
    str,
    typer.Argument(metavar="RUN", help="Id of the run, or its document or preset.", autocompletion=_complete_run),
]


@app.command()
def submit(
    document: Run = None,
    changes: Set = [],
    stage: Annotated[str, typer.Option(help="shard, train, evaluate, report, or all of them in turn.")] = "all",
    shard_set: ShardSetLocation = None,
    defaults: ClusterDefaults = "cluster",
    namespace: Namespace = None,
    context: Context = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Follow the job to its end, or return when it is submitted.")
    ] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Have the API server check it and create nothing.")
    ] = False,
    stop_on_signal: Annotated[
        bool, typer.Option("--stop-on-signal", help="Delete the job on SIGTERM and Ctrl-C; else it runs on.")
    ] = False,
) -> None:
    """Carry out a run on a Kubernetes cluster, each stage as a job. The same command again adopts what is there."""
    from podscale.commands import cluster

    where = cluster.Where(namespace, context)
    code = cluster.submit(
        document,
        changes,
        where,
        stage=stage,
        shard_set=shard_set,
        defaults=defaults,
        wait=wait,
        dry_run=dry_run,
        stop_on_signal=stop_on_signal,
    )
    raise typer.Exit(code)


@app.command()
def status(
    run: RunOrId, stage: Stage = None, namespace: Namespace = None, context: Context = None, json: Json = False
) -> None:
    """Tell how the jobs of a run stand on the cluster, and why where they wait."""
    from podscale.commands import cluster

    raise typer.Exit(cluster.status(run, cluster.Where(namespace, context), stage=stage, as_json=json))


@app.command()
def logs(
    run: RunOrId,
    stage: Annotated[str, typer.Option(help="shard, train, evaluate or report.")] = "train",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
    pod: Annotated[Optional[str], typer.Option(metavar="NAME", help="Another pod than that of rank 0.")] = None,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Print the log of rank 0, also through restarts."""
    from podscale.commands import cluster

    cluster.logs(run, cluster.Where(namespace, context), stage=stage, follow=follow, pod=pod)


@app.command()
def stop(
    run: RunOrId,
    stage: Stage = None,
    remove: Annotated[bool, typer.Option("--delete", help="Jobs that have ended go too, with their logs.")] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Return when the pods are gone, or at once.")] = True,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """End the jobs of a run: their pods save first, and submitting again goes on from there."""
    from podscale.commands import cluster

    cluster.stop(run, cluster.Where(namespace, context), stage=stage, remove=remove, wait=wait)


@app.command("list")
def list_jobs(namespace: Namespace = None, context: Context = None, json: Json = False) -> None:
    """List the jobs of a namespace."""
    from podscale.commands import cluster

    cluster.listing(cluster.Where(namespace, context), as_json=json)


@app.command()
def presets(json: Json = False) -> None:
    """List the run documents that come with Podscale."""
    from podscale.commands import documents

    documents.list_presets(as_json=json)


@app.command()
def doctor(
    document: Run = None,
    changes: Set = [],
    json: Json = False,
    workspace: Annotated[Path, typer.Option(help="Where runs would be kept.")] = Path(),
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Look at the Kubernetes cluster instead, for the run document.")
    ] = False,
    defaults: ClusterDefaults = "cluster",
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Tell what this machine, or a cluster, offers and what is missing for what."""
    if cluster:
        from podscale.commands import cluster as command

        where = command.Where(namespace, context)
        raise typer.Exit(command.doctor(document, changes, where, defaults, as_json=json))
    from podscale import doctor as examination

    raise typer.Exit(examination.main(workspace, as_json=json))


bench = typer.Typer(help="Measure this machine, with the code that runs use.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@bench.command("allreduce")
def bench_allreduce(
    ranks: Annotated[int, typer.Option(help="Processes here; a torchrun world brings its own.", min=1)] = 2,
    algorithms: Annotated[str, typer.Option(metavar="A,B", help="What to measure.")] = (
        "flat,ring,tree,hierarchical,torus2d,hybrid"
    ),
    sizes: Annotated[str, typer.Option(metavar="64K,1M", help="Bytes of fp32 gradients.")] = "4K,64K,1M,16M,64M",
    wire: Annotated[str, typer.Option(metavar="fp32|bf16|fp16", help="Format of messages.")] = "fp32",
    row: Annotated[
        Optional[int], typer.Option(help="Ranks in a row of the grid; default: the ranks of a node.", min=1)
    ] = None,
    bucket_mb: Annotated[float, typer.Option(help="MiB of a bucket in the measured step.", min=0.1)] = 25.0,
    seconds: Annotated[float, typer.Option(help="About so long for each algorithm and size.", min=0.01)] = 1.0,
    model: Annotated[
        Optional[str], typer.Option(help="Network of the measured step; `--model ''` measures none.")
    ] = "resnet50",
    side: Annotated[int, typer.Option(help="Side of its images in pixels.", min=8)] = 64,
    batch: Annotated[int, typer.Option(help="Images per rank in the measured step.", min=2)] = 8,
    time_limit: Annotated[float, typer.Option(help="Seconds for everything.", min=10)] = 900.0,
    out: Annotated[Optional[Path], typer.Option(metavar="DIR", help="Folder for allreduce.md, .json and .svg.")] = None,
    json: Json = False,
) -> None:
    """Time, algbw and busbw of every all-reduce by size and axis, and what shows of it in a step (gloo or NCCL)."""
    from podscale.commands import bench_allreduce as command

    command.run(
        command.Options(
            ranks, algorithms, sizes, wire, row, bucket_mb, seconds, model, side, batch, time_limit, out, json
        )
    )


@bench.command("train")
def bench_train(
    document: Annotated[
        Optional[str],
        typer.Argument(
            metavar="RUN",
            help="Run document to measure; default: ResNet-50 at 224 px in bf16 under LARS.",
            autocompletion=_complete_run,
        ),
    ] = None,
    changes: Set = [],
    sweep: Annotated[Optional[str], typer.Option(help="Measure a named series of variants: gpu, cpu.")] = None,
    vary: Annotated[
        list[str],
        typer.Option(metavar="A.B=X,Y", help="Measure these values; several make a grid. batch= is images per rank."),
    ] = [],
    shard_set: Annotated[
        Optional[str], typer.Option(metavar="DIR", help="Shard set for the variants that read real images.")
    ] = None,
    warmup: Annotated[int, typer.Option(help="Updates before timing begins.", min=5)] = 20,
    steps: Annotated[int, typer.Option(help="Updates timed.", min=2)] = 50,
    parts: Annotated[int, typer.Option(help="Further updates measured part by part.", min=1)] = 5,
    time_limit: Annotated[float, typer.Option(help="Seconds for one variant.", min=10)] = 300.0,
    budget: Annotated[float, typer.Option(help="Seconds for all variants.", min=10)] = 86400.0,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for train-<device>.md and .json.")] = Path(),
) -> None:
    """Images/s, parts of an update, share of the device's peak, memory. Started again, it measures what is missing."""
    from podscale.bench.sweep import Settings
    from podscale.commands import bench_train as command

    command.train(
        document,
        changes,
        sweep=sweep,
        vary=vary,
        settings=Settings(warmup, steps, parts, time_limit, budget, shard_set),
        out=out,
        command=os.environ.get("PODSCALE_COMMAND", "podscale bench train"),
    )


rules = typer.Typer(help="Recording rules and alerts for Prometheus.", no_args_is_help=True)
app.add_typer(rules, name="rules")


@rules.command("export")
def rules_export(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for podscale-rules.yaml; made if missing.")],
    form: Annotated[
        str, typer.Option("--format", help="prometheus: a rule file; prometheusrule: for its operator; gmp: Google's.")
    ] = "prometheus",
    runbooks: Annotated[str, typer.Option(metavar="URL", help="Where docs/runbooks/ is served.")] = "docs/runbooks/",
    thresholds: Annotated[
        list[str], typer.Option("--threshold", metavar="NAME=NUMBER", help="Another limit (docs/runbooks).")
    ] = [],
    without: Annotated[list[str], typer.Option(metavar="ALERT", help="Leave out an alert.")] = [],
) -> None:
    """Write the rules for a Prometheus that the chart does not reach."""
    from podscale.commands import rules as command

    command.export(directory, form=form, runbooks=runbooks, thresholds=thresholds, without=without)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code where the command did not exit itself."""
    typed = ["podscale", *(sys.argv[1:] if arguments is None else arguments)]
    os.environ["PODSCALE_COMMAND"] = shlex.join(typed)  # for environment.json (launch.environment.COMMAND)
    try:
        with stoppable():
            result = app(args=arguments, prog_name="podscale", standalone_mode=False)
        return result if isinstance(result, int) else int(ExitCode.DONE)
    except PodscaleError as error:
        print(f"podscale: {error}", file=sys.stderr)
        return int(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        print("podscale: interrupted", file=sys.stderr)
        return 130
    except WrongUsage as error:
        error.show()
        return int(error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader (head, less) has seen enough
        return int(ExitCode.DONE)


if __name__ == "__main__":
    sys.exit(main())
