"""Run one drill: calm, fault, alert, Podscale's reaction, calm again, with the time of each."""

import time
from dataclasses import dataclass

from tests.system.drills.faults import ASIDE, Drill, Expected
from tests.system.drills.scene import RUN, Scene, Seen


@dataclass(frozen=True)
class Fired:
    """Seconds from the fault until the alert's condition held, and until it fired."""

    expected: Expected
    pending: float
    firing: float


@dataclass(frozen=True)
class Found:
    """Result of a drill.

    Args:
        before: value of the series before the fault; `during`: while the alert fires.
        itself: Podscale's reaction, for the page.
        over: seconds from the end of the fault to the end of the alerts; None if not awaited.
        besides: names of other alerts that fired, all of them allowed.
    """

    drill: Drill
    before: float
    during: float
    fired: tuple[Fired, ...]
    itself: str
    over: float | None
    besides: tuple[str, ...]


def run_drill(drill: Drill, scene: Scene) -> Found:
    """Run the drill. Fails if an alert does not fire with its labels or does not resolve, or if another fires."""
    scene.calm(drill.shorten, tuple(ASIDE))
    scene.until(lambda: scene.value(drill.query) is not None, drill.series)
    before = scene.value(drill.query)
    begun = time.time()
    with drill.inject(scene) as struck:
        since = struck or begun
        scene.until(lambda: all(_fired(one, scene, begun) for one in drill.alerts), f"{drill.name}: its alerts fire")
        during = scene.value(drill.query)
        itself = drill.itself(scene, since)
    lifted = time.time()
    scene.start_if_ended()
    if drill.resolves:
        scene.until(lambda: not any(_fires(one, scene) for one in drill.alerts), f"{drill.name}: its alerts end")
    over = time.time() - lifted if drill.resolves else None
    scene.goes_on()
    assert before is not None
    assert during is not None, drill.series
    fired = [_fired(one, scene, begun) for one in drill.alerts]
    times = [Fired(one, it.active - since, it.firing - since) for one, it in zip(drill.alerts, fired, strict=True)]
    return Found(drill, before, during, tuple(times), itself, over, _besides(drill, scene, begun))


def _fired(expected: Expected, scene: Scene, since: float) -> Seen | None:
    """Return the alert that fired first, or None."""
    seen = [seen for seen in scene.seen(since) if seen.firing is not None and _is(expected, seen)]
    return min(seen, key=lambda one: one.firing, default=None)


def _fires(expected: Expected, scene: Scene) -> bool:
    return any(seen.firing is not None and _is(expected, seen) for seen in scene.now)


def _is(expected: Expected, seen: Seen) -> bool:
    expected_labels = {"alertname": expected.alert, "run": RUN, "severity": expected.rule.severity, **expected.labels}
    return seen.labels == expected_labels


def _besides(drill: Drill, scene: Scene, since: float) -> tuple[str, ...]:
    others = [
        seen
        for seen in scene.seen(since)
        if seen.firing is not None and not any(_is(expected, seen) for expected in drill.alerts)
    ]
    unexpected = [seen.labels for seen in others if seen.name not in {**ASIDE, **drill.besides}]
    assert not unexpected, f"{drill.name}: {unexpected} fired too"
    return tuple(sorted({seen.name for seen in others}))
