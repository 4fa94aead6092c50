"""Cases of alerts on runs without progress: stalled, not started, without metrics."""

from typing import Any

from tests.rules.cases import Case, Line, Series, alert_cases, at, build_info, foreign, of, target, who

STALLED, NOT_STARTED, ABSENT = "PodscaleTrainingStalled", "PodscaleTrainingNotStarted", "PodscaleMetricsAbsent"


def counting(line: Line, **where: Any) -> tuple[Series, ...]:
    """Return series of a rank's images and of the time of its last step."""
    return (of("train_images", line, **where), of("train_last_step_timestamp_seconds", line.times_of_rises(), **where))


def steady(minutes: int = 60) -> Line:
    return Line().rise(minutes, by=600)


def flag(*changes: tuple[int, float]) -> Line:
    """Return the line of a gauge: each value for a number of minutes."""
    (first, value), *rest = changes
    line = Line(value).hold(first - 1)
    for minutes, value in rest:
        line.jump(value).hold(minutes - 1)
    return line


# It fires at minute 24 in Prometheus 3, whose ranges exclude their first instant, and at 25 in Prometheus 2.
TRAINING_STALLED = alert_cases(
    STALLED,
    Case("stalls at minute 10", counting(Line().rise(10, by=600).hold(30)), at(26, 40), (9, 14, 19, 23)),
    Case("trains on", counting(steady()), silent=(10, 26, 40)),
    Case(
        "the counter of one of two ranks is constant",
        (*counting(steady()), *counting(Line().rise(10, by=600).hold(50), rank=1)),
        silent=(26, 40),
    ),
    Case("has not begun", counting(Line().hold(60)), silent=(26, 40, 60)),
    Case("ends without a word", counting(Line().rise(10, by=600).end()), silent=(11, 26, 40)),
    Case(
        "is done, and lingers",
        (*counting(Line().rise(10, by=600).hold(50)), of("train_done", flag((10, 0), (51, 1)))),
        silent=(11, 26, 40, 60),
    ),
    Case(
        "is evaluated for half an hour",
        (
            *counting(Line().rise(10, by=600).hold(30).rise(20, by=600)),
            of("eval_images", Line().hold(10).rise(30, by=900).hold(20)),
        ),
        silent=(26, 40, 60),
    ),
    Case(
        "hangs in an evaluation",
        (*counting(Line().rise(10, by=600).hold(50)), of("eval_images", Line().hold(10).rise(5, by=900).hold(45))),
        at(40),
        (14, 26),
    ),
    Case(
        "restarts in the same pod, from zero",
        counting(Line().rise(10, by=600).jump(0).rise(29, by=600)),
        silent=(15, 26, 40),
    ),
    Case(
        "restarts in a new pod and compiles for twenty minutes",
        (*counting(Line().rise(10, by=600).end()), *counting(Line(after=12).hold(20).rise(20, by=600), launch=2)),
        silent=(15, 26, 40, 50),
    ),
    Case(
        "hangs after a restart",
        (*counting(Line().rise(10, by=600).end()), *counting(Line(after=12).rise(3, by=600).hold(45), launch=2)),
        at(35, 50),
        (15, 26),
    ),
    Case(
        "twelve scrapes are lost",
        counting(Line().rise(10, by=600).gap(12).jump(13800).rise(30, by=600)),
        silent=(12, 22, 26, 40),
    ),
    Case(
        "hangs, and some scrapes are lost",
        counting(Line().rise(10, by=600).hold(4).gap(3).jump(6000).hold(30)),
        at(30),
        (9, 19),
    ),
    Case(
        "one of two runs",
        (*counting(steady(), run="fine"), *counting(Line().rise(10, by=600).hold(30), run="sick")),
        at(30, labels=who("sick")),
        (19,),
    ),
    Case(
        "the same name in two namespaces",
        (*counting(steady(), namespace="fine"), *counting(Line().rise(10, by=600).hold(30), namespace="sick")),
        at(30, labels=who(namespace="sick")),
        (19,),
    ),
    Case(
        "no namespace, outside Kubernetes",
        counting(Line().rise(10, by=600).hold(30), namespace=""),
        at(30, labels=who(namespace="")),
        (19,),
    ),
)


def running(minutes: int, *, images: Line, after: int = 0, **where: Any) -> tuple[Series, ...]:
    """Return series of a rank's time, all in the phase `other`, and of its images."""
    phases = of("train_phase_seconds", Line(after=after).rise(minutes, by=60), phase="other", **where)
    return (phases, of("train_images", images, **where))


TRAINING_NOT_STARTED = alert_cases(
    NOT_STARTED,
    Case("waits for a peer that never comes", running(60, images=Line().hold(60)), at(32, 60), (5, 29)),
    Case("compiles for twenty minutes", running(60, images=Line().hold(20).rise(40, by=600)), silent=(15, 31, 60)),
    Case(
        "fails after twenty minutes, and the next launch waits as long",
        (*running(20, images=Line().hold(20).end()), *running(20, images=Line(after=25).hold(20), launch=2, after=25)),
        silent=(29, 35, 44),
    ),
    Case(
        "had nothing left to do",
        (*running(60, images=Line().hold(60)), of("train_done", Line(1).hold(60))),
        silent=(32, 60),
    ),
    Case(
        "one of two runs, in two namespaces",
        (
            *running(60, images=Line().rise(60, by=600), run="fine", namespace="fine"),
            *running(60, images=Line().hold(60), run="sick", namespace="sick"),
        ),
        at(40, labels=who("sick", "sick")),
    ),
    Case(
        "scrapes are lost while it waits",
        running(60, images=Line().hold(10).gap(3).jump(0).hold(46)),
        at(35, 60),
        (29,),
    ),
    Case("ends", running(40, images=Line().hold(40).end()), at(35), (50,)),
)


def pod(info: Line, up: Line, **where: Any) -> tuple[Series, ...]:
    """Return the build info of a pod, and `up`."""
    return build_info(info, **where), foreign("up", up, **target(**where))


def unseen() -> tuple[Line, Line]:
    """Return series of a pod that is scraped for ten minutes and then not any more."""
    return Line(1).hold(9).end(), flag((10, 1), (50, 0))


def pod_phase(line: Line) -> Series:
    """Return the pod's phase from kube-state-metrics."""
    labels = {"namespace": "podscale", "pod": "digits-worker-0", "phase": "Running", "job": "kube"}
    return foreign("kube_pod_status_phase", line, **labels)


METRICS_ABSENT = alert_cases(
    ABSENT,
    Case(
        "a pod stops answering",
        (*pod(*unseen()), *pod(Line(1).hold(60), Line(1).hold(60), rank=1)),
        at(16, 40),
        (9, 13),
    ),
    Case(
        "three scrapes are lost",
        pod(Line(1).hold(9).gap(3).jump(1).hold(40), flag((10, 1), (3, 0), (41, 1))),
        silent=(9, 12, 16, 40),
    ),
    Case(
        "all pods answer",
        (*pod(Line(1).hold(60), Line(1).hold(60)), *pod(Line(1).hold(60), Line(1).hold(60), rank=1)),
        silent=(16, 60),
    ),
    Case(
        "was never scraped: a network policy blocks it",
        (foreign("up", Line(0).hold(60), **target(), podscale_dev_run="digits"),),
        at(6, 60),
        (3,),
    ),
    Case("ends: its targets are gone", pod(Line(1).hold(9).end(), Line(1).hold(9).end()), silent=(11, 16, 40)),
    Case(
        "is done, and Prometheus still scrapes its old address",
        (*pod(*unseen()), of("train_done", flag((8, 0), (2, 1)).end())),
        silent=(16, 40, 59),
    ),
    Case(
        "stops for good, and Prometheus still scrapes: resolved after an hour",
        pod(Line(1).hold(9).end(), flag((10, 1), (90, 0))),
        at(30),
        (75, 90),
    ),
    Case(
        "the pod runs, and Prometheus has lost it",
        (*pod(Line(1).hold(9).end(), Line(1).hold(9).end()), pod_phase(Line(1).hold(60))),
        at(17, 40),
        (9, 13),
    ),
    Case(
        "the pod has ended, by kube-state-metrics",
        (*pod(Line(1).hold(9).end(), Line(1).hold(9).end()), pod_phase(Line(1).hold(9).jump(0).hold(40))),
        silent=(17, 40),
    ),
    Case(
        "restarts at another address",
        (
            *pod(Line(1).hold(9).end(), Line(1).hold(9).end()),
            *pod(Line(1, after=12).hold(40), Line(1, after=12).hold(40), launch=2),
        ),
        silent=(13, 18, 40),
    ),
    Case(
        "a third-party target is down",
        (foreign("up", Line(0).hold(60), job="theirs", instance="x:1", namespace="podscale"),),
        silent=(6, 60),
    ),
    Case(
        "one of two runs, in two namespaces",
        (*pod(Line(1).hold(60), Line(1).hold(60), namespace="fine"), *pod(*unseen(), namespace="sick")),
        at(20, labels=who(namespace="sick")),
        (9,),
    ),
)

CASES = (*TRAINING_STALLED, *TRAINING_NOT_STARTED, *METRICS_ABSENT)
