"""Watch of the jobs and pods of a namespace, which records two jobs of a run and two pods of a rank."""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from kubernetes import client, watch
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

Pod = Any
"""Pod of the client library (V1Pod)."""
RUN_LABEL = "podscale.dev/run"
RANK_LABELS = ("training.kubeflow.org/replica-index", "batch.kubernetes.io/job-completion-index")
"""Labels of a pod's index: of the training operator, and of an indexed Job."""
JOBSET_UID, JOBSET_ATTEMPT = "jobset.sigs.k8s.io/jobset-uid", "jobset.sigs.k8s.io/restart-attempt"
JOB_APIS = (("kubeflow.org", "v1", "pytorchjobs"), ("jobset.x-k8s.io", "v1alpha2", "jobsets"))
WATCH_SECONDS = 60


class FleetWatch:
    """Jobs and pods by run, from watches. Thread-safe; `violations` has a line for each rule that was broken."""

    def __init__(self, api: client.ApiClient, namespace: str) -> None:
        self._core, self._custom, self._namespace = client.CoreV1Api(api), client.CustomObjectsApi(api), namespace
        self._pods: dict[str, Pod] = {}
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self.violations: list[str] = []
        self.jobs: dict[str, list[str]] = defaultdict(list)
        """Every job that has existed, by run: its uids in order of appearance."""
        self.pods: set[str] = set()
        """Every pod that has existed."""
        self._jobs: dict[str, dict[str, Any]] = {plural: {} for *_, plural in JOB_APIS}
        """Present jobs of each kind, by uid."""
        threading.Thread(target=self._watch_pods, daemon=True).start()
        for group, version, plural in JOB_APIS:
            threading.Thread(target=self._watch_jobs, args=(group, version, plural), daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def training_set(self, run: str, size: int) -> list[Pod]:
        """Return the pods of a run if it has exactly one job, which has not ended, and all its ranks run."""
        with self._changed:
            jobs = self._jobs_of(run)
            if len(jobs) != 1 or _has_ended(jobs[0]):
                return []
            live = self._live(run)
            complete = sorted(map(rank_of, live)) == list(range(size)) and len(self._running(run)) == size
            return live if complete and {_set_of(pod)[0] for pod in live} == {jobs[0]["metadata"]["uid"]} else []

    def job_succeeded(self, run: str) -> bool:
        with self._changed:
            return any({"Succeeded", "Completed"} & _conditions(job) for job in self._jobs_of(run))

    def wait(self, what: str, condition: Callable[[], Any], timeout: float) -> Any:
        """Return the first true value of the condition. Raises TimeoutError after so many seconds."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while not (value := condition()):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{what}: not within {timeout:g} s")
                self._changed.wait(1.0)
        return value

    def _jobs_of(self, run: str) -> list[Any]:
        jobs = [job for of_kind in self._jobs.values() for job in of_kind.values()]
        return [job for job in jobs if job["metadata"]["labels"][RUN_LABEL] == run]

    def _running(self, run: str) -> list[Pod]:
        return [pod for pod in self._live(run) if pod.status.phase == "Running"]

    def _live(self, run: str) -> list[Pod]:
        """Return the pods that are neither ended nor being deleted."""
        return [
            pod
            for pod in self._pods.values()
            if pod.metadata.labels.get(RUN_LABEL) == run
            and pod.metadata.deletion_timestamp is None
            and pod.status.phase in ("Pending", "Running")
        ]

    def _watch_pods(self) -> None:
        def changed(kind: str, pod: Pod) -> None:
            if kind == "DELETED":
                self._pods.pop(pod.metadata.uid, None)
            else:
                self.pods.add(pod.metadata.uid)
                self._pods[pod.metadata.uid] = pod
            self._check_pods(pod.metadata.labels.get(RUN_LABEL, ""))

        self._follow(self._core.list_namespaced_pod, (self._namespace,), changed, self._pods.clear)

    def _watch_jobs(self, group: str, version: str, plural: str) -> None:
        present = self._jobs[plural]

        def changed(kind: str, job: Any) -> None:
            run, uid = job["metadata"]["labels"][RUN_LABEL], job["metadata"]["uid"]
            if kind == "DELETED":
                present.pop(uid, None)
                return
            if uid not in self.jobs[run]:
                self.jobs[run].append(uid)
            present[uid] = job
            number = len(self._jobs_of(run))
            if number > 1:
                self.violations.append(f"{run}: {number} jobs at a time")

        collection = (group, version, self._namespace, plural)
        self._follow(self._custom.list_namespaced_custom_object, collection, changed, present.clear)

    def _follow(
        self,
        list_objects: Any,
        collection: tuple[str, ...],
        changed: Callable[[str, Any], None],
        forget: Callable[[], None],
    ) -> None:
        """Watch a list until closed. A watch that the server ends is opened again, with a new list.

        `forget` is called before each list, because a deletion between two watches is not reported.
        """
        while not self._closed.is_set():
            try:
                with self._changed:
                    forget()
                for event in watch.Watch().stream(list_objects, *collection, timeout_seconds=WATCH_SECONDS):
                    if self._closed.is_set():
                        return
                    with self._changed:
                        changed(event["type"], event["object"])
                        self._changed.notify_all()
            except (ApiException, HTTPError):
                time.sleep(1.0)

    def _check_pods(self, run: str) -> None:
        twice = [rank for rank, count in Counter(map(rank_of, self._live(run))).items() if count > 1]
        if twice:
            self.violations.append(f"{run}: two pods of rank {twice[0]} at a time")
        sets = {_set_of(pod) for pod in self._running(run)}
        if len(sets) > 1:
            self.violations.append(f"{run}: pods of {len(sets)} sets run at a time")


def rank_of(pod: Pod) -> int:
    """Return the index of a pod in its job."""
    labels = pod.metadata.labels
    return int(next(labels[name] for name in RANK_LABELS if name in labels))


def _set_of(pod: Pod) -> tuple[str, str]:
    """Return what is equal in the pods that train together: the job, and the attempt of a JobSet."""
    labels = pod.metadata.labels
    return labels.get(JOBSET_UID) or str(pod.metadata.owner_references[0].uid), labels.get(JOBSET_ATTEMPT, "")


def _conditions(job: Any) -> set[str]:
    conditions: Iterable[Any] = (job.get("status") or {}).get("conditions") or ()
    return {condition["type"] for condition in conditions if condition["status"] == "True"}


def _has_ended(job: Any) -> bool:
    ended = {"Succeeded", "Completed", "Failed"} & _conditions(job)
    return bool(ended) or "deletionTimestamp" in job["metadata"]
