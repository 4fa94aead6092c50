"""Write manifests/jobs/: what `podscale render` prints for the presets, for every kind of job, and for the hardware.

    python tools/job_manifests.py

Each file begins with the command that prints it. A test keeps them true.
"""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from podscale import config
from podscale.cli.documents import parse_stages, render_stages
from podscale.kubernetes.render.common import to_yaml
from podscale.pipelines import presets

TARGET = Path(__file__).resolve().parent.parent / "manifests" / "jobs"
VOLUME = ("run.workspace=/workspace", "launch.cluster.workspace_claim=podscale-workspace")
"""Every run needs a volume; the chart makes one of this name."""
WHOLE = ("launch.nodes=2", "launch.processes=8")
DIRECT = (*WHOLE, "launch.cluster.network=gpudirect")
JAX = ("train.engine=jax", "launch.image=podscale-tpu:latest")
GPU = ("launch.image=podscale-gpu:latest",)
ONE_RANK = ("launch.processes=1", "launch.nodes=1", "launch.resources.cpus=0", "launch.resources.memory_gib=0")
"""What a preset for machines with eight GPUs needs on TPUs: their number of machines follows from the slice."""


@dataclass(frozen=True)
class Case:
    """One file: a preset, how it is carried out, and changed options."""

    file: str
    preset: str
    backend: str
    changes: tuple[str, ...] = ()
    stage: str = "train"

    @property
    def command(self) -> str:
        """Command that a person types for it."""
        options = [option for change in (*VOLUME, *self.changes) for option in ("--set", change)]
        stage = ["--stage", self.stage] if self.stage != "train" else []
        return shlex.join(["podscale", "render", self.preset, "--backend", self.backend, *stage, *options])

    def render(self) -> str:
        """The file's content."""
        document = config.load(presets.resolve_preset(self.preset), (*VOLUME, *self.changes))
        return f"# {self.command}\n{to_yaml(render_stages(document, parse_stages(self.stage), self.backend))}"


def cases() -> list[Case]:
    """Every file of manifests/jobs/."""
    two = ("launch.nodes=2", "launch.processes=1")
    found = [_of_preset(name) for name in presets.preset_names() if name != "digits"]
    found += [Case(f"digits.{kind}.yaml", "digits", kind, two) for kind in ("pytorchjob", "trainjob", "jobset")]
    found.append(Case("digits.jaxjob.yaml", "digits", "jaxjob", (*two, *JAX)))
    found.append(Case("digits.jax.jobset.yaml", "digits", "jobset", (*two, *JAX)))
    found += [Case(f"digits.{stage}.yaml", "digits", "job", two, stage) for stage in ("shard", "evaluate", "report")]
    found.append(Case("digits.elastic.yaml", "digits", "pytorchjob", ("launch.nodes=2", "launch.cluster.min_nodes=1")))
    found += _gpus() + _tpus()
    return found


def _of_preset(name: str) -> Case:
    """A preset as it is: a JobSet on TPUs, else a PyTorchJob."""
    engine = config.load(presets.resolve_preset(name)).train.engine
    kind = "jobset" if engine == "jax" else "pytorchjob"
    return Case(f"{name}.{kind}.yaml", name, kind)


def _gpus() -> list[Case]:
    """One preset on the GPUs of GKE, with what goes with each."""
    l4 = ("launch.hardware=nvidia-l4", "launch.nodes=8", "launch.cluster.spot=true", "launch.cluster.local_ssd=true")
    queued = ("launch.cluster.queue=training", "launch.cluster.topology=preferred")
    chosen = {
        "nvidia-l4.trainjob": (*l4, *ONE_RANK[:1], *ONE_RANK[2:]),
        "nvidia-h100-80gb.tcpx.jobset": ("launch.hardware=nvidia-h100-80gb x8", *DIRECT),
        "nvidia-h100-mega-80gb.tcpxo.jobset": ("launch.hardware=nvidia-h100-mega-80gb x8", *DIRECT),
        "nvidia-h200-141gb.rdma.jobset": ("launch.hardware=nvidia-h200-141gb x8", *DIRECT),
        "nvidia-b200.queued.jobset": ("launch.hardware=nvidia-b200 x8", *WHOLE, *queued),
    }
    return [
        Case(f"hardware/{name}.yaml", "mlperf-8xh100", name.rpartition(".")[2], (*changes, *GPU))
        for name, changes in chosen.items()
    ]


def _tpus() -> list[Case]:
    """TPU slices of one and of several machines, and several slices."""
    chosen = {
        "tpu-v5e-2x2.jobset": ("launch.hardware=tpu-v5e-2x2",),
        "tpu-v5e-4x4.trainjob": ("launch.hardware=tpu-v5e-4x4",),
        "tpu-v6e-8x8.jobset": ("launch.hardware=tpu-v6e-8x8",),
        "tpu-v5e-16x16.slices.jobset": ("launch.hardware=tpu-v5e-16x16", "launch.cluster.slices=4"),
    }
    return [
        Case(
            f"hardware/{name}.yaml",
            "mlperf-4096xtpuv4",
            name.rpartition(".")[2],
            (*changes, *ONE_RANK, *JAX, "input.loader=auto"),
        )
        for name, changes in chosen.items()
    ]


def main() -> None:
    written = set()
    for case in cases():
        path = TARGET / case.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(case.render(), encoding="utf-8")
        written.add(path)
    for path in set(TARGET.rglob("*.yaml")) - written:
        path.unlink()
    print(f"{len(written)} files in {TARGET}", file=sys.stderr)


if __name__ == "__main__":
    main()
