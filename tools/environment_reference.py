"""Write docs/reference/environment.md from podscale/util/env.py: `python tools/environment_reference.py`."""

from pathlib import Path

from podscale.util.env import VARIABLES, Variable

TARGET = Path(__file__).resolve().parent.parent / "docs" / "reference" / "environment.md"

HEAD = """# Environment variables

The environment variables that Podscale reads and writes. Generated from `podscale/util/env.py` by
`tools/environment_reference.py`; a test compares them.

Only the last two are for users. Podscale sets the others in processes and pods that it starts, or in its images.
`launch.cluster.env` refuses names that begin with `PODSCALE_`. [tpu.md](../explanation/tpu.md#how-processes-start)
lists the variables of torchrun, JAXJob, TrainJob and TPU slices.

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
