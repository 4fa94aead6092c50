"""Live display of a run: a screen that is redrawn every second, lines of records, or JSON."""

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from podscale.monitoring.watch.run_status import RankStats, RunStats, RunStatus, read_run_stats
from podscale.monitoring.watch.sources import RunSource
from podscale.telemetry.goodput import goodput_fraction
from podscale.telemetry.step_log import StepLog

INTERVAL_SECONDS = 1.0
"""Refresh interval, seconds."""


def show_run(source: RunSource, *, once: bool, as_json: bool) -> None:
    """Show a run until it ends, or only `once`. Without a terminal, print its records as lines of text."""
    watched = WatchedRun(source)
    if once:
        watched.poll()
        _print_once(watched, as_json=as_json)
    elif as_json:
        _print_json_lines(watched)
    elif sys.stdout.isatty():
        _draw_live(watched)
    else:
        _print_records(source)


class WatchedRun:
    """State of a run from its records and metrics so far."""

    def __init__(self, source: RunSource) -> None:
        self.source = source
        self.status = RunStatus()
        self.stats = RunStats()
        self._previous_stats = RunStats()

    def poll(self) -> bool:
        """Read new records and the metrics. Returns True if there were new records."""
        records = self.source.records()
        for record in records:
            self.status.add_record(record)
        self._previous_stats, self.stats = self.stats, read_run_stats(self.source.expositions())
        return bool(records)

    @property
    def wall_seconds(self) -> dict[str, float]:
        """Wall seconds by state, from the endpoint if it exports them, else from the newest `goodput` event."""
        return self.stats.wall_seconds or self.status.wall_seconds

    @property
    def recent_ranks(self) -> list[RankStats]:
        """Statistics of each rank between the last two polls, sorted by rank."""
        before = self._previous_stats.ranks
        return [rank.since(before.get(number)) for number, rank in sorted(self.stats.ranks.items())]

    def to_json(self) -> dict[str, Any]:
        goodput = {"ratio": goodput_fraction(self.wall_seconds), "seconds": self.wall_seconds}
        return {
            "run": self.source.name,
            "headline": self.source.headline(),
            **self.status.to_json(),
            "goodput": goodput if self.wall_seconds else None,
            "rank_figures": [rank.to_json() for rank in self.recent_ranks],
        }

    def render(self) -> Any:
        """Return the screen as a rich renderable."""
        from podscale.monitoring.watch.view import ScreenFrame, render_frame

        return render_frame(
            ScreenFrame(self.source.name, self.source.headline(), self.status, self.recent_ranks, self.wall_seconds)
        )


def _intervals(source: RunSource) -> Iterator[bool]:
    """Yield False every second until the run has ended, then True once."""
    ended = False
    while not ended:
        ended = source.has_ended()  # before the caller reads: it gets the last records too
        yield ended
        if not ended:
            time.sleep(INTERVAL_SECONDS)


def _draw_live(watched: WatchedRun) -> None:
    from rich.live import Live

    with Live(auto_refresh=False, vertical_overflow="ellipsis") as screen:
        for _ in _intervals(watched.source):
            watched.poll()
            screen.update(watched.render(), refresh=True)


def _print_json_lines(watched: WatchedRun) -> None:
    """Print a JSON line whenever there are new records, and at the end."""
    for ended in _intervals(watched.source):
        if watched.poll() or ended:
            print(json.dumps(watched.to_json()), flush=True)


def _print_records(source: RunSource) -> None:
    """Print the records as the run itself does on a terminal."""
    log = StepLog(sys.stdout, "text")
    for _ in _intervals(source):
        for record in source.records():
            log.write(record)


def _print_once(watched: WatchedRun, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(watched.to_json(), indent=2))
        return
    from rich.console import Console

    Console().print(watched.render())
