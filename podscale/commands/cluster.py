"""Commands about jobs on a cluster: submit, status, logs, stop, list, and the examination of a cluster."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from podscale.commands.documents import CLUSTER_DEFAULTS, load_run_document, load_with_defaults
from podscale.commands.render import parse_stages
from podscale.config import RunConfig
from podscale.config.preflight import preflight
from podscale.errors import ExitCode, InputError, PodscaleError, error_from_exit_code
from podscale.kubernetes import retry
from podscale.kubernetes.client import ClusterClient, connect_cluster, wait_until_gone
from podscale.kubernetes.cluster_doctor import check_cluster
from podscale.kubernetes.job_spec import StageName
from podscale.kubernetes.job_watcher import observe_job
from podscale.kubernetes.jobs import JobEntry, describe_pod, is_resubmitted, job_title, list_jobs, stop_jobs
from podscale.kubernetes.logs import ContainerLog, LogFollower, PodChooser, first_pod, newest_pod_named
from podscale.kubernetes.pod_state import creation_time, name_of, restart_count
from podscale.kubernetes.run_stage import JobResult, LinePrinter, build_manifests, run_stage, submit_stage
from podscale.kubernetes.submit import dry_run_job
from podscale.kubernetes.transport import NamedCluster
from podscale.pipelines import presets
from podscale.util.formatting import format_duration, printable
from podscale.util.terminal import CheckResult, paint, print_check_results, terminal_width

PHASE_STYLES = {"succeeded": "green", "running": "green", "failed": "bold red", "gone": "dim", "stopped": "yellow"}


@dataclass(frozen=True)
class ClusterOptions:
    """The cluster that a person named on the command line; what is None, the document or the kubeconfig says."""

    namespace: str | None = None
    context: str | None = None

    @property
    def changes(self) -> list[str]:
        """The same as changes of a document."""
        named = {"namespace": self.namespace, "context": self.context}
        return [f"launch.cluster.{name}={value}" for name, value in named.items() if value is not None]


def run_submit(
    document: str | None,
    changes: Sequence[str],
    cluster: ClusterOptions,
    *,
    stage: str,
    shard_set: str | None,
    defaults: str,
    wait: bool,
    dry_run: bool,
    stop_on_signal: bool,
) -> int:
    """Submits the job of a stage, or those of all stages one after the other; returns the exit code of the last."""
    stages = parse_stages(stage)
    if len(stages) > 1 and not (wait or dry_run):
        hint = "Submit one: --stage shard, then --stage train ..."
        raise InputError("the stages need each other", field="--no-wait", hint=hint)
    config = load_with_defaults(document, [*changes, *cluster.changes], defaults)
    preflight(config, "job")
    if dry_run:
        return _dry_run(config, stages, shard_set)
    if not wait:
        submit_stage(connect_cluster(config.launch.cluster), config, stages[0], shard_set, LinePrinter(sys.stdout))
        return int(ExitCode.DONE)
    for one in stages:
        ended = run_stage(config, one, shard_set, stop_on_signal=stop_on_signal)
        if not ended.is_done:
            raise error_from_exit_code(ended.exit_code, _failure_message(config, ended))
    return int(ExitCode.DONE)


def run_status(run: str, cluster: ClusterOptions, *, stage: str | None, as_json: bool) -> int:
    """Tells how the jobs of a run stand and what their pods do; exit code 1 where there are none."""
    name, api = _resolve_run(run, cluster)
    found = list_jobs(api, name, stage)
    if as_json:
        print(json.dumps([entry.to_json() for entry in found], indent=2))
    elif found:
        print("\n".join(line for entry in found for line in _job_lines(entry)))
    else:
        print(f"no job of run {name} in namespace {api.namespace}; what it left is in its run directory")
    return int(ExitCode.DONE if found else ExitCode.FAILED)


def run_list(cluster: ClusterOptions, *, as_json: bool) -> None:
    """Lists the jobs of a namespace."""
    api = connect_cluster(NamedCluster(cluster.namespace, cluster.context))
    found = list_jobs(api)
    if as_json:
        print(json.dumps([entry.to_json() for entry in found], indent=2))
    elif found:
        print("\n".join(_job_table(found)))
    else:
        print(f"no jobs of Podscale in namespace {api.namespace} ({api.target.origin})")


def run_logs(run: str, cluster: ClusterOptions, *, stage: str, follow: bool, pod: str | None) -> None:
    """Prints what rank 0 (or a named pod) printed; with `follow` until the job has ended."""
    name, api = _resolve_run(run, cluster)
    printer = LinePrinter(sys.stdout)
    notes = LinePrinter(sys.stderr)
    entry = _find_single_job(api, name, stage)
    choose = first_pod if pod is None else newest_pod_named(pod)
    found = choose(entry.pods)
    if found is None and not (follow and pod is None):
        known = ", ".join(map(name_of, entry.pods)) or "none yet"
        job = f"{entry.resource.kind} {name_of(entry.job)}"
        raise InputError(f"{job} has no such pod", field="--pod", got=pod, hint=f"It has: {known}")
    if follow:
        _follow_log(api.with_retry(retry.UNATTENDED, notes.notify), entry, choose, printer, notes)
    elif found is not None:
        for line in ContainerLog(api, found, notes.notify).lines(found, follow=False):
            printer.line(printable(line))


def _follow_log(
    api: ClusterClient, entry: JobEntry, choose_pod: PodChooser, printer: LinePrinter, notes: LinePrinter
) -> None:
    """Shows the log of a pod, through its restarts, until the job has ended."""
    with observe_job(api, entry.resource, entry.job) as observer:
        follower = LogFollower(api, observer.pods, printer.line, notes.notify, choose_pod)
        while not observer.state().is_finished:
            observer.changed.wait(5.0)
            observer.changed.clear()
        follower.finish(30.0)


def run_stop(run: str, cluster: ClusterOptions, *, stage: str | None, remove: bool, wait: bool) -> None:
    """Ends the jobs of a run: their pods save and end. remove: those that have ended go too, with their logs."""
    name, api = _resolve_run(run, cluster)
    found = stop_jobs(api, name, stage, include_finished=remove).stopped
    if not found:
        print(f"no job of run {name} is at work in namespace {api.namespace}")
    for stopped in found:
        print(f"{job_title(stopped)}: deleted; its pods have time to save", flush=True)
        if is_resubmitted(stopped):
            print(
                "  a pipeline waits for it, and submits it again when its task is tried again: terminate the "
                "pipeline's run in Kubeflow Pipelines, which stops the job too",
                flush=True,
            )
    for resource, job in found if wait else ():
        wait_until_gone(api, resource, name_of(job), str(job["metadata"]["uid"]))
        print(f"{job_title((resource, job))}: gone", flush=True)


def run_cluster_doctor(
    document: str | None, changes: Sequence[str], cluster: ClusterOptions, defaults: str, *, as_json: bool
) -> int:
    """Examines a cluster for a document; the exit code is 2 where something is missing."""
    changes = [*changes, *cluster.changes]
    wrong: PodscaleError | None = None
    try:
        config = load_with_defaults(document, changes, defaults)
    except PodscaleError as error:
        config = load_run_document(document, changes)  # what is wrong with the document itself is told as everywhere
        wrong = error
    findings = list(check_cluster(config))
    if wrong is not None and findings[0].verdict == "ok":  # else no API server was there to ask for them
        findings.append(CheckResult("defaults", "missing", str(wrong), "mend them: all else was examined without them"))
    return print_check_results(findings, as_json=as_json)


def _dry_run(config: RunConfig, stages: Sequence[StageName], shard_set: str | None) -> int:
    api = connect_cluster(config.launch.cluster)
    for stage in stages:
        manifests = build_manifests(api, config, stage, shard_set)
        dry_run_job(api, manifests)
        print(f"{manifests.job['kind']} {name_of(manifests.job)}: accepted by the API server, not created")
    return int(ExitCode.DONE)


def _failure_message(config: RunConfig, ended: JobResult) -> str:
    return f"{ended.stage} of run {config.run.id} failed (exit code {ended.exit_code}): {ended.error}"


def find_jobs(run: str, cluster: ClusterOptions) -> tuple[ClusterClient, list[JobEntry]]:
    """The jobs of a run (a document's path, a preset, or an id) on its cluster."""
    name, api = _resolve_run(run, cluster)
    return api, list_jobs(api, name)


def _resolve_run(run: str, cluster: ClusterOptions) -> tuple[str, ClusterClient]:
    """The run's id and the API of its cluster. run: a document's path or preset, else an id."""
    if not Path(run).is_file() and run not in presets.preset_names():
        return run, connect_cluster(NamedCluster(cluster.namespace, cluster.context))
    config = load_with_defaults(run, cluster.changes, CLUSTER_DEFAULTS)
    return config.run.id, connect_cluster(config.launch.cluster)


def _find_single_job(api: ClusterClient, run: str, stage: str) -> JobEntry:
    found = list_jobs(api, run, stage)
    if not found:
        others = ", ".join(entry.stage for entry in list_jobs(api, run)) or "none"
        problem = f"no job of stage {stage} in namespace {api.namespace}"
        raise InputError(problem, field=f"run {run}", hint=f"Stages with a job: {others}")
    return found[-1]


def _job_lines(entry: JobEntry) -> Iterator[str]:
    """A job, and a line for each pod that has something to tell (at most 20)."""
    phase = paint(entry.state.phase, PHASE_STYLES.get(entry.state.phase, "yellow"), sys.stdout)
    rest = str(entry.state).removeprefix(entry.state.phase)
    yield f"{entry.stage:<9} {entry.resource.kind} {name_of(entry.job)} ({_job_age(entry)}): {phase}{rest}"
    telling = [pod for pod in entry.pods if describe_pod(pod) or restart_count(pod)]
    for pod in telling[:20]:
        node = (pod.get("spec") or {}).get("nodeName") or "no node"
        yield f"          {name_of(pod)} on {node}, {restart_count(pod)} restarts: {describe_pod(pod) or 'runs'}"
    if len(telling) > 20:
        yield f"          and {len(telling) - 20} more pods: podscale status --json"


def _job_table(found: Sequence[JobEntry]) -> Iterator[str]:
    width = max(3, *(len(entry.run) for entry in found))
    yield f"{'run':<{width}}  stage     kind        phase       pods      age  reason"
    for entry in found:
        state = entry.state
        phase = paint(f"{state.phase:<10}", PHASE_STYLES.get(state.phase, "yellow"), sys.stdout)
        pods = f"{state.running}/{state.wanted}"
        line = f"{entry.run:<{width}}  {entry.stage:<8}  {entry.resource.kind:<10}  {phase}  {pods:>4}  {_job_age(entry):>7}"
        yield f"{line}  {state.reason}"[: max(terminal_width(), 80) + 10].rstrip()


def _job_age(entry: JobEntry) -> str:
    return format_duration((datetime.now(UTC) - creation_time(entry.job)).total_seconds())
