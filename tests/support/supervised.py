"""The supervisor of a stage as a process of its own, with ranks that need no framework (tests/system/programs)."""

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = Path(__file__).resolve().parents[1] / "system" / "programs"
SUPERVISE = """
import functools, sys
from podscale import stages
from podscale.config import load
from podscale.errors import PodscaleError
from podscale.launch import supervisor

supervisor.supervise = functools.partial(supervisor.supervise, rank_module=sys.argv[1])
try:
    stages.train(load(None, sys.argv[2:]), "memory://nowhere")
except PodscaleError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(int(error.exit_code))
"""


@dataclass
class Run:
    """A supervisor process and the run directory it works in."""

    process: subprocess.Popen[str]
    place: Path

    def end(self, seconds: float = 180) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, err

    def outcome(self) -> dict[str, object]:
        entry: dict[str, object] = json.loads((self.place / "outcome.json").read_text())["train"]
        return entry

    def wait_for(self, condition: Callable[[], bool], seconds: float = 180) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def wait_for_ranks(self, count: int) -> None:
        self.wait_for(lambda: len(list(self.place.glob("ready-*"))) == count)

    def members(self) -> list[int]:
        """Every process that descends from this run, by its environment."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    environment = (entry / "environ").read_bytes()
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                except OSError:
                    continue
                if f"PLAIN_PLACE={self.place}".encode() in environment and state not in "ZX":
                    found.append(int(entry.name))
        return found


Launch = Callable[..., Run]
"""launch(*options, module=..., variables=..., **behaviour): see the fixture in tests/system."""
