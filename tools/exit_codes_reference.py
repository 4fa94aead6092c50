"""Write docs/reference/exit-codes.md from podscale/errors.py: `python -m tools.exit_codes_reference`."""

from pathlib import Path
from typing import NamedTuple

from podscale.errors import ExitCode, HangDetected, InputError, PeerLost, PodscaleError, Preempted
from podscale.runs.stage_outcomes import EXIT_INTERRUPTED

TARGET = Path(__file__).resolve().parents[1] / "docs" / "reference" / "exit-codes.md"

ERRORS: dict[int, type[PodscaleError] | None] = {
    ExitCode.DONE: None,
    ExitCode.FAILED: PodscaleError,
    ExitCode.BAD_INPUT: InputError,
    ExitCode.PREEMPTED: Preempted,
    ExitCode.HANG: HangDetected,
    ExitCode.PEER_LOST: PeerLost,
    EXIT_INTERRUPTED: None,
}
"""Exception of each exit code; None if there is none."""


class Text(NamedTuple):
    """Meaning of a code, and what the user does."""

    meaning: str
    action: str = ""


TEXTS = {
    ExitCode.DONE: Text("Done."),
    ExitCode.FAILED: Text(
        "Failed.", "Read the error; `pipeline.log` and `logs/` of the run directory have everything."
    ),
    ExitCode.BAD_INPUT: Text(
        "Bad input: document, data or machine. Nothing was started.", "Change what the message names."
    ),
    ExitCode.PREEMPTED: Text("Stopped on request (SIGTERM), after saving.", "The same command continues."),
    ExitCode.HANG: Text(
        "Hang detected.", "The same command continues; `hang/` of the run directory has the stack of each rank."
    ),
    ExitCode.PEER_LOST: Text("Another rank exited or cannot be reached.", "The same command continues."),
    EXIT_INTERRUPTED: Text("Interrupted (Ctrl-C); training saved first.", "The same command continues."),
}

HEAD = """# Exit codes

Every command and every stage exits with one of these codes. Generated from `podscale/errors.py` by
`tools/exit_codes_reference.py`; a test keeps it true.

| code | meaning | what to do | exception |
|---|---|---|---|
"""

TAIL = """
## Errors

An error that a user can act on is one line, `location: field: problem (got X). What to do.`, without a traceback:

```
podscale: run.yaml:3: train.epochs: not a number (got 'ten')
```

Any other exception is a bug, exits with 1 and keeps its traceback. `outcome.json` of the run directory has the code and
the error of each stage's newest launch ([files](files.md#run-directory)).

## Signals

The first Ctrl-C or SIGTERM lets the running stage save, and the second ends it at once. A stop that arrives during an
evaluation in the middle of the training waits until that ends. Stages that have nothing to save end at once. `kill -9`
is safe too: what is complete on disk stays, and nothing keeps running.

## Restarts

On one node, the supervisor of a training restarts a lost rank's launch from the newest checkpoint, up to
`launch.max_restarts` times. On a cluster the operator restarts the job, up to `launch.cluster.restarts` times; a stage
that exits with code 2 ends its job at once, because no restart can help. After a failure (1), such as that of a
GPU, only a cluster restarts. A pod whose job is abandoned by its pipeline (`launch.cluster.launcher_grace_minutes`)
exits with 0, so that no operator restarts it. Its termination message has the code 75, and `podscale status RUN` shows
the job as failed.
"""


def render() -> str:
    """Return the page."""
    codes = {*map(int, ExitCode), EXIT_INTERRUPTED}
    assert codes == set(TEXTS) == set(ERRORS), f"TEXTS, ERRORS: each code once (got {codes ^ set(TEXTS)})"
    return HEAD + "".join(map(_row, sorted(codes))) + TAIL


def _row(code: int) -> str:
    error, text = ERRORS[code], TEXTS[code]
    name = "" if error is None else f"`{error.__name__}`"
    assert error is None or error.exit_code == code, f"ERRORS: another code is {name}'s (got {code})"
    return f"| {code} | {text.meaning} | {text.action} | {name} |\n"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
