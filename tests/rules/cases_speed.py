"""Cases of alerts on the speed of a run: slower than before, starved, slowed by one rank."""

from typing import Any

from tests.rules.cases import Case, Line, Series, alert_cases, at, of, who

REGRESSED, STARVED, STRAGGLER = "PodscaleThroughputRegressed", "PodscaleDataStarved", "PodscaleStraggler"


def updating(line: Line, **where: Any) -> tuple[Series, ...]:
    """Return series of images and of the time in which they were trained, all of the time."""
    forward, evaluation = Line(), Line()
    forward.samples = [one if isinstance(one, str) else minute * 60.0 for minute, one in enumerate(line.samples)]
    evaluation.samples = [one if isinstance(one, str) else 0.0 for one in line.samples]
    return (
        of("train_images", line, **where),
        of("train_phase_seconds", forward, phase="forward_backward", **where),
        of("train_phase_seconds", evaluation, phase="evaluation", **where),
    )


def half_speed(at: int, minutes: int = 120) -> Line:
    return Line().rise(at, by=600).rise(minutes - at, by=300)


THROUGHPUT_REGRESSED = alert_cases(
    REGRESSED,
    Case("half the speed from minute 60 on", updating(half_speed(60)), at(82, 118), (59, 65, 74)),
    Case("nine tenths of the speed", updating(Line().rise(60, by=600).rise(60, by=540)), silent=(82, 118)),
    Case(
        "half the speed for ten minutes",
        updating(Line().rise(60, by=600).rise(10, by=300).rise(50, by=600)),
        silent=(65, 72, 80, 100),
    ),
    Case("warms up for the first minutes", updating(Line().rise(10, by=100).rise(50, by=600)), silent=(5, 20, 40, 60)),
    Case("is slow from minute 5 on: too young to tell", updating(half_speed(5, 25)), silent=(10, 20, 25)),
    Case("stalls: another alert", updating(Line().rise(60, by=600).hold(60)), silent=(82, 118)),
    Case(
        "restarts in a new pod, at its old speed",
        (*updating(Line().rise(60, by=600).end()), *updating(Line(after=64).hold(3).rise(50, by=600), launch=2)),
        silent=(70, 82, 115),
    ),
    Case(
        "is slower after a restart",
        (*updating(Line().rise(60, by=600).end()), *updating(Line(after=64).rise(50, by=300), launch=2)),
        at(90, 110),
        (60, 70),
    ),
    Case(
        "ten scrapes are lost",
        updating(Line().rise(60, by=600).gap(10).jump(600 * 71).rise(40, by=600)),
        silent=(65, 72, 80, 110),
    ),
    Case("is done", updating(half_speed(60, 70).end()), silent=(82, 100)),
    Case(
        "one of two runs",
        (*updating(Line().rise(120, by=600), run="fine"), *updating(half_speed(60), run="sick")),
        at(90, labels=who("sick")),
        (59,),
    ),
    Case(
        "the same name in two namespaces",
        (*updating(Line().rise(120, by=600), namespace="fine"), *updating(half_speed(60), namespace="sick")),
        at(90, labels=who(namespace="sick")),
        (59,),
    ),
)


def evaluated_half_the_time() -> tuple[Series, ...]:
    """Return series with half of each minute in evaluation from minute 60 on; the run trains no slower."""
    images = half_speed(60)
    forward = Line().rise(60, by=60).rise(60, by=30)
    evaluation = Line().hold(60).rise(60, by=30)
    return (
        of("train_images", images),
        of("train_phase_seconds", forward, phase="forward_backward"),
        of("train_phase_seconds", evaluation, phase="evaluation"),
    )


THROUGHPUT_REGRESSED += alert_cases(
    REGRESSED, Case("evaluations take half the time", evaluated_half_the_time(), silent=(82, 118))
)


def waiting(share: Line, **where: Any) -> tuple[Series, ...]:
    """Return the phases of a rank; `share` is its counter of seconds waiting for images, the rest is training."""
    rest = Line()
    before, total = 0.0, 0.0
    rest.samples = []
    for sample in share.samples:
        if isinstance(sample, str):
            rest.samples.append(sample)
            continue
        total += 60 - max(0.0, sample - before)
        before = sample
        rest.samples.append(total)
    return (
        of("train_phase_seconds", share, phase="data_wait", **where),
        of("train_phase_seconds", rest, phase="forward_backward", **where),
    )


DATA_STARVED = alert_cases(
    STARVED,
    Case(
        "a rank waits half the time from minute 20 on",
        (*waiting(Line().rise(60, by=2)), *waiting(Line().rise(20, by=2).rise(40, by=30), rank=1)),
        at(36, 60),
        (19, 29),
    ),
    Case(
        "four ranks, a tenth of the time each",
        tuple(series for rank in range(4) for series in waiting(Line().rise(60, by=6), rank=rank)),
        silent=(20, 36, 60),
    ),
    Case("a tenth of the time", waiting(Line().rise(60, by=6)), silent=(20, 36, 60)),
    Case(
        "fills its cache in the first eight minutes", waiting(Line().rise(8, by=50).rise(52, by=1)), silent=(9, 15, 40)
    ),
    Case(
        "waits for five minutes after each start",
        (
            *waiting(Line().rise(5, by=50).rise(15, by=1).end()),
            *waiting(Line(after=22).rise(5, by=50).rise(30, by=1), launch=2),
        ),
        silent=(15, 30, 40),
    ),
    Case(
        "scrapes are lost, and it still starves",
        waiting(Line().rise(20, by=30).gap(3).jump(690).rise(30, by=30)),
        at(50),
        (9,),
    ),
    Case("is done", waiting(Line().rise(20, by=30).end()), at(19), (30, 50)),
    Case(
        "one of two runs",
        (*waiting(Line().rise(60, by=1), run="fine"), *waiting(Line().rise(60, by=30), run="sick")),
        at(36, labels=who("sick")),
        (8,),
    ),
    Case(
        "the same name in two namespaces",
        (*waiting(Line().rise(60, by=1), namespace="fine"), *waiting(Line().rise(60, by=30), namespace="sick")),
        at(36, labels=who(namespace="sick")),
        (8,),
    ),
)


def busy(*by: float, minutes: int = 60, **where: Any) -> tuple[Series, ...]:
    """Return series of ranks that are busy for these seconds of each minute."""
    lines = [Line().rise(minutes, by=seconds) for seconds in by]
    return tuple(of("train_busy_seconds", line, rank=rank, **where) for rank, line in enumerate(lines))


SLOW = (who(rank="3"),)
STRAGGLERS = alert_cases(
    STRAGGLER,
    Case("one of four is busy half as long again", busy(30, 31, 30, 45), {18: SLOW, 60: SLOW}, (5, 9)),
    Case("one of two", busy(30, 50), at(18, labels=who(rank="1")), (5,)),
    Case("ranks differ by a tenth", busy(30, 31, 30, 33), silent=(18, 60)),
    Case("a single rank", busy(50), silent=(18, 60)),
    Case("all are equally busy", busy(50, 50, 50), silent=(18, 60)),
    Case("hardly busy: they evaluate", busy(0.5, 0.5, 0.5, 2), silent=(18, 60)),
    Case(
        "slow for five minutes",
        (*busy(30, 30, 30), of("train_busy_seconds", Line().rise(20, by=30).rise(5, by=55).rise(35, by=30), rank=3)),
        silent=(24, 32, 60),
    ),
    Case(
        "a rank restarts later than the others",
        (
            *busy(30, 30, 30),
            of("train_busy_seconds", Line().rise(20, by=30).end(), rank=3),
            of("train_busy_seconds", Line(after=22).rise(38, by=30), rank=3, launch=2),
        ),
        silent=(21, 24, 34, 60),
    ),
    Case(
        "continues after a start in a new pod",
        (
            *busy(30, 30, 30),
            of("train_busy_seconds", Line().rise(20, by=55).end(), rank=3),
            of("train_busy_seconds", Line(after=22).rise(38, by=55), rank=3, launch=2),
        ),
        {19: SLOW, 50: SLOW},
        (5,),
    ),
    Case(
        "scrapes of the slow one are lost",
        (*busy(30, 30, 30), of("train_busy_seconds", Line().rise(20, by=55).gap(2).jump(1265).rise(37, by=55), rank=3)),
        {50: SLOW},
        (5,),
    ),
    Case(
        "is done",
        (*busy(30, 30, minutes=20), of("train_busy_seconds", Line().rise(20, by=55).end(), rank=3)),
        silent=(30, 50),
    ),
    Case(
        "ranks of another run do not count",
        (*busy(30, 30, 30, run="fast"), *busy(55, 55, 55, run="slow")),
        silent=(18, 60),
    ),
    Case(
        "the same names in two namespaces",
        (*busy(30, 30, 30, namespace="fine"), *busy(30, 30, 50, namespace="sick")),
        at(18, labels=who(namespace="sick", rank="2")),
        (5,),
    ),
)

CASES = (*THROUGHPUT_REGRESSED, *DATA_STARVED, *STRAGGLERS)
