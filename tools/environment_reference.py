"""Write docs/reference/environment.md from podscale/util/env.py: `python tools/environment_reference.py`."""

from pathlib import Path

from podscale.util.env import VARIABLES, Variable

TARGET = Path(__file__).resolve().parent.parent / "docs" / "reference" / "environment.md"

HEAD = """# Environment variables

Variables that pass values between Podscale's processes and pods. Generated from `podscale/util/env.py` by
`tools/environment_reference.py`; a test keeps it true. Podscale sets all of them itself, in processes and pods that it
starts or in its images. Those that the user sets come last. `launch.cluster.env` refuses names that begin with
`PODSCALE_`, except `PODSCALE_WEB_RUNTIME`.

Launchers of pods (torchrun, JAXJob, TrainJob, TPU slices) have variables of their own, which
[tpu.md](../explanation/tpu.md) lists.

| variable | value | written by | read by | meaning |
|---|---|---|---|---|
"""


def row(variable: Variable) -> str:
    return "| `{}` | {} | {} | {} | {} |\n".format(variable.name, *variable[1:])


def render() -> str:
    """Return the page."""
    return HEAD + "".join(map(row, VARIABLES))


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
