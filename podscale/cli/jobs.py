"""Commands for jobs on a Kubernetes cluster."""

import json
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from podscale.cli.documents import load_with_defaults
from podscale.cli.options import (
    ClusterDefaults,
    ClusterOptions,
    Json,
    Run,
    Set,
    ShardSetLocation,
    complete_run,
    expand_option_groups,
)
from podscale.cli.predict import PredictionOptions, submit_prediction
from podscale.errors import ExitCode, InputError
from podscale.util.formatting import format_duration
from podscale.util.terminal import paint, terminal_width

if TYPE_CHECKING:
    from podscale.api.cluster_jobs import ClusterJobs
    from podscale.kubernetes.jobs import JobEntry

app = typer.Typer()

PHASE_STYLES = {"succeeded": "green", "running": "green", "failed": "bold red", "gone": "dim", "stopped": "yellow"}

Stage = Annotated[str | None, typer.Option(metavar="STAGE", help="shard, train, evaluate, report or predict.")]
RunOrId = Annotated[
    str,
    typer.Argument(metavar="RUN", help="Id of the run, or its document or preset.", autocompletion=complete_run),
]


@app.command()
@expand_option_groups
def submit(
    document: Run = None,
    changes: Set = [],
    *,
    stage: Annotated[
        str, typer.Option(help="shard, train, evaluate, report, or all of them in turn; or predict, with --images.")
    ] = "all",
    shard_set: ShardSetLocation = None,
    defaults: ClusterDefaults = "cluster",
    cluster: ClusterOptions,
    prediction: PredictionOptions,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Follow the job to its end, or return once it is submitted.")
    ] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Let the API server check the objects; create nothing.")
    ] = False,
    stop_on_signal: Annotated[
        bool, typer.Option("--stop-on-signal", help="Delete the job on SIGTERM and Ctrl-C; else it keeps running.")
    ] = False,
) -> None:
    """Run on a Kubernetes cluster, each stage as a job. The same command again adopts the jobs there."""
    from podscale.api.cluster import parse_stages, prepare_submission

    if (job := prediction.job(stage)) is not None:
        config = load_with_defaults(document, [*changes, *cluster.changes], defaults)
        submit_prediction(config, job, wait=wait, dry_run=dry_run, stop_on_signal=stop_on_signal)
        return
    stages = parse_stages(stage)
    if len(stages) > 1 and not (wait or dry_run):
        hint = "Submit one at a time: --stage shard, then --stage train ..."
        raise InputError("each stage waits for the one before it", field="--no-wait", hint=hint)
    config = load_with_defaults(document, [*changes, *cluster.changes], defaults)
    jobs = prepare_submission(config, stages, shard_set)
    if dry_run:
        for title in jobs.dry_run():
            print(f"{title}: accepted by the API server, not created")
    elif wait:
        jobs.wait(sys.stdout, stop_on_signal=stop_on_signal)
    else:
        jobs.submit_first(sys.stdout)


@app.command()
@expand_option_groups
def status(run: RunOrId, stage: Stage = None, *, cluster: ClusterOptions, as_json: Json = False) -> None:
    """Print the state of a run's jobs on the cluster, and the reason if they wait."""
    found = find_jobs(run, cluster)
    jobs = found.entries(stage)
    if as_json:
        print(json.dumps([entry.to_json() for entry in jobs], indent=2))
    elif jobs:
        print("\n".join(line for entry in jobs for line in _job_lines(entry)))
    else:
        print(f"no job of run {found.run} in namespace {found.api.namespace}; its results are in its run directory")
    raise typer.Exit(int(ExitCode.DONE if jobs else ExitCode.FAILED))


@app.command()
@expand_option_groups
def logs(
    run: RunOrId,
    *,
    stage: Annotated[str, typer.Option(help="shard, train, evaluate, report or predict.")] = "train",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the log until the job has ended.")] = False,
    pod: Annotated[str | None, typer.Option(metavar="NAME", help="Pod to read instead of that of rank 0.")] = None,
    cluster: ClusterOptions,
) -> None:
    """Print the log of rank 0, across restarts."""
    from podscale.kubernetes.run_stage import LinePrinter

    output, messages = LinePrinter(sys.stdout), LinePrinter(sys.stderr)
    for line in find_jobs(run, cluster).log_lines(stage, follow=follow, pod=pod, notify=messages.notify):
        output.line(line)


@app.command()
@expand_option_groups
def stop(
    run: RunOrId,
    *,
    stage: Stage = None,
    remove: Annotated[
        bool, typer.Option("--delete", help="Also delete jobs that have ended, with their logs.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Return when the pods are gone, or at once.")] = True,
    cluster: ClusterOptions,
) -> None:
    """Stop the jobs of a run. Their pods save a checkpoint first; submitting again resumes from it."""
    from podscale.kubernetes.jobs import is_resubmitted
    from podscale.kubernetes.resources import title_of

    found = find_jobs(run, cluster)
    stopped = found.delete(stage, include_finished=remove)
    if not stopped:
        print(f"no running job of run {found.run} in namespace {found.api.namespace}")
    for job in stopped:
        print(f"{title_of(job)}: deleted; its pods have time to save", flush=True)
        if is_resubmitted(job):
            print(
                "  the launcher of a pipeline waits for it, and submits it again. Terminate or delete the pipeline's "
                "run; that stops the job too (docs/how-to/kfp.md, Failures).",
                flush=True,
            )
    for job in stopped if wait else ():
        found.wait_until_gone(job)
        print(f"{title_of(job)}: gone", flush=True)


@app.command("list")
@expand_option_groups
def list_all_jobs(*, cluster: ClusterOptions, as_json: Json = False) -> None:
    """List the jobs of a namespace."""
    from podscale.kubernetes.client import connect_cluster
    from podscale.kubernetes.jobs import list_jobs
    from podscale.kubernetes.transport import NamedCluster

    api = connect_cluster(NamedCluster(cluster.namespace, cluster.context))
    jobs = list_jobs(api)
    if as_json:
        print(json.dumps([entry.to_json() for entry in jobs], indent=2))
    elif jobs:
        print("\n".join(_job_table(jobs)))
    else:
        print(f"no jobs of Podscale in namespace {api.namespace} ({api.target.origin})")


def find_jobs(run: str, cluster: ClusterOptions) -> "ClusterJobs":
    """Return the jobs of a run by its path, preset or id."""
    from podscale.api import cluster as api

    return api.find_jobs(run, cluster.namespace, cluster.context)


def _job_lines(entry: "JobEntry") -> Iterator[str]:
    """Yield a line for the job, and one per pod with a problem or restarts (at most 20)."""
    from podscale.kubernetes.jobs import describe_pod
    from podscale.kubernetes.pod_state import restart_count
    from podscale.kubernetes.resources import name_of, title_of

    phase = paint(entry.state.phase, PHASE_STYLES.get(entry.state.phase, "yellow"), sys.stdout)
    rest = str(entry.state).removeprefix(entry.state.phase)
    yield f"{entry.stage:<9} {title_of(entry.job)} ({_job_age(entry)}): {phase}{rest}"
    if entry.start is not None:
        yield f"          {entry.start}"
    pods = [pod for pod in entry.pods if describe_pod(pod) or restart_count(pod)]
    for pod in pods[:20]:
        node = (pod.get("spec") or {}).get("nodeName") or "no node"
        yield f"          {name_of(pod)} on {node}, {restart_count(pod)} restarts: {describe_pod(pod) or 'runs'}"
    if len(pods) > 20:
        yield f"          and {len(pods) - 20} more pods: podscale status --json"


def _job_table(jobs: "Sequence[JobEntry]") -> Iterator[str]:
    width = max(3, *(len(entry.run) for entry in jobs))
    yield f"{'run':<{width}}  stage     kind        phase       pods      age  reason"
    for entry in jobs:
        state = entry.state
        phase = paint(f"{state.phase:<10}", PHASE_STYLES.get(state.phase, "yellow"), sys.stdout)
        pods = f"{state.running}/{state.expected}"
        job = f"{entry.run:<{width}}  {entry.stage:<8}  {entry.kind:<10}"
        line = f"{job}  {phase}  {pods:>4}  {_job_age(entry):>7}"
        yield f"{line}  {state.reason}"[: max(terminal_width(), 80) + 10].rstrip()


def _job_age(entry: "JobEntry") -> str:
    from podscale.kubernetes.resources import creation_time

    return format_duration((datetime.now(UTC) - creation_time(entry.job)).total_seconds())
