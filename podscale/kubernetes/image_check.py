"""Check that nodes can pull the images of a run: a Job of one short-lived pod, which is always deleted.

Only a kubelet can answer, because it has the registry's address, mirror, credentials and cache. The pod has the pull
secrets and the service account of the run, runs `podscale --version` in each image, and requests next to nothing. It
does not ask for the run's hardware, so no pool is started for it. A Job, not a pod, because a launcher's role allows
it, and because the cluster deletes it even if this process is killed.
"""

import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from podscale.errors import InputError, PodscaleError
from podscale.kubernetes.client import ClusterClient, delete_object
from podscale.kubernetes.job_spec import NAME_LABEL, JobSpec
from podscale.kubernetes.job_state import read_job_state
from podscale.kubernetes.job_watcher import read_details
from podscale.kubernetes.pod_state import PERMANENT_WAIT_REASONS
from podscale.kubernetes.render.pod import restricted_container_security, restricted_pod_security
from podscale.kubernetes.render.pod_placement import tolerations
from podscale.kubernetes.resources import JOB_KINDS, PODS, KubernetesObject, name_of
from podscale.util.formatting import one_line
from podscale.util.terminal import CheckResult

PULL_SECONDS = 60.0
"""Time limit of the check, seconds. A wrong name or missing credentials show within a few seconds."""
POLL_SECONDS = 1.0
KEEP_SECONDS = 60
"""Time after which the cluster deletes the Job if this process could not, seconds."""
JOB_NAME_LABEL = "batch.kubernetes.io/job-name"
REQUESTS = {"cpu": "50m", "memory": "64Mi", "ephemeral-storage": "64Mi"}
LIMITS = {"cpu": "1", "memory": "512Mi", "ephemeral-storage": "256Mi"}
SKIP_ADVICE = "check by hand whether the nodes can pull it; --no-pull leaves this out"


def check_images(api: ClusterClient, spec: JobSpec, launcher_image: str) -> Iterator[CheckResult]:
    """Yield one result for the image of the run, and one for that of launchers, which only pipelines need."""
    images = list(dict.fromkeys((spec.image, launcher_image)))
    try:
        job = api.create(JOB_KINDS["job"], _pull_job(spec, images))
    except InputError as error:
        for image in images:
            yield CheckResult(f"image {image}", "note", f"not tried: {error}", SKIP_ADVICE)
        return
    try:
        results, reason = _watch_pull(api, job, images)
    finally:
        with suppress(PodscaleError):
            delete_object(api, job)
    for image in images:
        result = results.get(image)
        if result is None:
            found = f"not known after {PULL_SECONDS:.0f} s: {reason or 'it is still being pulled'}"
            result = CheckResult(f"image {image}", "note", found, SKIP_ADVICE)
        elif result.verdict == "missing" and image != spec.image:
            advice = f"{result.advice}; only pipelines need it (launch.launcher_image)"
            result = CheckResult(result.subject, "note", result.found, advice)
        yield result


def _watch_pull(api: ClusterClient, job: KubernetesObject, images: list[str]) -> tuple[dict[str, CheckResult], str]:
    """Return the results so far when all are known or the time is over, and then why the pod does not start."""
    results: dict[str, CheckResult] = {}
    deadline = time.monotonic() + PULL_SECONDS
    while True:
        pods, _ = api.list(PODS, labels=f"{JOB_NAME_LABEL}={name_of(job)}")
        for pod in pods:
            statuses = {one["name"]: one for one in (pod.get("status") or {}).get("containerStatuses") or ()}
            for number, image in enumerate(images):  # a service mesh may add containers of its own
                if (result := _container_result(image, statuses.get(f"image-{number}", {}))) is not None:
                    results[image] = result
        if len(results) == len(images):
            return results, ""
        if time.monotonic() > deadline:
            return results, read_job_state(job, pods, *read_details(api, job, pods)).reason
        time.sleep(POLL_SECONDS)


def _container_result(image: str, container: KubernetesObject) -> CheckResult | None:
    """Return the result for the image of a container; None before it is known."""
    subject = f"image {image}"
    terminated = (container.get("state") or {}).get("terminated")
    if terminated is not None:
        if terminated.get("exitCode") == 0:
            return CheckResult(subject, "ok", "pulled, and `podscale` runs in it")
        reason = f"{terminated.get('reason')}, exit code {terminated.get('exitCode')}"
        problem = f"`podscale --version` does not run in it: {reason}"
        return CheckResult(subject, "missing", problem, "build it from this repository (`make images`)")
    waiting = (container.get("state") or {}).get("waiting") or {}
    advice = PERMANENT_WAIT_REASONS.get(str(waiting.get("reason")))
    if advice is None:
        return None
    message = one_line(str(waiting.get("message") or ""))
    return CheckResult(subject, "missing", f"{waiting['reason']}: {message}".removesuffix(": "), advice)


def _pull_job(spec: JobSpec, images: list[str]) -> KubernetesObject:
    cluster = spec.cluster
    policy = {"imagePullPolicy": cluster.image_pull_policy} if cluster.image_pull_policy else {}
    labels = {
        NAME_LABEL: "podscale",
        "app.kubernetes.io/component": "image-check",
        "app.kubernetes.io/managed-by": "podscale",
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 0,
        "securityContext": restricted_pod_security(),
        "serviceAccountName": cluster.service_account,
        "imagePullSecrets": [{"name": name} for name in cluster.image_pull_secrets],
        "nodeSelector": dict(cluster.node_selector),
        "tolerations": tolerations(spec),
        "containers": [
            {
                "name": f"image-{number}",
                "image": image,
                **policy,
                "command": ["podscale", "--version"],
                "env": [{"name": "HOME", "value": "/tmp"}],
                "resources": {"requests": REQUESTS, "limits": LIMITS},
                "securityContext": restricted_container_security(),
                "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
            }
            for number, image in enumerate(images)
        ],
        "volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "64Mi"}}],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": f"podscale-image-check-{uuid.uuid4().hex[:8]}", "labels": labels},
        "spec": {
            "backoffLimit": 0,
            "activeDeadlineSeconds": int(PULL_SECONDS) + 30,
            "ttlSecondsAfterFinished": KEEP_SECONDS,
            "template": {
                "metadata": {"labels": {**labels, **cluster.labels}, "annotations": dict(cluster.annotations)},
                "spec": {name: value for name, value in pod.items() if value not in (None, [], {})},
            },
        },
    }
