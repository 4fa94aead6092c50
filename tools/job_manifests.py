"""Write manifests/jobs/: output of `podscale render` for the presets, every kind of job, and the hardware.

    python tools/job_manifests.py

Each file begins with its command. A test compares the files with the current output.
"""

import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from podscale import config
from podscale.api.cluster import parse_stages
from podscale.cli.documents import SERVE, render_server, render_stages
from podscale.cli.options import ServerOptions
from podscale.cli.predict import PredictionOptions, render_prediction
from podscale.kubernetes.render.common import to_yaml
from podscale.pipelines import presets

TARGET = Path(__file__).resolve().parent.parent / "manifests" / "jobs"
VOLUME = ("run.workspace=/workspace", "launch.cluster.workspace_claim=podscale-workspace")
"""Volume of every run, as created by the chart."""
FULL_MACHINES = ("launch.nodes=2", "launch.processes=8")
DIRECT = (*FULL_MACHINES, "launch.cluster.network=gpudirect")
JAX = ("train.engine=jax", "launch.image=podscale-tpu:latest")
GPU = ("launch.image=podscale-gpu:latest",)
ONE_RANK = ("launch.processes=1", "launch.nodes=1", "launch.resources.cpus=0", "launch.resources.memory_gib=0")
"""Changes to a preset for machines with eight GPUs: on TPUs the number of machines follows from the slice."""
NO_PREDICTION = PredictionOptions()
DEFAULT_SERVER = ServerOptions()


@dataclass(frozen=True)
class Case:
    """File of manifests/jobs/: preset, backend and changed options."""

    file: str
    preset: str
    backend: str
    changes: tuple[str, ...] = ()
    stage: str = "train"
    prediction: PredictionOptions = NO_PREDICTION
    server: ServerOptions = DEFAULT_SERVER

    @property
    def command(self) -> str:
        options = [option for change in (*VOLUME, *self.changes) for option in ("--set", change)]
        stage = ["--stage", self.stage] if self.stage != "train" else []
        images = [word for image in self.prediction.images or () for word in ("--images", image)]
        numbers = {"--parts": self.prediction.parts, "--parallel": self.prediction.parallel}
        images += [word for name, number in numbers.items() if number is not None for word in (name, str(number))]
        named = {name: value for name, value in vars(self.server).items() if value != getattr(DEFAULT_SERVER, name)}
        server = [part for name, value in named.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        words = ["podscale", "render", self.preset, "--backend", self.backend]
        return shlex.join([*words, *stage, *images, *server, *options])

    def render(self) -> str:
        document = config.load(presets.resolve_preset(self.preset), (*VOLUME, *self.changes))
        if self.stage == SERVE:
            return f"# {self.command}\n{to_yaml(render_server(document, self.backend, self.server))}"
        if (job := self.prediction.job(self.stage)) is not None:
            return f"# {self.command}\n{to_yaml(render_prediction(document, job, from_cluster=False))}"
        return f"# {self.command}\n{to_yaml(render_stages(document, parse_stages(self.stage), self.backend))}"


def cases() -> list[Case]:
    """Return every file of manifests/jobs/."""
    two = ("launch.nodes=2", "launch.processes=1")
    cases = [_preset_case(name) for name in presets.preset_names() if name != "digits"]
    cases += [Case(f"digits.{kind}.yaml", "digits", kind, two) for kind in ("pytorchjob", "trainjob", "jobset")]
    cases.append(Case("digits.jaxjob.yaml", "digits", "jaxjob", (*two, *JAX)))
    cases.append(Case("digits.jax.jobset.yaml", "digits", "jobset", (*two, *JAX)))
    cases += [Case(f"digits.{stage}.yaml", "digits", "job", two, stage) for stage in ("shard", "evaluate", "report")]
    cases.append(Case("digits.elastic.yaml", "digits", "pytorchjob", ("launch.nodes=2", "launch.cluster.min_nodes=1")))
    images = PredictionOptions(images=["/workspace/photos", "gs://bucket/more.tar"], parts=8, parallel=4)
    cases.append(Case("digits.predict.yaml", "digits", "job", two, "predict", images))
    l4 = ("launch.hardware=nvidia-l4", "launch.processes=1", *GPU)
    cases.append(Case("digits.predict-gpu.yaml", "digits", "job", l4, "predict", images))
    cases += _gpus() + _tpus() + _servers()
    return cases


def _preset_case(name: str) -> Case:
    """Return the case of a preset without changes: a JobSet on TPUs, else a PyTorchJob."""
    engine = config.load(presets.resolve_preset(name)).train.engine
    kind = "jobset" if engine == "jax" else "pytorchjob"
    return Case(f"{name}.{kind}.yaml", name, kind)


def _gpus() -> list[Case]:
    """Return cases of a preset on the GPUs of GKE, with their networks and queues."""
    l4 = ("launch.hardware=nvidia-l4", "launch.nodes=8", "launch.cluster.spot=true", "launch.cluster.local_ssd=true")
    queued = ("launch.cluster.queue=training", "launch.cluster.topology=preferred")
    changes_of = {
        "nvidia-l4.trainjob": (*l4, *ONE_RANK[:1], *ONE_RANK[2:]),
        "nvidia-h100-80gb.tcpx.jobset": ("launch.hardware=nvidia-h100-80gb x8", *DIRECT),
        "nvidia-h100-mega-80gb.tcpxo.jobset": ("launch.hardware=nvidia-h100-mega-80gb x8", *DIRECT),
        "nvidia-h200-141gb.rdma.jobset": ("launch.hardware=nvidia-h200-141gb x8", *DIRECT),
        "nvidia-b200.queued.jobset": ("launch.hardware=nvidia-b200 x8", *FULL_MACHINES, *queued),
    }
    return [
        Case(f"hardware/{name}.yaml", "mlperf-8xh100", name.rpartition(".")[2], (*changes, *GPU))
        for name, changes in changes_of.items()
    ]


def _tpus() -> list[Case]:
    """Return cases of TPU slices of one and of several machines, and of several slices."""
    changes_of = {
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
        for name, changes in changes_of.items()
    ]


def _servers() -> list[Case]:
    """Return cases of servers of a run's model."""
    scaled = ServerOptions(replicas=2, max_replicas=8)
    claimed = replace(scaled, model="/workspace/models")
    stored = ServerOptions(model="gs://bucket/models", serving_runtime="kserve-tritonserver")
    gpu = ("launch.hardware=nvidia-l4", *ONE_RANK[:2], *GPU)
    return [
        Case("serve/digits.deployment.yaml", "digits", "deployment", stage=SERVE, server=scaled),
        Case("serve/imagenette.gpu.deployment.yaml", "imagenette", "deployment", gpu, SERVE),
        Case("serve/digits.kserve.yaml", "digits", "kserve", stage=SERVE, server=claimed),
        Case("serve/imagenette.triton.kserve.yaml", "imagenette", "kserve", stage=SERVE, server=stored),
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
