"""Cases of alerts on non-finite and masked steps, and on images that cannot be decoded."""

from typing import Any

from tests.rules.cases import Case, Line, Series, alert_cases, at, of, who

NONFINITE, SKIPPED, SAMPLES = "PodscaleNonFiniteSteps", "PodscaleStepsSkippedHigh", "PodscaleSamplesSkippedHigh"
GRAD = who(kind="grad")


def all_steps(minutes: int = 90, **where: Any) -> Series:
    """Return series of a hundred steps per minute."""
    return of("train_steps", Line().rise(minutes, by=100), **where)


def nonfinite(line: Line, kind: str = "grad", **where: Any) -> tuple[Series, ...]:
    """Return series of steps and of non-finite steps."""
    return all_steps(**where), of("train_nonfinite_steps", line, kind=kind, **where)


NONFINITE_STEPS = alert_cases(
    NONFINITE,
    Case(
        "one step in twenty from minute 30 on",
        (*nonfinite(Line().hold(30).rise(60, by=5)), of("train_nonfinite_steps", Line().hold(90), kind="loss")),
        at(50, 90, labels=GRAD),
        (29, 40),
    ),
    Case("the loss scale makes one in two thousand", nonfinite(Line().rise(90, by=0.05)), silent=(30, 90)),
    Case(
        "the loss scale settles in the first minute",
        (
            of("train_steps", Line().rise(60, by=5)),
            of("train_nonfinite_steps", Line().rise(3, by=4).hold(57), kind="grad"),
        ),
        silent=(2, 5, 10, 16, 19, 30),
    ),
    Case("stops by itself", nonfinite(Line().hold(30).rise(20, by=5).hold(40)), at(49, labels=GRAD), (80,)),
    Case(
        "all ranks count the same steps",
        (*nonfinite(Line().hold(30).rise(60, by=0.6)), *nonfinite(Line().hold(30).rise(60, by=0.6), rank=1)),
        silent=(45, 90),
    ),
    Case(
        "continues after a start in a new pod",
        (
            of("train_steps", Line().rise(30, by=100).end()),
            of("train_nonfinite_steps", Line().rise(30, by=5).end(), kind="grad"),
            of("train_steps", Line(after=33).rise(50, by=100), launch=2),
            of("train_nonfinite_steps", Line(after=33).rise(50, by=5), kind="grad", launch=2),
        ),
        at(29, 60, labels=GRAD),
    ),
    Case(
        "the counter restarts in the same pod",
        (
            of("train_steps", Line().rise(30, by=100).jump(0).rise(50, by=100)),
            of("train_nonfinite_steps", Line(40).hold(30).jump(0).hold(50), kind="grad"),
        ),
        silent=(31, 36, 60),
    ),
    Case(
        "ten scrapes are lost",
        (
            of("train_steps", Line().rise(30, by=100).gap(10).jump(4100).rise(40, by=100)),
            of("train_nonfinite_steps", Line().hold(30).gap(10).jump(0).rise(40, by=5), kind="grad"),
        ),
        at(65, labels=GRAD),
        (42,),
    ),
    Case(
        "ends",
        (
            of("train_steps", Line().rise(30, by=100).end()),
            of("train_nonfinite_steps", Line().rise(30, by=5).end(), kind="grad"),
        ),
        at(29, labels=GRAD),
        (50,),
    ),
    Case(
        "one of two runs",
        (*nonfinite(Line().hold(90), run="fine"), *nonfinite(Line().rise(90, by=5), "loss", run="sick")),
        at(30, labels=who("sick", kind="loss")),
    ),
    Case(
        "the same name in two namespaces",
        (*nonfinite(Line().hold(90), namespace="fine"), *nonfinite(Line().rise(90, by=5), namespace="sick")),
        at(30, labels=who(namespace="sick", kind="grad")),
    ),
)


def skipped(line: Line, **where: Any) -> tuple[Series, ...]:
    """Return series of steps and of masked steps."""
    return all_steps(**where), of("train_steps_skipped", line, **where)


STEPS_SKIPPED_HIGH = alert_cases(
    SKIPPED,
    Case("a quarter", skipped(Line().hold(30).rise(60, by=25)), at(45, 90), (29, 36)),
    Case("every one, from the first minute on", skipped(Line().rise(90, by=100)), at(13), (3, 8)),
    Case("one in twenty", skipped(Line().rise(90, by=5)), silent=(10, 45, 90)),
    Case(
        "the loss scale settles in the first minute",
        (of("train_steps", Line().rise(60, by=5)), of("train_steps_skipped", Line().rise(3, by=4).hold(57))),
        silent=(2, 5, 10, 12, 30),
    ),
    Case("none", skipped(Line().hold(90)), silent=(45, 90)),
    Case(
        "no step at all",
        (of("train_steps", Line().hold(60)), of("train_steps_skipped", Line().hold(60))),
        silent=(30, 60),
    ),
    Case(
        "restarts in a new pod and is finite",
        (
            *skipped(Line().rise(30, by=2).end()),
            of("train_steps", Line(after=33).rise(50, by=100), launch=2),
            of("train_steps_skipped", Line(after=33).hold(50), launch=2),
        ),
        silent=(29, 35, 40, 80),
    ),
    Case(
        "scrapes are lost, and it continues",
        (
            of("train_steps", Line().rise(30, by=100).gap(5).jump(3600).rise(40, by=100)),
            of("train_steps_skipped", Line().rise(30, by=50).gap(5).jump(1800).rise(40, by=50)),
        ),
        at(20, 60),
    ),
    Case(
        "ends",
        (of("train_steps", Line().rise(30, by=100).end()), of("train_steps_skipped", Line().rise(30, by=50).end())),
        at(29),
        (50,),
    ),
    Case(
        "one of two runs, in two namespaces",
        (
            *skipped(Line().hold(90), run="fine", namespace="fine"),
            *skipped(Line().rise(90, by=50), run="sick", namespace="sick"),
        ),
        at(30, labels=who("sick", "sick")),
    ),
)


def damaged(line: Line, minutes: int = 90, **where: Any) -> tuple[Series, ...]:
    """Return series of six hundred images per minute, and of images that could not be decoded."""
    images = of("train_images", Line().rise(minutes, by=600), **where)
    return images, of("train_samples_skipped", line, reason="decode", **where)


SAMPLES_SKIPPED_HIGH = alert_cases(
    SAMPLES,
    Case("one image in sixty", damaged(Line().hold(20).rise(70, by=10)), at(40, 90), (19, 22)),
    Case("one image in ten thousand", damaged(Line().rise(90, by=0.06)), silent=(30, 90)),
    Case("one image of a small set, once an epoch", damaged(Line().rise(90, by=0.32)), silent=(30, 90)),
    Case(
        "one bad minute: over after half an hour",
        damaged(Line().hold(20).rise(1, by=60).hold(69)),
        at(28, 48),
        (19, 53, 80),
    ),
    Case(
        "one rank of two reads a damaged shard",
        (*damaged(Line().hold(90)), *damaged(Line().hold(20).rise(70, by=10), rank=1)),
        at(40),
        (19,),
    ),
    Case("none", damaged(Line().hold(90)), silent=(30, 90)),
    Case(
        "continues after a start in a new pod",
        (
            *damaged(Line().rise(30, by=10).end(), 30),
            of("train_images", Line(after=33).rise(50, by=600), launch=2),
            of("train_samples_skipped", Line(after=33).rise(50, by=10), reason="decode", launch=2),
        ),
        at(29, 70),
        (4,),
    ),
    Case(
        "the counter restarts in the same pod",
        (
            of("train_images", Line().rise(30, by=600).jump(0).rise(50, by=600)),
            of("train_samples_skipped", Line(500).hold(30).jump(0).hold(50), reason="decode"),
        ),
        silent=(31, 40, 70),
    ),
    Case(
        "scrapes are lost, and it continues",
        (
            of("train_images", Line().rise(30, by=600).gap(9).jump(24000).rise(40, by=600)),
            of("train_samples_skipped", Line().rise(30, by=10).gap(9).jump(400).rise(40, by=10), reason="decode"),
        ),
        at(29, 70),
    ),
    Case(
        "ends",
        (
            of("train_images", Line().rise(30, by=600).end()),
            of("train_samples_skipped", Line().rise(30, by=10).end(), reason="decode"),
        ),
        at(29),
        (65, 80),
    ),
    Case(
        "one of two runs, in two namespaces",
        (
            *damaged(Line().hold(90), run="fine", namespace="fine"),
            *damaged(Line().rise(90, by=10), run="sick", namespace="sick"),
        ),
        at(40, labels=who("sick", "sick")),
    ),
)

CASES = (*NONFINITE_STEPS, *STEPS_SKIPPED_HIGH, *SAMPLES_SKIPPED_HIGH)
