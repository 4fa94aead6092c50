"""State of a run in KFP, and the errors of its stages, from either form of KFP's API.

Releases with ML Metadata (2.17 and before) list the tasks in `run_details.task_details` of the run. Later ones leave it
empty and answer `/runs/<id>/tasks`, with the output parameters of each task.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

API_ROOT = "/apis/v2beta1"
PAGE_SIZE = 100
ERROR_PREFIX = "podscale "
"""Beginning of a stage's error, in logs and termination messages (components/stage_process.py)."""
FAILED_PHASES = ("Failed", "Error")
"""Phases of Argo's nodes."""
STATE_ORDER = ("FAILED", "CANCELED", "RUNNING", "PENDING", "SKIPPED", "CACHED", "SUCCEEDED")
"""States of the iterations of a loop, the one that stands for all of them first."""


@dataclass(frozen=True)
class PipelineProgress:
    """State of a run, and states of its started tasks by name."""

    state: str
    tasks: dict[str, str]


class RunReader:
    """Reads runs through kfp's client, whose exceptions it lets pass."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._has_tasks = True
        """False if the backend has no `/runs/<id>/tasks`."""

    def progress(self, run_id: str) -> PipelineProgress:
        run = self._client.get_run(run_id)
        details = (run.run_details.task_details if run.run_details else None) or ()
        pairs = [(task.display_name, task.state) for task in details]
        if not pairs:
            pairs = [(_task_name(task), _state(task)) for task in self._list_tasks(run_id)]
        return PipelineProgress(str(run.state or "PENDING"), _merge_states(pairs))

    def stage_errors(self, run_id: str) -> list[str]:
        """Return the stages' own errors, as far as the API has them.

        They are an output parameter of the summary task, or part of the messages of tasks and of nodes in Argo's
        workflow.
        """
        tasks = self._list_tasks(run_id)
        for task in tasks:
            if _task_name(task) == "summary" and (errors := _output_parameter(task, "errors")) not in ("", "none"):
                return [errors]
        failed = [task for task in tasks if _state(task) == "FAILED"]  # a retried task keeps the message of its failure
        messages = [str((task.get("status_metadata") or {}).get("message") or "") for task in failed]
        return list(dict.fromkeys(_own_errors([*messages, *self._argo_messages(run_id)])))

    def _list_tasks(self, run_id: str) -> list[dict[str, Any]]:
        """Return the tasks of a run as JSON; empty if the backend does not have this request."""
        from kfp_server_api import ApiException  # type: ignore[import-untyped]

        tasks: list[dict[str, Any]] = []
        token = ""
        while self._has_tasks:
            query = {"page_size": PAGE_SIZE, **({"page_token": token} if token else {})}
            try:
                page = self._get(f"{API_ROOT}/runs/{run_id}/tasks", query)
            except ApiException as error:
                if error.status not in (404, 405, 501):
                    raise
                self._has_tasks = False
                break
            tasks += page.get("tasks") or []
            token = str(page.get("next_page_token") or "")
            if not token:
                break
        return tasks

    def _argo_messages(self, run_id: str) -> Iterator[str]:
        """Yield the messages of failed nodes of the run's Argo workflow, which the first version of the API returns."""
        from kfp_server_api import ApiException

        try:
            run = self._get(f"/apis/v1beta1/runs/{run_id}", {})
            workflow = json.loads((run.get("pipeline_runtime") or {}).get("workflow_manifest") or "{}")
            nodes = (workflow.get("status") or {}).get("nodes") or {}
        except (ApiException, ValueError, AttributeError):
            return
        for node in sorted(nodes.values(), key=lambda node: str(node.get("finishedAt"))):
            if node.get("phase") in FAILED_PHASES:
                yield str(node.get("message") or "")

    def _get(self, path: str, query: dict[str, Any]) -> dict[str, Any]:
        answer = self._client.runs.api_client.call_api(
            path,
            "GET",
            query_params=list(query.items()),
            auth_settings=["Bearer"],
            response_type="object",
            _return_http_data_only=True,
        )
        return answer if isinstance(answer, dict) else {}


def _task_name(task: dict[str, Any]) -> str:
    return str(task.get("display_name") or task.get("name") or "")


def _state(task: dict[str, Any]) -> str:
    return str(task.get("state") or task.get("status") or "")


def _merge_states(pairs: Iterable[tuple[Any, Any]]) -> dict[str, str]:
    """Return one state by name: iterations of a loop have the same name."""
    states: dict[str, list[str]] = defaultdict(list)
    for name, state in pairs:
        if name and state:
            states[str(name)].append(str(state))
    order = {state: rank for rank, state in enumerate(STATE_ORDER)}
    return {name: min(found, key=lambda state: order.get(state, len(order))) for name, found in states.items()}


def _output_parameter(task: dict[str, Any], name: str) -> str:
    """Return an output parameter as text; its key has had several names in KFP's drafts."""
    outputs = task.get("outputs") or {}
    for parameter in outputs.get("parameters") or ():
        producer = parameter.get("producer") or {}
        if name in (parameter.get("parameter_key"), parameter.get("name"), producer.get("key")):
            return str(parameter.get("value") or "")
    return ""


def _own_errors(messages: Iterable[str]) -> Iterator[str]:
    """Yield the part of each message that a stage wrote, without what KFP and Argo put before it."""
    for message in messages:
        _, prefix, error = message.partition(ERROR_PREFIX)
        if prefix:
            yield error
