"""Pod of one task of a compiled package, built as KFP's driver and launcher do.

Follows kubeflow/pipelines 2.17: backend/src/v2/driver (pod patch, platform settings), component/launcher_v2.go (input
of the executor, paths of artifacts, folders) and compiler/argocompiler/security_context.go (what every user container
gets). Where KFP copies artifacts between a bucket and the pod, a volume is mounted at the same paths instead.
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

OUTPUT_FILE = "/tmp/kfp_outputs/output_metadata.json"
SCRATCH = "/minio"
BUCKET = "minio://mlpipeline/v2/artifacts"
MARK = "== output metadata of the executor =="
"""Line in a pod's log after which the content of the executor's OUTPUT_FILE follows."""
RUN = f"""set -u
for folder in $1; do mkdir -p "$folder"; done
shift
"$@"
code=$?
printf '\\n%s\\n' '{MARK}'
cat {OUTPUT_FILE} 2>/dev/null
exit $code"""
"""Script of the launcher around the user's command: creates folders before it, prints the metadata after it."""
POD_NAME = {"name": "KFP_POD_NAME"}
"""Variable of compiler/argocompiler/common.go (by a reference to the pod's own metadata)."""
PARTS = (("cpu", "Cpu"), ("memory", "Memory"))

Json = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """One execution of a container component: its names, inputs and artifact paths."""

    name: str
    executor: Json
    """Container of the package's deploymentSpec."""
    component: Json
    platform: Json
    """Settings of kfp-kubernetes for the executor."""
    root: str
    """URI prefix of its artifacts."""
    parameters: Json = field(default_factory=dict)
    """Values of the declared inputs, and of the pipeline's parameters that settings of the pod refer to."""
    artifacts: dict[str, Json] = field(default_factory=dict)
    """Input artifacts as their producers wrote them, by input name."""

    @property
    def outputs(self) -> dict[str, Json]:
        """Output artifacts before the execution, by name."""
        declared = self.component.get("outputDefinitions", {}).get("artifacts", {})
        return {
            name: {"name": name, "type": content["artifactType"], "uri": f"{self.root}/{name}", "metadata": {}}
            for name, content in declared.items()
        }

    @property
    def image(self) -> str:
        """Image, resolved if it is a parameter (driver: resolvePodSpecInputRuntimeParameter)."""
        image: str = self.executor["container"]["image"]
        channel = re.fullmatch(r"\{\{\$\.inputs\.parameters\['(.+)'\]\}\}", image)
        return str(self.parameters[channel[1]]) if channel else image

    def executor_input(self) -> Json:
        """Input of the executor, which replaces `{{$}}`."""
        parameters = {
            name: {"outputFile": f"/tmp/kfp/outputs/{name}"}
            for name in self.component.get("outputDefinitions", {}).get("parameters", {})
        }
        return {
            "inputs": {"parameterValues": self.parameters, "artifacts": _lists(self.artifacts)},
            "outputs": {"parameters": parameters, "artifacts": _lists(self.outputs), "outputFile": OUTPUT_FILE},
        }

    def command(self) -> list[str]:
        container = self.executor["container"]
        executor_input = json.dumps(self.executor_input())
        return [
            *container["command"],
            *(argument.replace("{{$}}", executor_input) for argument in container.get("args", ())),
        ]

    def folders(self) -> list[str]:
        """Folders that must exist before the command starts."""
        return sorted({str(PurePosixPath(local_path(output["uri"])).parent) for output in self.outputs.values()})


def local_path(uri: str) -> str:
    """Return the path of an artifact in a pod."""
    return f"{SCRATCH}/{uri.removeprefix('minio://')}"


def merged(outputs: dict[str, Json], metadata: str) -> dict[str, Json]:
    """Return the output artifacts, updated by the executor's output."""
    executor_artifacts = json.loads(metadata or "{}").get("artifacts", {})
    artifacts = {}
    for name, artifact in outputs.items():
        written = (executor_artifacts.get(name, {}).get("artifacts") or [{}])[0]
        artifacts[name] = {
            **artifact,
            "uri": written.get("uri") or artifact["uri"],
            "metadata": {**artifact["metadata"], **written.get("metadata", {})},
        }
    return artifacts


def output_parameters(metadata: str) -> Json:
    """Return the output parameters that the executor wrote."""
    parameters: Json = json.loads(metadata or "{}").get("parameterValues", {})
    return parameters


def pod(task: Task, name: str, *, artifacts_claim: str, service_account: str) -> Json:
    """Return the pod as it is sent to the API server."""
    platform = task.platform
    metadata = platform.get("podMetadata", {})
    volumes, mounts = _volumes(platform)
    volumes.append({"name": "artifacts", "persistentVolumeClaim": {"claimName": artifacts_claim}})
    mounts.append({"name": "artifacts", "mountPath": SCRATCH})
    container = {
        "name": "main",
        "image": task.image,
        "command": ["sh", "-c", RUN, "launcher", " ".join(task.folders()), *task.command()],
        "env": [POD_NAME | {"value": name}, *map(dict, task.executor["container"].get("env", ()))],
        "resources": _resources(task.executor["container"].get("resources", {})),
        "volumeMounts": mounts,
        "securityContext": _security(platform.get("securityContext", {})),
        **({"imagePullPolicy": platform["imagePullPolicy"]} if "imagePullPolicy" in platform else {}),
    }
    spec: Json = {
        "restartPolicy": "Never",
        "serviceAccountName": service_account,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": volumes,
        "nodeSelector": platform.get("nodeSelector", {}).get("labels", {}),
        "tolerations": [_toleration(toleration) for toleration in platform.get("tolerations", ())],
        "imagePullSecrets": [{"name": secret["secretName"]} for secret in platform.get("imagePullSecret", ())],
    }
    if seconds := platform.get("activeDeadlineSeconds"):
        spec["activeDeadlineSeconds"] = int(seconds)
    labels = {**metadata.get("labels", {}), "pipelines.kubeflow.org/v2_component": "true"}
    annotations = metadata.get("annotations", {})
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels, "annotations": annotations},
        "spec": spec,
    }


def _lists(artifacts: dict[str, Json]) -> Json:
    return {name: {"artifacts": [artifact]} for name, artifact in artifacts.items()}


def _volumes(platform: Json) -> tuple[list[Json], list[Json]]:
    volumes: list[Json] = []
    mounts: list[Json] = []
    for claim in platform.get("pvcMount", ()):
        source = {"persistentVolumeClaim": {"claimName": claim["constant"]}}
        _add(volumes, mounts, claim["constant"], source, claim["mountPath"], claim.get("subPath"))
    for empty in platform.get("emptyDirMounts", ()):
        content = {key: empty[key] for key in ("medium", "sizeLimit") if key in empty}
        _add(volumes, mounts, empty["volumeName"], {"emptyDir": content}, empty["mountPath"])
    for secret in platform.get("secretAsVolume", ()):
        source = {"secret": {"secretName": secret["secretName"]}}
        _add(volumes, mounts, secret["secretName"], source, secret["mountPath"])
    for held in platform.get("configMapAsVolume", ()):
        source = {"configMap": {"name": held["configMapName"]}}
        _add(volumes, mounts, held["configMapName"], source, held["mountPath"])
    return volumes, mounts


def _add(
    volumes: list[Json], mounts: list[Json], name: str, source: Json, path: str, sub_path: str | None = None
) -> None:
    if name not in [volume["name"] for volume in volumes]:
        volumes.append({"name": name, **source})
    mounts.append({"name": name, "mountPath": path, **({"subPath": sub_path} if sub_path else {})})


def _resources(declared: Json) -> Json:
    """Return resources as Kubernetes quantities, from the strings that kfp stores beside its numbers."""
    resources: Json = {}
    for kind, name in (("requests", "Request"), ("limits", "Limit")):
        amounts = {key: declared[f"resource{part}{name}"] for key, part in PARTS if f"resource{part}{name}" in declared}
        if amounts:
            resources[kind] = amounts
    if accelerator := declared.get("accelerator"):
        resources.setdefault("limits", {})[accelerator["resourceType"]] = accelerator["resourceCount"]
    return resources


def _toleration(declared: Json) -> Json:
    """Convert a toleration to Kubernetes' form: protobuf's JSON has 64-bit integers as strings."""
    return {key: int(value) if key == "tolerationSeconds" else value for key, value in declared.items()}


def _security(declared: Json) -> Json:
    """Return the security context of KFP for user containers, with the fields that users may override."""
    overrides: Json = {key: int(declared[key]) for key in ("runAsUser", "runAsGroup") if key in declared}
    if "runAsNonRoot" in declared:
        overrides["runAsNonRoot"] = declared["runAsNonRoot"]
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
        **overrides,
    }
