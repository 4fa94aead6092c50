"""From data to pixels: linear and logarithmic scales with round ticks."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """Maps low..high to start..end (pixels); logarithmic where `log`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        a, b, v = (math.log10(x) if self.log else x for x in (self.low, self.high, value))
        share = (v - a) / (b - a)
        return self.start + share * (self.end - self.start)

    def ticks(self, about: int = 5) -> list[float]:
        """Round values inside the range: powers of ten (with 2 and 5 where there are few), or steps of 1, 2, 5."""
        if not self.log:
            return linear_ticks(self.low, self.high, about)
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        factors = (1.0,) if last - first > 2 else (1.0, 2.0, 5.0)
        values = [f * 10.0**e for e in range(first, last + 1) for f in factors]
        return [v for v in values if self.low * 0.999 <= v <= self.high * 1.001]


def linear_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten inside [low, high], about `about` of them."""
    step = _round_step((high - low) / max(1, about))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def round_outwards(low: float, high: float, about: int = 5) -> tuple[float, float]:
    """The range widened to the next ticks; a point is given room around it."""
    if high <= low:
        room = abs(low) * 0.1 or 1.0
        low, high = low - room, high + room
    step = _round_step((high - low) / max(1, about))
    return math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(f * power for f in (1.0, 2.0, 5.0, 10.0) if step <= f * power * 1.0001)
