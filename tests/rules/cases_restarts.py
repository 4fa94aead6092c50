"""Cases of alerts on checkpoints, restarts and goodput."""

from typing import Any

from podscale.telemetry.catalogue import GOODPUT_STATES, RESTART_CAUSES
from tests.rules.cases import Case, Line, Series, alert_cases, at, of, who

STALE, FAILING = "PodscaleCheckpointStale", "PodscaleCheckpointFailing"
LOOP, GOODPUT = "PodscaleRestartLoop", "PodscaleGoodputLow"


def every(line: Line, **where: Any) -> tuple[Series, ...]:
    """Return series of a run that should save every ten minutes; `line` has the times of its saves, seconds."""
    interval = of("train_checkpoint_interval_seconds", Line(600).hold(90), **where)
    return interval, of("train_checkpoint_last_success_timestamp_seconds", line, **where)


def saves(minutes: int, until: int) -> Line:
    """Return the times of saves, one every ten minutes until minute `until`."""
    line = Line()
    for minute in range(1, minutes + 1):
        line.jump(min(minute, until) // 10 * 600)
    return line


def uptime(minutes: int, *, after: int = 0, launch: int = 1) -> Series:
    return of("train_phase_seconds", Line(after=after).rise(minutes, by=60), phase="other", launch=launch)


CHECKPOINT_STALE = alert_cases(
    STALE,
    Case("saves no more after minute 20", every(saves(90, 20)), at(46, 90), (19, 30, 40, 44)),
    Case("saves every ten minutes", every(saves(90, 90)), silent=(19, 46, 90)),
    Case(
        "has never saved",
        (of("train_checkpoint_interval_seconds", Line(600).hold(90)), uptime(90)),
        at(26, 90),
        (5, 15, 24),
    ),
    Case(
        "no interval is set",
        (of("train_checkpoint_last_success_timestamp_seconds", Line().hold(90)),),
        silent=(46, 90),
    ),
    Case("is done", (*every(saves(90, 20)), of("train_done", Line().hold(25).jump(1).hold(64))), silent=(46, 90)),
    Case(
        "restarts in a new pod half an hour after it exited, and saves",
        (
            of("train_checkpoint_interval_seconds", Line(600).hold(20).end()),
            of("train_checkpoint_last_success_timestamp_seconds", Line().hold(19).jump(1200).end()),
            of("train_checkpoint_interval_seconds", Line(600, after=50).hold(40), launch=2),
            of(
                "train_checkpoint_last_success_timestamp_seconds",
                Line(3600, after=60).hold(9).jump(4200).hold(14),
                launch=2,
            ),
            uptime(40, after=50, launch=2),
        ),
        silent=(46, 52, 58, 70, 80),
    ),
    Case(
        "scrapes are lost, and it continues to save",
        every(Line().gap(24).jump(1200).hold(4).jump(1800).hold(9).jump(2400).hold(5)),
        silent=(27, 40, 45),
    ),
    Case("ends", every(saves(50, 20).end()), at(47), (52, 80)),
    Case(
        "one of two runs, in two namespaces",
        (*every(saves(90, 90), run="fine", namespace="fine"), *every(saves(90, 20), run="sick", namespace="sick")),
        at(50, labels=who("sick", "sick")),
    ),
)

FULL = (who(reason="disk_full"),)


def failures(line: Line, reason: str = "disk_full", **where: Any) -> Series:
    return of("train_checkpoint_failures", line, reason=reason, **where)


CHECKPOINT_FAILING = alert_cases(
    FAILING,
    Case(
        "one failed, because the disk was full",
        (failures(Line().hold(20).jump(1).hold(69)), failures(Line().hold(90), "other")),
        {22: FULL, 45: FULL},
        (19, 55, 90),
    ),
    Case("none failed", (failures(Line().hold(90)), failures(Line().hold(90), "other")), silent=(22, 90)),
    Case("failed before Prometheus was there", (failures(Line(3).hold(90)),), silent=(1, 22, 90)),
    Case("the counter restarts in the same pod", (failures(Line(2).hold(20).jump(0).hold(60)),), silent=(20, 22, 60)),
    Case(
        "restarts in a new pod",
        (failures(Line(2).hold(20).end()), failures(Line(after=23).hold(60), launch=2)),
        silent=(20, 25, 60),
    ),
    Case("fails while scrapes are lost", (failures(Line().hold(20).gap(10).jump(1).hold(40)),), {33: FULL}, (19, 70)),
    Case("ends", (failures(Line().hold(20).jump(1).end()),), {21: FULL}, (55,)),
    Case(
        "one of two runs, in two namespaces",
        (
            failures(Line().hold(60), run="fine", namespace="fine"),
            failures(Line().hold(20).jump(1).hold(39), "other", run="sick", namespace="sick"),
        ),
        at(25, labels=who("sick", "sick", reason="other")),
    ),
)


def launches(
    *starts: int, cause: str = "failed", done: int | None = None, until: int = 180, **where: Any
) -> tuple[Series, ...]:
    """Return series of a run with launches at these minutes, each in a new pod that appears two minutes later."""
    series: list[Series] = []
    ends = [*starts[1:], until]
    for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
        after = start + 2 if number else start
        here = {"launch": number + 1, **where}
        for name in RESTART_CAUSES:
            count = number if name == cause else 0
            series.append(
                of("train_restarts", Line(count, after=after).hold(end - after - 1).end(), cause=name, **here)
            )
        flag = Line(0, after=after).hold(end - after - 1)
        if done is not None and end == until:
            flag = Line(0, after=after).hold(done - after).jump(1).hold(end - done - 2)
        series.append(of("train_done", flag.end(), **here))
    return tuple(series)


RESTART_LOOP = alert_cases(
    LOOP,
    Case("three restarts within twenty minutes", launches(0, 30, 40, 50), at(53, 80), (29, 45, 105)),
    Case("taken away three times: spot machines", launches(0, 30, 40, 50, cause="preempted"), at(53), (45,)),
    Case("two restarts", launches(0, 30, 40), silent=(35, 45, 90)),
    Case("three restarts, an hour apart", launches(0, 50, 100, 150), silent=(55, 105, 155, 175)),
    Case(
        "is resumed after five launches that were not scraped",
        launches(0)[:0]
        + tuple(
            of(name, Line(value).hold(60), **labels)
            for name, value, labels in (("train_restarts", 5, {"cause": "failed"}), ("train_done", 0, {}))
        ),
        silent=(1, 30, 60),
    ),
    Case("is done after three restarts", launches(0, 30, 40, 50, done=60), at(53), (62, 80, 100)),
    Case("ends after three restarts", launches(0, 30, 40, 50, until=70), at(65), (82, 100)),
    Case(
        "its ranks fail at every start, and only the pod's parent exports launches",
        (of("train_launches", Line(1).hold(29).jump(2).hold(4).jump(3).hold(4).jump(4).hold(60)),),
        at(41, 80),
        (29, 37, 103),
    ),
    Case(
        "the same in a new pod each time, for fifty minutes",
        tuple(
            of("train_launches", Line(number, after=10 * number).hold(5).end(), launch=number) for number in range(1, 6)
        ),
        at(41, 64),
        (39, 66),
    ),
    Case(
        "is launched a second time, and exported by both",
        (*launches(0, 30), of("train_launches", Line(1).hold(29).jump(2).hold(60))),
        silent=(35, 60),
    ),
    Case(
        "is launched repeatedly after it was done",
        (
            of("train_launches", Line(1).hold(29).jump(2).hold(4).jump(3).hold(4).jump(4).hold(20)),
            of("train_done", Line(1).hold(60)),
        ),
        silent=(41, 58),
    ),
    Case(
        "the same run from the beginning",
        (
            of("train_restarts", Line(5).hold(30).end(), cause="hang"),
            of("train_done", Line(0).hold(30).end()),
            of("train_restarts", Line(0, after=33).hold(60), cause="hang", launch=2),
            of("train_done", Line(0, after=33).hold(60), launch=2),
        ),
        silent=(30, 35, 60, 90),
    ),
    Case(
        "one of two runs, in two namespaces",
        (*launches(0, run="fine", namespace="fine"), *launches(0, 30, 40, 50, run="sick", namespace="sick")),
        at(60, labels=who("sick", "sick")),
        (20,),
    ),
)


def wall_seconds(
    minutes: int,
    *,
    start: dict[str, float] | None = None,
    after: int = 0,
    launch: int = 1,
    ends: bool = False,
    where: dict[str, str] | None = None,
    **shares: float,
) -> tuple[Series, ...]:
    """Return wall time by state from `start` on; each minute adds these fractions, and the rest is idle."""
    begin = start or {}
    shares["idle"] = 1 - sum(shares.values())
    series = []
    for state in GOODPUT_STATES:
        line = Line(begin.get(state, 0), after=after).rise(minutes, by=60 * shares.get(state, 0))
        series.append(
            of("train_wall_seconds", line.end() if ends else line, state=state, launch=launch, **(where or {}))
        )
    return tuple(series)


OLD = {"productive": 30000.0, "init": 600.0, "compile": 600.0}

GOODPUT_LOW = alert_cases(
    GOODPUT,
    Case(
        "half of the time waits for data",
        wall_seconds(180, start=OLD, productive=0.5, data_wait=0.5),
        at(40, 170),
        (10, 29),
    ),
    Case("nine tenths", wall_seconds(180, start=OLD, productive=0.9), silent=(20, 90, 170)),
    Case(
        "a new run: no alert in the first hour",
        wall_seconds(59, init=0.5, compile=0.3, productive=0.2),
        silent=(20, 45, 59),
    ),
    Case(
        "is resumed after days, and compiles for ten minutes",
        (
            *wall_seconds(10, start={**OLD, "recovery": 200000}, compile=1.0, ends=True),
            *wall_seconds(60, start={**OLD, "recovery": 200000, "compile": 1200}, after=11, productive=0.97, launch=2),
        ),
        silent=(5, 10, 15, 30, 40, 60),
    ),
    Case(
        "is done, and lingers",
        (*wall_seconds(180, start=OLD), of("train_done", Line(1).hold(180))),
        silent=(20, 90, 170),
    ),
    Case("ends", wall_seconds(60, start=OLD, productive=0.5, ends=True), at(50), (62, 90)),
    Case(
        "killed every twenty minutes: each launch counts the loss of the previous one",
        (
            *wall_seconds(20, start=OLD, productive=1.0, ends=True),
            *wall_seconds(
                20,
                start={**OLD, "productive": 31000, "redo": 200, "recovery": 900},
                after=40,
                launch=2,
                productive=1.0,
                ends=True,
            ),
            *wall_seconds(
                40,
                start={**OLD, "productive": 32000, "redo": 400, "recovery": 2400},
                after=80,
                launch=3,
                productive=1.0,
            ),
        ),
        at(100),
        (19, 43),
    ),
    Case(
        "a new launch begins a heartbeat behind: no reset",
        (
            *wall_seconds(60, start=OLD, productive=0.4, ends=True),
            *wall_seconds(60, start={**OLD, "productive": 30000 + 60 * 24 - 50}, after=62, launch=2, productive=0.4),
        ),
        at(50, 75, 110),
    ),
    Case(
        "scrapes are lost",
        tuple(
            of(
                "train_wall_seconds",
                Line(begin).rise(30, by=by).gap(15).jump(begin + 46 * by).rise(60, by=by),
                state=state,
            )
            for state, begin, by in (("productive", 30000, 57), ("evaluation", 3000, 3))
        ),
        silent=(20, 47, 70, 100),
    ),
    Case(
        "one of two runs, in two namespaces",
        (
            *wall_seconds(90, start=OLD, productive=0.95, where={"run": "fine", "namespace": "fine"}),
            *wall_seconds(90, start=OLD, productive=0.4, where={"run": "sick", "namespace": "sick"}),
        ),
        at(80, labels=who("sick", "sick")),
    ),
)

CASES = (*CHECKPOINT_STALE, *CHECKPOINT_FAILING, *RESTART_LOOP, *GOODPUT_LOW)
