"""How long a rank waits for an update before it calls it a hang: learned from the updates there were."""

from collections.abc import Iterator

from podscale.telemetry.registry import MetricSample

P99_MULTIPLE = 10.0
"""So often as long as an update takes, but for the slowest in a hundred, is no longer a matter of noise."""
MIN_STEPS = 10
WINDOW_STEPS = 256


class HangLimit:
    """`most` seconds until some updates are known, then `TIMES` their 99th percentile between `least` and `most`.

    Times are added by one thread, the limit is read by others, about once a second.
    """

    def __init__(self, min_seconds: float, max_seconds: float) -> None:
        self._min_seconds, self._max_seconds = min(min_seconds, max_seconds), max_seconds
        self._recent: list[float] = []
        self._added = 0

    def add(self, seconds: float) -> None:
        """An update took `seconds`."""
        if len(self._recent) < WINDOW_STEPS:
            self._recent.append(seconds)
        else:
            self._recent[self._added % WINDOW_STEPS] = seconds
        self._added += 1

    @property
    def seconds(self) -> float:
        """The limit of this moment."""
        recent = sorted(self._recent)
        if len(recent) < MIN_STEPS:
            return self._max_seconds
        return min(self._max_seconds, max(self._min_seconds, P99_MULTIPLE * recent[(len(recent) - 1) * 99 // 100]))

    def samples(self) -> Iterator[MetricSample]:
        """What is exported."""
        yield "train_hang_limit_seconds", (), self.seconds
