"""Experiment of Katib (kubeflow.org/v1beta1) whose trials are the trials of a study.

A trial is a Job whose one pod trains, as in the pipeline of a study: the trials of studies are small, such a pod needs
no rights on the cluster, and Katib stops the training when it deletes the Job. Katib replaces ${trialParameters.NAME}
in the Job, reads the result from the pod's output, and chooses the next parameters.
"""

from dataclasses import dataclass, replace
from typing import Any

from podscale.config import RunConfig
from podscale.errors import InputError
from podscale.kubernetes.client import ClusterClient
from podscale.kubernetes.job_spec import RUN_LABEL, build_job_spec
from podscale.kubernetes.render import render_job
from podscale.kubernetes.resources import STAGE_CONTAINERS, ResourceKind
from podscale.pipelines.study_pipeline import as_pod_config
from podscale.study import StudyDocument
from podscale.study.experiment_trial import LOSS, OBJECTIVE
from podscale.study.grid import TrialGrid
from podscale.study.search_space import RATE_FACTOR, SearchParameter, count_choices, search_space
from podscale.util import env

EXPERIMENTS = ResourceKind("kubeflow.org", "v1beta1", "Experiment", "experiments")
KATIB_VERSION = "0.19"
"""Version whose API was read."""
MAX_NAME_LENGTH = 40
"""Longest name of an Experiment that Katib accepts."""
MAX_FAILED_TRIALS = 3
GRID = "grid"
TRIAL_COMMAND = ("python3", "-m", "podscale.study.experiment_trial")


@dataclass(frozen=True)
class ExperimentOptions:
    """Search of an Experiment.

    Args:
        algorithm: Name of an algorithm of Katib, such as grid, random, tpe, bayesianoptimization.
        parallel: Trials at a time.
        trials: Most trials; None: as many as the study has combinations.
    """

    algorithm: str = GRID
    parallel: int = 8
    trials: int | None = None


def check_katib(api: ClusterClient) -> None:
    """Raise InputError if the cluster does not serve Experiments."""
    if not api.serves(EXPERIMENTS):
        raise InputError(
            "this cluster has no Katib, whose API is kubeflow.org/v1beta1 Experiment",
            field="--backend",
            got="katib",
            hint=f"Install Katib {KATIB_VERSION} or newer (https://www.kubeflow.org/docs/components/katib/), or choose "
            "--backend kfp or here.",
        )


def study_experiment(study: StudyDocument, options: ExperimentOptions) -> dict[str, Any]:
    """Return the Experiment of a study. Raises InputError if Katib cannot run it."""
    if len(study.name) > MAX_NAME_LENGTH:
        problem = f"an Experiment's name has at most {MAX_NAME_LENGTH} characters"
        raise InputError(problem, field="name", got=study.name)
    parameters = search_space(study)
    config = as_pod_config(TrialGrid(study).series[0].config)
    trials = options.trials or count_choices(parameters)
    namespace = config.launch.cluster.namespace
    return {
        "apiVersion": EXPERIMENTS.api_version,
        "kind": EXPERIMENTS.kind,
        "metadata": {"name": study.name, **({"namespace": namespace} if namespace is not None else {})},
        "spec": {
            "objective": {
                "type": "maximize",
                "objectiveMetricName": OBJECTIVE,
                "additionalMetricNames": [LOSS],
                "metricStrategies": [{"name": name, "value": "latest"} for name in (OBJECTIVE, LOSS)],
            },
            "algorithm": {"algorithmName": options.algorithm},
            "parallelTrialCount": min(options.parallel, trials),
            "maxTrialCount": trials,
            "maxFailedTrialCount": min(MAX_FAILED_TRIALS, trials),
            # An Experiment that is created again finds the records of its trials in the workspace.
            "resumePolicy": "Never",
            "metricsCollectorSpec": {"collector": {"kind": "StdOut"}},
            "parameters": [_parameter(parameter, options.algorithm) for parameter in parameters],
            "trialTemplate": _trial_template(study, config, parameters),
        },
    }


def _parameter(parameter: SearchParameter, algorithm: str) -> dict[str, Any]:
    """Return a parameter: a range for the learning rate unless a grid is searched, else the values."""
    values = list(parameter.values)
    if parameter.name == RATE_FACTOR and algorithm != GRID:
        space = {"min": values[0], "max": values[-1], "distribution": "logUniform"}
        return {"name": parameter.name, "parameterType": "double", "feasibleSpace": space}
    kind = "discrete" if parameter.has_order else "categorical"
    return {"name": parameter.name, "parameterType": kind, "feasibleSpace": {"list": values}}


def _trial_template(study: StudyDocument, config: RunConfig, parameters: list[SearchParameter]) -> dict[str, Any]:
    names = {parameter.name: parameter.name.replace(".", "_") for parameter in parameters}
    choice = "".join(f"{name}=${{trialParameters.{key}}}\n" for name, key in names.items())
    return {
        "primaryContainerName": STAGE_CONTAINERS["job"],
        "successCondition": 'status.conditions.#(type=="Complete")#|#(status=="True")#',
        "failureCondition": 'status.conditions.#(type=="Failed")#|#(status=="True")#',
        "trialParameters": [
            {"name": key, "description": f"{name} of the study", "reference": name} for name, key in names.items()
        ],
        "trialSpec": _trial_job(study, config, choice),
    }


def _trial_job(study: StudyDocument, config: RunConfig, choice: str) -> dict[str, Any]:
    """Return the Job of a trial, without a name, which Katib gives."""
    spec = replace(build_job_spec(config, "train"), command=TRIAL_COMMAND)
    body = render_job(spec, "job").job["spec"]
    body.pop("ttlSecondsAfterFinished", None)  # Katib deletes it, and reads its condition before
    template = body["template"]
    template["metadata"]["labels"][RUN_LABEL] = study.name
    (container,) = template["spec"]["containers"]
    container["env"] = [
        {"name": env.STUDY, "value": study.model_dump_json()},
        {"name": env.TRIAL, "value": choice},
        *(variable for variable in container["env"] if variable["name"] != env.RUN_DOCUMENT),
    ]
    return {"apiVersion": "batch/v1", "kind": "Job", "spec": body}
