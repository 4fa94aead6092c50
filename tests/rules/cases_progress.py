"""Alerts on the progress of a run: stalled, not begun, unseen, slower, starved, straggling."""

from tests.rules.cases import DIGITS, Case, Line, Series, build_info, foreign, of, target, who

STALLED, NOT_STARTED, ABSENT = "PodscaleTrainingStalled", "PodscaleTrainingNotStarted", "PodscaleMetricsAbsent"
REGRESSED, STARVED, STRAGGLER = "PodscaleThroughputRegressed", "PodscaleDataStarved", "PodscaleStraggler"


def counting(
    line: Line, *, run: str = "digits", namespace: str = "podscale", rank: int = 0, life: int = 1
) -> tuple[Series, ...]:
    """Images that a rank counts, and when its last update was."""
    where = {"run": run, "namespace": namespace, "rank": rank, "life": life}
    return (
        of("train_images", line, **where),
        of("train_last_step_timestamp_seconds", line.times_of_rises(), **where),
    )


def steady(minutes: int = 60) -> Line:
    return Line().rise(minutes, by=600)


def flag(*changes: tuple[int, float]) -> Line:
    """A gauge: each value for so many minutes."""
    (first, value), *rest = changes
    line = Line(value).hold(first - 1)
    for minutes, value in rest:
        line.jump(value).hold(minutes - 1)
    return line


# It does at minute 24 in Prometheus 3, whose ranges leave out their first instant, and at 25 in Prometheus 2.
TRAINING_STALLED = (
    Case(
        STALLED,
        "stalls at minute 10",
        counting(Line().rise(10, by=600).hold(30)),
        {26: (DIGITS,), 40: (DIGITS,)},
        (9, 14, 19, 23),
    ),
    Case(STALLED, "trains on", counting(steady()), silent=(10, 26, 40)),
    Case(
        STALLED,
        "one of two ranks stands still in the count",
        (*counting(steady()), *counting(Line().rise(10, by=600).hold(50), rank=1)),
        silent=(26, 40),
    ),
    Case(STALLED, "has not begun", counting(Line().hold(60)), silent=(26, 40, 60)),
    Case(STALLED, "ends without a word", counting(Line().rise(10, by=600).end()), silent=(11, 26, 40)),
    Case(
        STALLED,
        "is done, and lingers",
        (*counting(Line().rise(10, by=600).hold(50)), of("train_done", flag((10, 0), (51, 1)))),
        silent=(11, 26, 40, 60),
    ),
    Case(
        STALLED,
        "is evaluated for half an hour",
        (
            *counting(Line().rise(10, by=600).hold(30).rise(20, by=600)),
            of("eval_images", Line().hold(10).rise(30, by=900).hold(20)),
        ),
        silent=(26, 40, 60),
    ),
    Case(
        STALLED,
        "hangs in an evaluation",
        (*counting(Line().rise(10, by=600).hold(50)), of("eval_images", Line().hold(10).rise(5, by=900).hold(45))),
        {40: (DIGITS,)},
        (14, 26),
    ),
    Case(
        STALLED,
        "starts again in the same pod, from zero",
        counting(Line().rise(10, by=600).jump(0).rise(29, by=600)),
        silent=(15, 26, 40),
    ),
    Case(
        STALLED,
        "starts again in a new pod and compiles for twenty minutes",
        (*counting(Line().rise(10, by=600).end()), *counting(Line(after=12).hold(20).rise(20, by=600), life=2)),
        silent=(15, 26, 40, 50),
    ),
    Case(
        STALLED,
        "hangs after it was started again",
        (*counting(Line().rise(10, by=600).end()), *counting(Line(after=12).rise(3, by=600).hold(45), life=2)),
        {35: (DIGITS,), 50: (DIGITS,)},
        (15, 26),
    ),
    Case(
        STALLED,
        "twelve scrapes are lost",
        counting(Line().rise(10, by=600).gap(12).jump(13800).rise(30, by=600)),
        silent=(12, 22, 26, 40),
    ),
    Case(
        STALLED,
        "hangs, and some scrapes are lost",
        counting(Line().rise(10, by=600).hold(4).gap(3).jump(6000).hold(30)),
        {30: (DIGITS,)},
        (9, 19),
    ),
    Case(
        STALLED,
        "one of two runs",
        (*counting(steady(), run="fine"), *counting(Line().rise(10, by=600).hold(30), run="sick")),
        {30: (who("sick"),)},
        (19,),
    ),
    Case(
        STALLED,
        "the same name in two namespaces",
        (*counting(steady(), namespace="fine"), *counting(Line().rise(10, by=600).hold(30), namespace="sick")),
        {30: (who(namespace="sick"),)},
        (19,),
    ),
    Case(
        STALLED,
        "no namespace, outside Kubernetes",
        counting(Line().rise(10, by=600).hold(30), namespace=""),
        {30: (who(namespace=""),)},
        (19,),
    ),
)


def living(
    minutes: int,
    *,
    images: Line,
    life: int = 1,
    after: int = 0,
    run: str = "digits",
    namespace: str = "podscale",
) -> tuple[Series, ...]:
    """A rank's time, all of it booked on `other`, and its images."""
    where = {"run": run, "namespace": namespace, "life": life}
    phases = of("train_phase_seconds", Line(after=after).rise(minutes, by=60), phase="other", **where)
    return (phases, of("train_images", images, **where))


TRAINING_NOT_STARTED = (
    Case(
        NOT_STARTED,
        "waits for a peer that never comes",
        living(60, images=Line().hold(60)),
        {32: (DIGITS,), 60: (DIGITS,)},
        (5, 29),
    ),
    Case(
        NOT_STARTED,
        "compiles for twenty minutes",
        living(60, images=Line().hold(20).rise(40, by=600)),
        silent=(15, 31, 60),
    ),
    Case(
        NOT_STARTED,
        "gives up after twenty minutes, and the next life waits as long",
        (*living(20, images=Line().hold(20).end()), *living(20, images=Line(after=25).hold(20), life=2, after=25)),
        silent=(29, 35, 44),
    ),
    Case(
        NOT_STARTED,
        "had nothing left to do",
        (*living(60, images=Line().hold(60)), of("train_done", Line(1).hold(60))),
        silent=(32, 60),
    ),
    Case(
        NOT_STARTED,
        "one of two runs, in two namespaces",
        (
            *living(60, images=Line().rise(60, by=600), run="fine", namespace="fine"),
            *living(60, images=Line().hold(60), run="sick", namespace="sick"),
        ),
        {40: (who("sick", "sick"),)},
    ),
    Case(
        NOT_STARTED,
        "scrapes are lost while it waits",
        living(60, images=Line().hold(10).gap(3).jump(0).hold(46)),
        {35: (DIGITS,), 60: (DIGITS,)},
        (29,),
    ),
    Case(NOT_STARTED, "ends", living(40, images=Line().hold(40).end()), {35: (DIGITS,)}, (50,)),
)


def pod(
    info: Line, up: Line, *, rank: int = 0, life: int = 1, run: str = "digits", namespace: str = "podscale"
) -> tuple[Series, ...]:
    """What a pod says of itself, and whether it could be scraped."""
    labels = target(run, namespace, rank, life)
    return build_info(info, run=run, namespace=namespace, rank=rank, life=life), foreign("up", up, **labels)


def unseen(minutes: int = 10) -> tuple[Line, Line]:
    """A pod that is scraped for some minutes, and then no more."""
    return Line(1).hold(minutes - 1).end(), flag((minutes, 1), (50, 0))


METRICS_ABSENT = (
    Case(
        ABSENT,
        "a pod answers no more",
        (*pod(*unseen()), *pod(Line(1).hold(60), Line(1).hold(60), rank=1)),
        {16: (DIGITS,), 40: (DIGITS,)},
        (9, 13),
    ),
    Case(
        ABSENT,
        "three scrapes are lost",
        pod(Line(1).hold(9).gap(3).jump(1).hold(40), flag((10, 1), (3, 0), (41, 1))),
        silent=(9, 12, 16, 40),
    ),
    Case(
        ABSENT,
        "all answer",
        (*pod(Line(1).hold(60), Line(1).hold(60)), *pod(Line(1).hold(60), Line(1).hold(60), rank=1)),
        silent=(16, 60),
    ),
    Case(
        ABSENT,
        "was never scraped: a network policy is in the way",
        (foreign("up", Line(0).hold(60), **target(), podscale_dev_run="digits"),),
        {6: (DIGITS,), 60: (DIGITS,)},
        (3,),
    ),
    Case(ABSENT, "ends: its targets are gone", pod(Line(1).hold(9).end(), Line(1).hold(9).end()), silent=(11, 16, 40)),
    Case(
        ABSENT,
        "is done, and Prometheus still asks its old address",
        (*pod(*unseen()), of("train_done", flag((8, 0), (2, 1)).end())),
        silent=(16, 40, 59),
    ),
    Case(
        ABSENT,
        "stops for good, and Prometheus still asks: quiet after an hour",
        pod(Line(1).hold(9).end(), flag((10, 1), (90, 0))),
        {30: (DIGITS,)},
        (75, 90),
    ),
    Case(
        ABSENT,
        "the pod runs, and Prometheus has lost it",
        (
            *pod(Line(1).hold(9).end(), Line(1).hold(9).end()),
            foreign(
                "kube_pod_status_phase",
                Line(1).hold(60),
                namespace="podscale",
                pod="digits-worker-0",
                phase="Running",
                job="kube",
            ),
        ),
        {17: (DIGITS,), 40: (DIGITS,)},
        (9, 13),
    ),
    Case(
        ABSENT,
        "the pod has ended, says kube-state-metrics",
        (
            *pod(Line(1).hold(9).end(), Line(1).hold(9).end()),
            foreign(
                "kube_pod_status_phase",
                Line(1).hold(9).jump(0).hold(40),
                namespace="podscale",
                pod="digits-worker-0",
                phase="Running",
                job="kube",
            ),
        ),
        silent=(17, 40),
    ),
    Case(
        ABSENT,
        "starts again at another address",
        (
            *pod(Line(1).hold(9).end(), Line(1).hold(9).end()),
            *pod(Line(1, after=12).hold(40), Line(1, after=12).hold(40), life=2),
        ),
        silent=(13, 18, 40),
    ),
    Case(
        ABSENT,
        "somebody else's target is down",
        (foreign("up", Line(0).hold(60), job="theirs", instance="x:1", namespace="podscale"),),
        silent=(6, 60),
    ),
    Case(
        ABSENT,
        "one of two runs, in two namespaces",
        (*pod(Line(1).hold(60), Line(1).hold(60), namespace="fine"), *pod(*unseen(), namespace="sick")),
        {20: (who(namespace="sick"),)},
        (9,),
    ),
)


def updating(
    line: Line, *, share: float = 1.0, run: str = "digits", namespace: str = "podscale", rank: int = 0, life: int = 1
) -> tuple[Series, ...]:
    """Images, and the time in which they were trained: all of it, or but for a share that evaluations take."""
    forward, evaluation = (Line(after=0), Line(after=0))
    forward.samples, evaluation.samples = [], []
    for minute, sample in enumerate(line.samples):
        missing = isinstance(sample, str)
        forward.samples.append(sample if missing else minute * 60 * share)
        evaluation.samples.append(sample if missing else minute * 60 * (1 - share))
    where = {"run": run, "namespace": namespace, "rank": rank, "life": life}
    return (
        of("train_images", line, **where),
        of("train_phase_seconds", forward, phase="forward_backward", **where),
        of("train_phase_seconds", evaluation, phase="evaluation", **where),
    )


def half_speed(at: int, minutes: int = 120) -> Line:
    return Line().rise(at, by=600).rise(minutes - at, by=300)


THROUGHPUT_REGRESSED = (
    Case(
        REGRESSED,
        "half the speed from minute 60 on",
        updating(half_speed(60)),
        {82: (DIGITS,), 118: (DIGITS,)},
        (59, 65, 74),
    ),
    Case(REGRESSED, "nine tenths of the speed", updating(Line().rise(60, by=600).rise(60, by=540)), silent=(82, 118)),
    Case(
        REGRESSED,
        "half the speed for ten minutes",
        updating(Line().rise(60, by=600).rise(10, by=300).rise(50, by=600)),
        silent=(65, 72, 80, 100),
    ),
    Case(
        REGRESSED,
        "warms up for the first minutes",
        updating(Line().rise(10, by=100).rise(50, by=600)),
        silent=(5, 20, 40, 60),
    ),
    Case(REGRESSED, "is slow from minute 5 on: too young to tell", updating(half_speed(5, 25)), silent=(10, 20, 25)),
    Case(REGRESSED, "stalls: another alert", updating(Line().rise(60, by=600).hold(60)), silent=(82, 118)),
    Case(
        REGRESSED,
        "starts again in a new pod, at its old speed",
        (*updating(Line().rise(60, by=600).end()), *updating(Line(after=64).hold(3).rise(50, by=600), life=2)),
        silent=(70, 82, 115),
    ),
    Case(
        REGRESSED,
        "is slower after it was started again",
        (*updating(Line().rise(60, by=600).end()), *updating(Line(after=64).rise(50, by=300), life=2)),
        {90: (DIGITS,), 110: (DIGITS,)},
        (60, 70),
    ),
    Case(
        REGRESSED,
        "ten scrapes are lost",
        updating(Line().rise(60, by=600).gap(10).jump(600 * 71).rise(40, by=600)),
        silent=(65, 72, 80, 110),
    ),
    Case(REGRESSED, "is done", updating(half_speed(60, 70).end()), silent=(82, 100)),
    Case(
        REGRESSED,
        "one of two runs",
        (*updating(Line().rise(120, by=600), run="fine"), *updating(half_speed(60), run="sick")),
        {90: (who("sick"),)},
        (59,),
    ),
    Case(
        REGRESSED,
        "the same name in two namespaces",
        (*updating(Line().rise(120, by=600), namespace="fine"), *updating(half_speed(60), namespace="sick")),
        {90: (who(namespace="sick"),)},
        (59,),
    ),
)


def evaluated_half_the_time() -> tuple[Series, ...]:
    """From minute 60 on half of each minute is evaluation, so half the images come: no slower while it updates."""
    images = half_speed(60)
    forward = Line().rise(60, by=60).rise(60, by=30)
    evaluation = Line().hold(60).rise(60, by=30)
    return (
        of("train_images", images),
        of("train_phase_seconds", forward, phase="forward_backward"),
        of("train_phase_seconds", evaluation, phase="evaluation"),
    )


THROUGHPUT_REGRESSED += (
    Case(REGRESSED, "evaluations take half the time", evaluated_half_the_time(), silent=(82, 118)),
)


def waiting(
    share: Line, *, run: str = "digits", namespace: str = "podscale", rank: int = 0, life: int = 1
) -> tuple[Series, ...]:
    """A rank's phases. share: seconds of waiting for images, a counter; every other second it updates."""
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
    where = {"run": run, "namespace": namespace, "rank": rank, "life": life}
    return (
        of("train_phase_seconds", share, phase="data_wait", **where),
        of("train_phase_seconds", rest, phase="forward_backward", **where),
    )


DATA_STARVED = (
    Case(
        STARVED,
        "a rank waits half the time from minute 20 on",
        (*waiting(Line().rise(60, by=2)), *waiting(Line().rise(20, by=2).rise(40, by=30), rank=1)),
        {36: (DIGITS,), 60: (DIGITS,)},
        (19, 29),
    ),
    Case(
        STARVED,
        "four ranks, a tenth of the time each",
        tuple(series for rank in range(4) for series in waiting(Line().rise(60, by=6), rank=rank)),
        silent=(20, 36, 60),
    ),
    Case(STARVED, "a tenth of the time", waiting(Line().rise(60, by=6)), silent=(20, 36, 60)),
    Case(
        STARVED,
        "fills its cache in the first eight minutes",
        waiting(Line().rise(8, by=50).rise(52, by=1)),
        silent=(9, 15, 40),
    ),
    Case(
        STARVED,
        "waits for five minutes after each start",
        (
            *waiting(Line().rise(5, by=50).rise(15, by=1).end()),
            *waiting(Line(after=22).rise(5, by=50).rise(30, by=1), life=2),
        ),
        silent=(15, 30, 40),
    ),
    Case(
        STARVED,
        "scrapes are lost, and it starves on",
        waiting(Line().rise(20, by=30).gap(3).jump(690).rise(30, by=30)),
        {50: (DIGITS,)},
        (9,),
    ),
    Case(STARVED, "is done", waiting(Line().rise(20, by=30).end()), {19: (DIGITS,)}, (30, 50)),
    Case(
        STARVED,
        "one of two runs",
        (*waiting(Line().rise(60, by=1), run="fine"), *waiting(Line().rise(60, by=30), run="sick")),
        {36: (who("sick"),)},
        (8,),
    ),
    Case(
        STARVED,
        "the same name in two namespaces",
        (*waiting(Line().rise(60, by=1), namespace="fine"), *waiting(Line().rise(60, by=30), namespace="sick")),
        {36: (who(namespace="sick"),)},
        (8,),
    ),
)


def busy(*by: float, minutes: int = 60, run: str = "digits", namespace: str = "podscale") -> tuple[Series, ...]:
    """Ranks that are busy for so many seconds of each minute."""
    return tuple(
        of("train_busy_seconds", Line().rise(minutes, by=one), rank=rank, run=run, namespace=namespace)
        for rank, one in enumerate(by)
    )


SLOW = (who(rank="3"),)
STRAGGLERS = (
    Case(STRAGGLER, "one of four is busy half as long again", busy(30, 31, 30, 45), {18: SLOW, 60: SLOW}, (5, 9)),
    Case(STRAGGLER, "one of two", busy(30, 50), {18: (who(rank="1"),)}, (5,)),
    Case(STRAGGLER, "ranks differ by a tenth", busy(30, 31, 30, 33), silent=(18, 60)),
    Case(STRAGGLER, "a single rank", busy(50), silent=(18, 60)),
    Case(STRAGGLER, "all are equally busy", busy(50, 50, 50), silent=(18, 60)),
    Case(STRAGGLER, "hardly busy: they evaluate", busy(0.5, 0.5, 0.5, 2), silent=(18, 60)),
    Case(
        STRAGGLER,
        "slow for five minutes",
        (*busy(30, 30, 30), of("train_busy_seconds", Line().rise(20, by=30).rise(5, by=55).rise(35, by=30), rank=3)),
        silent=(24, 32, 60),
    ),
    Case(
        STRAGGLER,
        "a rank starts again later than the others",
        (
            *busy(30, 30, 30),
            of("train_busy_seconds", Line().rise(20, by=30).end(), rank=3),
            of("train_busy_seconds", Line(after=22).rise(38, by=30), rank=3, life=2),
        ),
        silent=(21, 24, 34, 60),
    ),
    Case(
        STRAGGLER,
        "goes on after a start in a new pod",
        (
            *busy(30, 30, 30),
            of("train_busy_seconds", Line().rise(20, by=55).end(), rank=3),
            of("train_busy_seconds", Line(after=22).rise(38, by=55), rank=3, life=2),
        ),
        {19: SLOW, 50: SLOW},
        (5,),
    ),
    Case(
        STRAGGLER,
        "scrapes of the slow one are lost",
        (*busy(30, 30, 30), of("train_busy_seconds", Line().rise(20, by=55).gap(2).jump(1265).rise(37, by=55), rank=3)),
        {50: SLOW},
        (5,),
    ),
    Case(
        STRAGGLER,
        "is done",
        (*busy(30, 30, minutes=20), of("train_busy_seconds", Line().rise(20, by=55).end(), rank=3)),
        silent=(30, 50),
    ),
    Case(
        STRAGGLER,
        "ranks of another run are no measure",
        (*busy(30, 30, 30, run="fast"), *busy(55, 55, 55, run="slow")),
        silent=(18, 60),
    ),
    Case(
        STRAGGLER,
        "the same names in two namespaces",
        (*busy(30, 30, 30, namespace="fine"), *busy(30, 30, 50, namespace="sick")),
        {18: (who(namespace="sick", rank="2"),)},
        (5,),
    ),
)

CASES = (
    *TRAINING_STALLED,
    *TRAINING_NOT_STARTED,
    *METRICS_ABSENT,
    *THROUGHPUT_REGRESSED,
    *DATA_STARVED,
    *STRAGGLERS,
)
