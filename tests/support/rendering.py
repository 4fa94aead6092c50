"""Rendered jobs for tests: a preset with a volume."""

from podscale.config import RunConfig, load
from podscale.kubernetes.job_spec import JobSpec, build_job_spec
from podscale.kubernetes.render import JobManifests, render_job
from podscale.pipelines import presets
from podscale.runs.stage_outcomes import StageName
from tests.support.pods import Pods, pods_of

VOLUME = ("run.workspace=/workspace", "launch.cluster.workspace_claim=podscale")
TWO = ("launch.nodes=2", "launch.processes=1")


def document(preset: str, *changes: str) -> RunConfig:
    return load(presets.resolve_preset(preset), [*VOLUME, *changes])


def spec(*changes: str, preset: str = "digits", stage: StageName = "train") -> JobSpec:
    """Return the job spec of a preset on a volume, with changed options."""
    return build_job_spec(document(preset, *changes), stage)


def rendered(backend: str, *changes: str, preset: str = "digits", stage: StageName = "train") -> JobManifests:
    return render_job(spec(*changes, preset=preset, stage=stage), backend)


def pods(backend: str, *changes: str, preset: str = "digits", stage: StageName = "train") -> Pods:
    return pods_of(rendered(backend, *changes, preset=preset, stage=stage))
