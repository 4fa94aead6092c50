"""Terminal view of a run's status."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from podscale.monitoring.watch.run_status import RankStats, RunStatus
from podscale.telemetry.goodput import goodput_fraction
from podscale.telemetry.phases import phase_fractions
from podscale.telemetry.step_log import format_record
from podscale.util.formatting import format_bytes, format_count, format_duration, one_line

SPARKS = "▁▂▃▄▅▆▇█"
PHASE_STYLES = {
    "data_wait": "yellow",
    "h2d": "magenta",
    "forward_backward": "green",
    "allreduce_wait": "blue",
    "optimizer": "cyan",
    "other": "bright_black",
}
BADPUT_SHOWN = 4
LABEL_WIDTH = 10
"""Width of the label column, characters."""
SPARKS_SHOWN = 20
MAX_RANKS = 16
"""Maximum number of rows in the table; of more ranks it shows the slowest and the fastest."""


@dataclass(frozen=True)
class ScreenFrame:
    """Content of one frame; `wall_seconds` is the run's wall time by state, empty if unknown."""

    name: str
    headline: str
    status: RunStatus
    ranks: Sequence[RankStats]
    wall_seconds: dict[str, float]


def render_frame(frame: ScreenFrame, now: float | None = None) -> RenderableType:
    """Render the frame for any terminal width. Ages are relative to `now`, unix seconds (default: the current time)."""
    parts: list[RenderableType] = [
        _progress_line(frame.status),
        _stats_table(frame, time.time() if now is None else now),
    ]
    if frame.status.phases:
        parts.append(_phase_bar(frame.status.phases))
    if frame.ranks:
        parts.append(_rank_table(frame.ranks))
    events = [one_line(format_record(event)) for event in frame.status.events]
    if events:
        parts.append(Text("\n".join(events), style="dim", no_wrap=True, overflow="ellipsis"))
    subtitle = Text(one_line(frame.headline), overflow="ellipsis") if frame.headline else None
    spaced = [item for part in parts for item in (part, Text())][:-1]
    return Panel(Group(*spaced), title=Text(frame.name, style="bold"), subtitle=subtitle, title_align="left")


def sparkline(values: Sequence[float]) -> str:
    """Draw one block character per value, scaled from 0 to the largest."""
    top = max(values, default=0.0)
    if top <= 0:
        return ""
    return "".join(SPARKS[min(len(SPARKS) - 1, int(value / top * (len(SPARKS) - 1) + 0.5))] for value in values)


def _progress_line(status: RunStatus) -> RenderableType:
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    table.add_column(no_wrap=True, justify="right")
    total = f" of {status.total_steps:,}" if status.total_steps else ""
    left = f"{format_duration(status.seconds_left)} left" if status.seconds_left else ""
    bar = ProgressBar(total=status.total_steps or 1, completed=status.step)
    table.add_row(Text(f"{status.state}  step {status.step:,}{total}", style="bold"), bar, left)
    return table


def _stats_table(frame: ScreenFrame, now: float) -> RenderableType:
    table = Table.grid(padding=(0, 2), expand=True)
    for label in (True, False, True, False):
        table.add_column(no_wrap=True, min_width=LABEL_WIDTH if label else None, ratio=None if label else 1)
    cells = list(_known_stats(frame, now))
    for left, right in zip(cells[::2], [*cells[1::2], ("", Text())], strict=False):
        table.add_row(Text(left[0], style="dim"), left[1], Text(right[0], style="dim"), right[1])
    return table


def _known_stats(frame: ScreenFrame, now: float) -> Iterator[tuple[str, Text]]:
    status = frame.status
    if status.rates:
        rate = Text(f"{status.rates[-1]:,.0f}", style="bold green")
        yield "images/s", rate.append(f"  {sparkline(list(status.rates)[-SPARKS_SHOWN:])}", style="green")
    if (share := goodput_fraction(frame.wall_seconds)) is not None:
        yield "goodput", _goodput_line(share, frame.wall_seconds)
    if status.epoch is not None:
        yield "epoch", Text(f"{status.epoch:.2f}")
        loss = "not finite" if status.loss is None else f"{status.loss:.4f}"
        yield "loss", Text(loss, style="" if status.loss is not None else "bold red")
    if status.evaluation is not None:
        best = f" (best {status.best_top1:.2%})" if status.best_top1 != status.evaluation["top1"] else ""
        yield "top-1", Text(f"{status.evaluation['top1']:.2%}{best}, step {status.evaluation['step']:,}")
    if status.learning_rate is not None:
        yield "learn rate", Text(f"{status.learning_rate:.4g}")
    if status.checkpoint is not None:
        age = format_duration(now - status.checkpoint["time"])
        yield "checkpoint", Text(f"step {status.checkpoint['step']:,}, {age} ago")
    if status.slowest is not None and (status.ranks or 1) > 1:
        yield "slowest", Text(f"rank {status.slowest['rank']}, {status.slowest['milliseconds']} ms")
    if status.ranks is not None:
        yield "runs on", Text(f"{format_count(status.ranks, 'process')} ({status.device or 'device unknown'})")
    if status.launches > 1:
        yield "launches", Text(str(status.launches), style="yellow")
    if status.skipped_updates:
        yield "skipped", Text(format_count(status.skipped_updates, "step"), style="yellow")
    if status.bad_records:
        yield "unreadable", Text(format_count(status.bad_records, "record"), style="yellow")


def _goodput_line(share: float, wall_seconds: dict[str, float]) -> Text:
    total = sum(wall_seconds.values())
    badput = sorted(((seconds, name) for name, seconds in wall_seconds.items() if name != "productive"), reverse=True)
    shown = [f"{name} {seconds / total:.0%}" for seconds, name in badput[:BADPUT_SHOWN] if seconds / total >= 0.01]
    text = Text(f"{share:.0%}", style="bold green" if share >= 0.9 else "bold yellow")
    return text.append(f"  lost to {', '.join(shown)}" if shown else "", style="dim")


def _phase_bar(phases: dict[str, float]) -> RenderableType:
    """Draw a bar of the step time by phase, above its legend."""
    bar, cells, legend = Table.grid(expand=True), [], Text()
    for name, fraction in phases.items():
        if fraction >= 0.005:
            style = PHASE_STYLES.get(name, "white")
            bar.add_column(ratio=max(1, round(fraction * 1000)))
            cells.append(Text("█" * 400, style=style, no_wrap=True, overflow="crop"))
            legend.append("█ ", style=style).append(f"{name.replace('_', ' ')} {fraction:.0%}   ")
    bar.add_row(*cells)
    return Group(bar, legend)


def _rank_table(ranks: Sequence[RankStats]) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("rank", justify="right")
    with_pods = any(rank.pod for rank in ranks)
    if with_pods:
        table.add_column("pod", no_wrap=True)
    for name in ("images/s", "compute", "data", "waits", "queue", "memory"):
        table.add_column(name, justify="right")
    shown = ranks if len(ranks) <= MAX_RANKS else _extreme_ranks(ranks)
    for rank in shown:
        table.add_row(str(rank.rank), *([rank.pod] if with_pods else []), *_rank_cells(rank))
    if len(shown) < len(ranks):
        table.add_row("", f"and {len(ranks) - len(shown)} between", style="dim")
    return table


def _rank_cells(rank: RankStats) -> Iterator[str]:
    fractions = phase_fractions(rank.phases)
    yield f"{rank.images_per_second:,.0f}" if rank.images_per_second is not None else "-"
    for name in ("forward_backward", "data_wait", "allreduce_wait"):
        yield f"{fractions[name]:.0%}" if name in fractions else "-"
    yield f"{rank.queued_batches:.0f}" if rank.queued_batches is not None else "-"
    yield format_bytes(rank.memory_bytes) if rank.memory_bytes is not None else "-"


def _extreme_ranks(ranks: Sequence[RankStats]) -> list[RankStats]:
    """Return the ranks that wait least for others (the slowest) and those that wait most (the fastest)."""
    by_wait = sorted(ranks, key=lambda rank: phase_fractions(rank.phases).get("allreduce_wait", 0.0))
    half = MAX_RANKS // 2
    return sorted([*by_wait[:half], *by_wait[-half:]], key=lambda rank: rank.rank)
