"""Commands about jobs on a cluster: submit, status, logs, stop, list, and the examination of a cluster."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from podscale.commands.documents import FROM_CLUSTER, load, resolved
from podscale.commands.render import stages_of
from podscale.config import RunConfig
from podscale.config.preflight import preflight
from podscale.errors import ExitCode, InputError, PodscaleError, error_of
from podscale.findings import Finding, tell
from podscale.launch.cluster import patience
from podscale.launch.cluster.api import Api, connect
from podscale.launch.cluster.carry import Carried, Printer, carry_out, manifests_of, place
from podscale.launch.cluster.connection import Choice
from podscale.launch.cluster.doctor import examine
from podscale.launch.cluster.listing import Entry, entries, pod_line
from podscale.launch.cluster.logs import Choose, ContainerLog, LogFollower, first_pod, pod_named
from podscale.launch.cluster.observe import observing
from podscale.launch.cluster.pods import created, name_of, restarts
from podscale.launch.cluster.removal import wait_until_gone
from podscale.launch.cluster.stop import comes_back, stop_jobs, told
from podscale.launch.cluster.submit import check
from podscale.launch.jobspec import Stage
from podscale.pipelines import presets
from podscale.terminal import columns, paint
from podscale.text import duration, printable

STYLES = {"succeeded": "green", "running": "green", "failed": "bold red", "gone": "dim", "stopped": "yellow"}


@dataclass(frozen=True)
class Where:
    """The cluster that a person named on the command line; what is None, the document or the kubeconfig says."""

    namespace: str | None = None
    context: str | None = None

    @property
    def changes(self) -> list[str]:
        """The same as changes of a document."""
        named = {"namespace": self.namespace, "context": self.context}
        return [f"launch.cluster.{name}={value}" for name, value in named.items() if value is not None]


def submit(
    document: str | None,
    changes: Sequence[str],
    where: Where,
    *,
    stage: str,
    shard_set: str | None,
    defaults: str,
    wait: bool,
    dry_run: bool,
    stop_on_signal: bool,
) -> int:
    """Submits the job of a stage, or those of all stages one after the other; returns the exit code of the last."""
    stages = stages_of(stage)
    if len(stages) > 1 and not (wait or dry_run):
        hint = "Submit one: --stage shard, then --stage train ..."
        raise InputError("the stages need each other", field="--no-wait", hint=hint)
    config = resolved(document, [*changes, *where.changes], defaults)
    preflight(config, "job")
    if dry_run:
        return _check(config, stages, shard_set)
    if not wait:
        place(connect(config.launch.cluster), config, stages[0], shard_set, Printer(sys.stdout))
        return int(ExitCode.DONE)
    for one in stages:
        ended = carry_out(config, one, shard_set, stop_on_signal=stop_on_signal)
        if not ended.done:
            raise error_of(ended.exit_code, _failure(config, ended))
    return int(ExitCode.DONE)


def status(run: str, where: Where, *, stage: str | None, as_json: bool) -> int:
    """Tells how the jobs of a run stand and what their pods do; exit code 1 where there are none."""
    name, api = _meant(run, where)
    found = entries(api, name, stage)
    if as_json:
        print(json.dumps([entry.to_json() for entry in found], indent=2))
    elif found:
        print("\n".join(line for entry in found for line in _told(entry)))
    else:
        print(f"no job of run {name} in namespace {api.namespace}; what it left is in its run directory")
    return int(ExitCode.DONE if found else ExitCode.FAILED)


def listing(where: Where, *, as_json: bool) -> None:
    """Lists the jobs of a namespace."""
    api = connect(Choice(where.namespace, where.context))
    found = entries(api)
    if as_json:
        print(json.dumps([entry.to_json() for entry in found], indent=2))
    elif found:
        print("\n".join(_table(found)))
    else:
        print(f"no jobs of Podscale in namespace {api.namespace} ({api.target.origin})")


def logs(run: str, where: Where, *, stage: str, follow: bool, pod: str | None) -> None:
    """Prints what rank 0 (or a named pod) printed; with `follow` until the job has ended."""
    name, api = _meant(run, where)
    printer = Printer(sys.stdout)
    notes = Printer(sys.stderr)
    entry = _the_job(api, name, stage)
    choose = first_pod if pod is None else pod_named(pod)
    found = choose(entry.pods)
    if found is None and not (follow and pod is None):
        known = ", ".join(map(name_of, entry.pods)) or "none yet"
        job = f"{entry.resource.kind} {name_of(entry.job)}"
        raise InputError(f"{job} has no such pod", field="--pod", got=pod, hint=f"It has: {known}")
    if follow:
        _follow(api.patient(patience.LONG, notes.tell), entry, choose, printer, notes)
    elif found is not None:
        for line in ContainerLog(api, found, notes.tell).lines(found, follow=False):
            printer.line(printable(line))


def _follow(api: Api, entry: Entry, choose: Choose, printer: Printer, notes: Printer) -> None:
    """Shows the log of a pod, through its restarts, until the job has ended."""
    with observing(api, entry.resource, entry.job) as observer:
        follower = LogFollower(api, observer.pods, printer.line, notes.tell, choose)
        while not observer.state().ended:
            observer.changed.wait(5.0)
            observer.changed.clear()
        follower.finish(30.0)


def stop(run: str, where: Where, *, stage: str | None, remove: bool, wait: bool) -> None:
    """Ends the jobs of a run: their pods save and end. remove: those that have ended go too, with their logs."""
    name, api = _meant(run, where)
    found = stop_jobs(api, name, stage, ended=remove).stopped
    if not found:
        print(f"no job of run {name} is at work in namespace {api.namespace}")
    for stopped in found:
        print(f"{told(stopped)}: deleted; its pods have time to save", flush=True)
        if comes_back(stopped):
            print(
                "  a pipeline waits for it, and submits it again when its task is tried again: terminate the "
                "pipeline's run in Kubeflow Pipelines, which stops the job too",
                flush=True,
            )
    for resource, job in found if wait else ():
        wait_until_gone(api, resource, name_of(job), str(job["metadata"]["uid"]))
        print(f"{told((resource, job))}: gone", flush=True)


def doctor(document: str | None, changes: Sequence[str], where: Where, defaults: str, *, as_json: bool) -> int:
    """Examines a cluster for a document; the exit code is 2 where something is missing."""
    changes = [*changes, *where.changes]
    wrong: PodscaleError | None = None
    try:
        config = resolved(document, changes, defaults)
    except PodscaleError as error:
        config = load(document, changes)  # what is wrong with the document itself is told as everywhere
        wrong = error
    findings = list(examine(config))
    if wrong is not None and findings[0].verdict == "ok":  # else no API server was there to ask for them
        findings.append(Finding("defaults", "missing", str(wrong), "mend them: all else was examined without them"))
    return tell(findings, as_json=as_json)


def _check(config: RunConfig, stages: Sequence[Stage], shard_set: str | None) -> int:
    api = connect(config.launch.cluster)
    for stage in stages:
        manifests = manifests_of(api, config, stage, shard_set)
        check(api, manifests)
        print(f"{manifests.job['kind']} {name_of(manifests.job)}: accepted by the API server, not created")
    return int(ExitCode.DONE)


def _failure(config: RunConfig, ended: Carried) -> str:
    return f"{ended.stage} of run {config.run.id} failed (exit code {ended.exit_code}): {ended.error}"


def entries_of(run: str, where: Where) -> tuple[Api, list[Entry]]:
    """The jobs of a run (a document's path, a preset, or an id) on its cluster."""
    name, api = _meant(run, where)
    return api, entries(api, name)


def _meant(run: str, where: Where) -> tuple[str, Api]:
    """The run's id and the API of its cluster. run: a document's path or preset, else an id."""
    if not Path(run).is_file() and run not in presets.names():
        return run, connect(Choice(where.namespace, where.context))
    config = resolved(run, where.changes, FROM_CLUSTER)
    return config.run.id, connect(config.launch.cluster)


def _the_job(api: Api, run: str, stage: str) -> Entry:
    found = entries(api, run, stage)
    if not found:
        others = ", ".join(entry.stage for entry in entries(api, run)) or "none"
        problem = f"no job of stage {stage} in namespace {api.namespace}"
        raise InputError(problem, field=f"run {run}", hint=f"Stages with a job: {others}")
    return found[-1]


def _told(entry: Entry) -> Iterator[str]:
    """A job, and a line for each pod that has something to tell (at most 20)."""
    phase = paint(entry.state.phase, STYLES.get(entry.state.phase, "yellow"), sys.stdout)
    rest = str(entry.state).removeprefix(entry.state.phase)
    yield f"{entry.stage:<9} {entry.resource.kind} {name_of(entry.job)} ({_age(entry)}): {phase}{rest}"
    telling = [pod for pod in entry.pods if pod_line(pod) or restarts(pod)]
    for pod in telling[:20]:
        node = (pod.get("spec") or {}).get("nodeName") or "no node"
        yield f"          {name_of(pod)} on {node}, {restarts(pod)} restarts: {pod_line(pod) or 'runs'}"
    if len(telling) > 20:
        yield f"          and {len(telling) - 20} more pods: podscale status --json"


def _table(found: Sequence[Entry]) -> Iterator[str]:
    width = max(3, *(len(entry.run) for entry in found))
    yield f"{'run':<{width}}  stage     kind        phase       pods      age  reason"
    for entry in found:
        state = entry.state
        phase = paint(f"{state.phase:<10}", STYLES.get(state.phase, "yellow"), sys.stdout)
        pods = f"{state.running}/{state.wanted}"
        line = (
            f"{entry.run:<{width}}  {entry.stage:<8}  {entry.resource.kind:<10}  {phase}  {pods:>4}  {_age(entry):>7}"
        )
        yield f"{line}  {state.reason}"[: max(columns(), 80) + 10].rstrip()


def _age(entry: Entry) -> str:
    return duration((datetime.now(UTC) - created(entry.job)).total_seconds())
