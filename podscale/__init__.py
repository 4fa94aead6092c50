"""Podscale: train image classifiers at supercomputer scale on Kubernetes, and on this machine.

    import podscale

    run = podscale.run("digits")
    print(run.evaluation.scores.top1)

The names below load on first use, so that `import podscale` is fast.
"""

from typing import TYPE_CHECKING, Any

from podscale.version import VERSION as __version__

if TYPE_CHECKING:
    from podscale.api.cluster import ClusterRun, JobStatus, attach, submit
    from podscale.api.documents import load
    from podscale.api.pipeline import run
    from podscale.api.predictions import predict
    from podscale.api.results import Run
    from podscale.api.stages import evaluate, shard, train, write_report
    from podscale.config.run_config import RunConfig
    from podscale.errors import HangDetected, InputError, PeerLost, PodscaleError, Preempted
    from podscale.evaluation.evaluation_json import Evaluation
    from podscale.prediction.predictor import Prediction
    from podscale.stages.local import ShardResult

__all__ = [
    "ClusterRun",
    "Evaluation",
    "HangDetected",
    "InputError",
    "JobStatus",
    "PeerLost",
    "PodscaleError",
    "Prediction",
    "Preempted",
    "Run",
    "RunConfig",
    "ShardResult",
    "__version__",
    "attach",
    "evaluate",
    "load",
    "predict",
    "run",
    "shard",
    "submit",
    "train",
    "write_report",
]

_MODULES = {
    "ClusterRun": "podscale.api.cluster",
    "Evaluation": "podscale.evaluation.evaluation_json",
    "HangDetected": "podscale.errors",
    "InputError": "podscale.errors",
    "JobStatus": "podscale.api.cluster",
    "PeerLost": "podscale.errors",
    "PodscaleError": "podscale.errors",
    "Prediction": "podscale.prediction.predictor",
    "Preempted": "podscale.errors",
    "Run": "podscale.api.results",
    "RunConfig": "podscale.config.run_config",
    "ShardResult": "podscale.stages.local",
    "attach": "podscale.api.cluster",
    "evaluate": "podscale.api.stages",
    "load": "podscale.api.documents",
    "predict": "podscale.api.predictions",
    "run": "podscale.api.pipeline",
    "shard": "podscale.api.stages",
    "submit": "podscale.api.cluster",
    "train": "podscale.api.stages",
    "write_report": "podscale.api.stages",
}
"""Module of each name that loads on first use."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
