"""`podscale monitor`: the real Prometheus, with Podscale's rules, for the runs of this machine."""

import time
from contextlib import suppress
from pathlib import Path

from podscale.monitoring.local import EVALUATION_SECONDS, Firing, LocalPrometheus, running
from podscale.stopping import Stopped
from podscale.text import count

LOOK_SECONDS = 1.0


def monitor(runs: Path, port: int) -> None:
    """Serves until Ctrl-C or SIGTERM, and tells which runs it follows and which alerts fire and end."""
    with suppress(KeyboardInterrupt, Stopped), running(runs, port) as prometheus:
        print(f"Prometheus at {prometheus.url}, with Podscale's rules; it follows the runs in {runs}", flush=True)
        print(f"its samples stay in {runs}/.prometheus; Ctrl-C ends it", flush=True)
        follow(prometheus)


def follow(prometheus: LocalPrometheus) -> None:
    """Looks again and again, and prints what is new."""
    followed: list[str] | None = None
    firing: set[Firing] = set()
    asked = 0.0
    while True:
        prometheus.check()
        found = prometheus.follow()
        if found != followed:
            print(f"{count(len(found), 'endpoint')}: {', '.join(found) or 'no run serves metrics now'}", flush=True)
            followed = found
        if time.monotonic() - asked > EVALUATION_SECONDS:
            asked = time.monotonic()
            firing = _tell(firing, prometheus)
        time.sleep(LOOK_SECONDS)


def _tell(before: set[Firing], prometheus: LocalPrometheus) -> set[Firing]:
    try:
        now = set(prometheus.alerts())
    except OSError:
        return before
    for alert in sorted(now - before, key=lambda alert: alert.name):
        print(f"ALERT {alert.name}: {alert.summary}", flush=True)
    for alert in sorted(before - now, key=lambda alert: alert.name):
        print(f"over  {alert.name}: {alert.summary}", flush=True)
    return now
