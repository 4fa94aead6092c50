"""Building blocks of rule test cases: lines of samples one minute apart, catalogue series, expected alerts."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from podscale.telemetry.catalogue import CATALOGUE

Series = tuple[str, str]
Labels = Mapping[str, str]
FOREIGN = {
    "up",
    "scrape_samples_post_metric_relabeling",
    "kube_pod_status_phase",
    "DCGM_FI_DEV_XID_ERRORS",
    "DCGM_FI_DEV_GPU_TEMP",
}
"""Third-party series that the rules use."""


class Line:
    """Samples from minute 0 on: `Line().rise(10, by=600).hold(30)` rises until minute 10 and is constant until 40."""

    def __init__(self, start: float = 0, *, after: int = 0) -> None:
        """Begin with the sample `start` in minute `after`; there are no earlier samples."""
        self.samples: list[float | str] = [*(["_"] * after), start]
        self._last = start

    def rise(self, minutes: int, *, by: float) -> "Line":
        for _ in range(minutes):
            self._add(self._last + by)
        return self

    def hold(self, minutes: int) -> "Line":
        return self.rise(minutes, by=0)

    def jump(self, to: float) -> "Line":
        """Add one sample in the next minute: a counter that restarts, or a gauge that changes."""
        self._add(to)
        return self

    def gap(self, minutes: int) -> "Line":
        """Skip scrapes; the value continues to change only if `jump` follows."""
        self.samples += ["_"] * minutes
        return self

    def end(self) -> "Line":
        """End the series, because the target is gone."""
        self.samples.append("stale")
        return self

    def times_of_rises(self) -> "Line":
        """Return the line of times (seconds) at which this line last rose: the timestamp gauge of a counter."""
        line = Line()
        before, when = 0.0, 0.0
        line.samples = []
        for minute, sample in enumerate(self.samples):
            if isinstance(sample, str):
                line.samples.append(sample)
                continue
            when = minute * 60.0 if sample > before else when
            before = sample
            line.samples.append(when)
        return line

    def __str__(self) -> str:
        return " ".join(sample if isinstance(sample, str) else f"{sample:.10g}" for sample in self.samples)

    def _add(self, value: float) -> None:
        self._last = value
        self.samples.append(value)


def of(
    name: str,
    line: Line,
    *,
    run: str = "digits",
    namespace: str = "podscale",
    rank: int = 0,
    launch: int = 1,
    **labels: str,
) -> Series:
    """Return a catalogue series as Prometheus stores it, with the labels of its target (new in each launch)."""
    entry = CATALOGUE[name]
    series_labels = {"run": run} | ({"rank": str(rank)} if "rank" in entry.labels else {}) | labels
    assert set(series_labels) == set(entry.labels), f"{name} has the labels {entry.labels}"
    assert all(labels[label] in values for label, values in entry.own_labels.items() if values), f"{name}: {labels}"
    return selector(entry.series, {**target(run, namespace, rank, launch), **series_labels}), str(line)


def build_info(
    line: Line, *, run: str = "digits", namespace: str = "podscale", rank: int = 0, launch: int = 1
) -> Series:
    """Return the build info of a pod."""
    labels = {**target(run, namespace, rank, launch), "run": run, "version": "1"}
    return selector(CATALOGUE["build_info"].series, labels), str(line)


def foreign(name: str, line: Line, **labels: str) -> Series:
    """Return a third-party series with exactly these labels."""
    assert name in FOREIGN
    return selector(name, labels), str(line)


def target(run: str = "digits", namespace: str = "podscale", rank: int = 0, launch: int = 1) -> dict[str, str]:
    """Return the labels of a pod's target; its address differs in each launch."""
    address = {"namespace": namespace, "pod": f"{run}-worker-{rank}"} if namespace else {}
    return {**address, "job": "podscale", "instance": f"{run}-{rank}-{launch}:9400"}


def selector(name: str, labels: Labels) -> str:
    return name + "{" + ", ".join(f'{key}="{value}"' for key, value in sorted(labels.items())) + "}"


def who(run: str = "digits", namespace: str = "podscale", **labels: str) -> Labels:
    """Return the labels of a result."""
    return {"run": run, **({"namespace": namespace} if namespace else {}), **labels}


DIGITS = who()


@dataclass(frozen=True)
class Case:
    """An alert over time: minutes at which it fires for exactly these labels, and minutes at which it is silent.

    Args:
        alert: set by `alert_cases`.
    """

    says: str
    series: tuple[Series, ...]
    fires: Mapping[int, tuple[Labels, ...]] = field(default_factory=dict)
    silent: tuple[int, ...] = ()
    alert: str = ""

    def __post_init__(self) -> None:
        assert self.fires or self.silent


def alert_cases(alert: str, *cases: Case) -> tuple[Case, ...]:
    """Return the cases of one alert."""
    return tuple(replace(case, alert=alert) for case in cases)


def at(*minutes: int, labels: Labels = DIGITS) -> dict[int, tuple[Labels, ...]]:
    """Return the expectation that the alert fires for one run at these minutes."""
    return dict.fromkeys(minutes, (labels,))


@dataclass(frozen=True)
class Recorded:
    """A recording rule over time: all its samples at these minutes."""

    record: str
    says: str
    series: tuple[Series, ...]
    gives: Mapping[int, tuple[tuple[Labels, float], ...]]
