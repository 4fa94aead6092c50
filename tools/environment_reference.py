"""Write docs/reference/environment.md from podscale/util/env.py: `python tools/environment_reference.py`."""

from pathlib import Path

from podscale.util.env import OTHER_VARIABLES, VARIABLES, Variable

TARGET = Path(__file__).resolve().parent.parent / "docs" / "reference" / "environment.md"

HEAD = """# Environment variables

Variables that pass values between Podscale's processes and pods. Generated from `podscale/util/env.py` by
`tools/environment_reference.py`; a test keeps it true. Podscale sets all of them itself, in processes and pods that it
starts or in its images, but for those of the user, which come last. `launch.cluster.env` refuses names that begin with
`PODSCALE_`, except `PODSCALE_WEB_RUNTIME`.

Launchers of pods (torchrun, JAXJob, TrainJob, TPU slices) have variables of their own, which
[tpu.md](../explanation/tpu.md) lists.

"""

OTHERS = """
## Names of other programs

PyTorch, OpenMP and Kubeflow have these names. Podscale's processes read or write them too. `launch.cluster.env` refuses
RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.

"""

COLUMNS = """| variable | value | written by | read by | meaning |
|---|---|---|---|---|
"""


def row(variable: Variable) -> str:
    return "| `{}` | {} | {} | {} | {} |\n".format(variable.name, *variable[1:])


def render() -> str:
    """Return the page."""
    return HEAD + COLUMNS + "".join(map(row, VARIABLES)) + OTHERS + COLUMNS + "".join(map(row, OTHER_VARIABLES))


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
