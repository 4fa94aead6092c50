"""`podscale watch`: a run on one screen, drawn again every second; or once, or as JSON."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from podscale.cli.documents import load_run_document
from podscale.cli.jobs import ClusterOptions, find_jobs
from podscale.errors import ExitCode, InputError, format_error
from podscale.monitoring.watch.run_status import RunStats, RunStatus, read_run_stats, stats_since
from podscale.monitoring.watch.sources import DirectorySource, JobSource, RunSource
from podscale.pipelines import presets
from podscale.runs import RunDirectory
from podscale.telemetry.endpoint import ClientCertFiles
from podscale.telemetry.goodput import goodput_fraction
from podscale.telemetry.step_log import StepLog

INTERVAL_SECONDS = 1.0
"""Between two pictures."""
RUNS_DIRECTORY = Path("runs")


def watch_run(
    run: str | None,
    cluster: ClusterOptions,
    *,
    stage: str,
    once: bool,
    as_json: bool,
    client: ClientCertFiles | None = None,
) -> int:
    """Shows a run until it ends. run: a run directory, a document, a preset or an id; None: the newest run here.

    client: what to show to an endpoint of this machine that wants a certificate.
    """
    with (
        closing(_find_source(run, cluster, stage, follow=not once, client=client)) as source,
        suppress(KeyboardInterrupt),
    ):
        watched = WatchedRun(source)
        if once:
            watched.poll()
            _print_once(watched, as_json=as_json)
        elif as_json:
            _print_json_lines(watched)
        elif sys.stdout.isatty():
            _draw_live(watched)
        else:
            _follow_in_pipe(source)
    return int(ExitCode.DONE)


class WatchedRun:
    """A run and what has been seen of it so far."""

    def __init__(self, source: RunSource) -> None:
        self.source = source
        self.status = RunStatus()
        self.stats = RunStats()
        self._before = RunStats()

    def poll(self) -> bool:
        """Takes what is new; True where there were new records."""
        records = self.source.records()
        for record in records:
            self.status.add_record(record)
        self._before, self.stats = self.stats, read_run_stats(self.source.expositions())
        return bool(records)

    @property
    def wall_seconds(self) -> dict[str, float]:
        """The run's wall seconds by state: as its endpoint says, else as the newest launch said at its end."""
        return self.stats.wall_seconds or self.status.wall_seconds

    def to_json(self) -> dict[str, Any]:
        ranks = [rank.to_json() for rank in stats_since(self.stats.ranks.values(), self._before)]
        return {
            "run": self.source.name,
            "headline": self.source.headline(),
            **self.status.to_json(),
            "goodput": {"ratio": goodput_fraction(self.wall_seconds), "seconds": self.wall_seconds}
            if self.wall_seconds
            else None,
            "rank_figures": ranks,
        }

    def render(self) -> Any:
        """What rich draws."""
        from podscale.monitoring.watch.view import ScreenFrame, render_frame

        ranks = stats_since(self.stats.ranks.values(), self._before)
        return render_frame(
            ScreenFrame(self.source.name, self.source.headline(), self.status, ranks, self.wall_seconds)
        )


def _poll_forever(watched: WatchedRun) -> Iterator[bool]:
    """One look a second, and a last one once the run has ended; each tells whether there were new records."""
    ended = False
    while not ended:
        ended = watched.source.has_ended()  # before the look: what came last is seen, too
        yield watched.poll() or ended
        if not ended:
            time.sleep(INTERVAL_SECONDS)


def _draw_live(watched: WatchedRun) -> None:
    from rich.live import Live

    with Live(auto_refresh=False, vertical_overflow="ellipsis") as screen:
        for _ in _poll_forever(watched):
            screen.update(watched.render(), refresh=True)


def _print_json_lines(watched: WatchedRun) -> None:
    """One line of JSON whenever there is something new."""
    for news in _poll_forever(watched):
        if news:
            print(json.dumps(watched.to_json()), flush=True)


def _follow_in_pipe(source: RunSource) -> None:
    """In a pipe: the records as lines for people, as the run itself prints them on a terminal."""
    log = StepLog(sys.stdout, "text")
    ended = False
    while not ended:
        ended = source.has_ended()
        for record in source.records():
            log.write(record)
        if not ended:
            time.sleep(INTERVAL_SECONDS)


def _print_once(watched: WatchedRun, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(watched.to_json(), indent=2))
        return
    from rich.console import Console

    Console().print(watched.render())


def _find_source(
    run: str | None, cluster: ClusterOptions, stage: str, *, follow: bool, client: ClientCertFiles | None
) -> RunSource:
    """What a person means: a directory, else a document's run, else an id: of a run in ./runs, else on the cluster."""
    if run is None:
        return DirectorySource(_newest_run(), client)
    if Path(run).is_dir():
        return DirectorySource(_check_run_directory(Path(run)), client)
    if Path(run).is_file() or run in presets.preset_names():
        config = load_run_document(run, [])
        directory = RunDirectory.for_config(config)
        if directory.path.is_dir() or config.launch.backend == "local":
            return DirectorySource(_check_run_directory(directory.path), client)
    elif (RUNS_DIRECTORY / run).is_dir() and cluster == ClusterOptions():
        return DirectorySource(_check_run_directory(RUNS_DIRECTORY / run), client)
    try:
        api, found = find_jobs(run, cluster)
    except InputError as error:
        told = format_error(error.problem, field=error.field, got=error.got)
        problem = f"no directory {RUNS_DIRECTORY / run} here, and no answer of a cluster: {told}"
        raise InputError(problem, field=f"run {run}", hint=error.hint) from error
    wanted = [entry for entry in found if entry.stage == stage]
    if not wanted:
        others = ", ".join(entry.stage for entry in found) or "none"
        raise InputError(
            f"no directory {RUNS_DIRECTORY / run} here, and no job of stage {stage} in namespace {api.namespace}",
            field=f"run {run}",
            hint=f"Jobs there: {others}",
        )
    return JobSource(api, wanted[-1], follow=follow)


def _check_run_directory(path: Path) -> RunDirectory:
    run = RunDirectory(path)
    if not any(file.exists() for file in (run.metrics, run.config, run.lease)):
        raise InputError(
            f"not a run directory (it holds no {run.metrics.name})",
            field=str(path),
            hint="Give <workspace>/runs/<id>, as `podscale run` printed it, or the run's id or document.",
        )
    return run


def _newest_run() -> RunDirectory:
    """The run of ./runs that was written last."""
    found = [RunDirectory(path) for path in RUNS_DIRECTORY.glob("*") if (path / "metrics.jsonl").exists()]
    if not found:
        hint = "Name one: podscale watch DIRECTORY, or the id of a job on a cluster."
        raise InputError("no run here", field="./runs", hint=hint)
    return max(found, key=lambda run: run.metrics.stat().st_mtime)
