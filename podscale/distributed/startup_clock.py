"""Clock of a launch's start: how long its supervisor, imports, rendezvous and model build took.

Each process on the way to a rank ends the parts that it knows and hands the clock to its child in the environment: the
supervisor, the fork launcher or torchrun, the rank. Parts follow each other without a gap, so that their sum is the age
of the launch. Processes of one machine share the monotonic clock.
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from podscale.errors import InputError
from podscale.telemetry.catalogue import STARTUP_PARTS
from podscale.util import env, processes


def process_start() -> float:
    """Return the start of this process on the monotonic clock, seconds."""
    return time.monotonic() - processes.process_age()


@dataclass
class StartupClock:
    """Seconds of the parts that have ended, by name, and the start of the launch on the monotonic clock, seconds."""

    started_at: float = field(default_factory=process_start)
    seconds: dict[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> "StartupClock":
        """Read the clock of the parent process; a new one if there is none, or if torchrun restarted the rank."""
        started_at = env.read_seconds(env.LIFE_BEGAN, environ)
        if started_at is None or env.read_number(env.TORCHELASTIC_RESTART_COUNT, environ):
            return cls()
        try:
            seconds = json.loads(environ.get(env.STARTUP, "{}"))
        except ValueError:
            raise InputError("not JSON", field=env.STARTUP, got=environ[env.STARTUP]) from None
        return cls(started_at, {part: float(value) for part, value in seconds.items()})

    def variables(self) -> dict[str, str]:
        """Return the environment variables that `read` reads."""
        return {env.LIFE_BEGAN: str(self.started_at), env.STARTUP: json.dumps(self.seconds)}

    def age(self) -> float:
        """Return the seconds since the launch began."""
        return max(0.0, time.monotonic() - self.started_at)

    def end_part(self, part: str) -> None:
        """Add the time since the end of the previous part to `part`, one of STARTUP_PARTS."""
        assert part in STARTUP_PARTS, part
        elapsed = self.age() - sum(self.seconds.values())
        self.seconds[part] = self.seconds.get(part, 0.0) + max(0.0, elapsed)
