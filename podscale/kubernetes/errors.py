"""Errors of an API server."""

import re
from dataclasses import dataclass
from typing import Any

from podscale.errors import InputError, PodscaleError
from podscale.kubernetes.resources import KIND_PROVIDERS, ResourceKind


class ApiUnreachable(PodscaleError):
    """The API server does not answer, or is busy; the same request may succeed later.

    Args:
        notice: text for the user while the request is retried.
        retry_after: pause that the server requests, seconds.
        retry_for: maximal time of retries, seconds.
    """

    def __init__(
        self,
        problem: str,
        *,
        hint: str = "",
        notice: str = "",
        retry_after: float = 0.0,
        retry_for: float = float("inf"),
    ) -> None:
        super().__init__(problem, hint=hint)
        self.notice, self.retry_after, self.retry_for = notice, retry_after, retry_for


WEBHOOK_FAILED = "failed calling webhook"
"""Message of an API server (HTTP 500) if the operator that validates an object does not answer."""


class ApiError(InputError):
    """The API server refuses the request; a retry does not help.

    Args:
        reason: reason of the API's Status object.
        field: requested object, such as `PyTorchJob r1`, or the document key to change.
    """

    def __init__(self, problem: str, status: int, reason: str = "", *, field: str = "", hint: str = "") -> None:
        super().__init__(problem, field=field, hint=hint)
        self.status = status
        self.reason = reason


class ApiNotFound(ApiError):
    """The object does not exist."""


class KindNotServed(ApiError):
    """The cluster does not serve this kind: its operator is missing or has another version."""


class ApiAlreadyExists(ApiError):
    """An object of this name already exists."""


class ApiConflict(ApiError):
    """The object was changed or replaced since it was read."""


class WatchExpired(ApiError):
    """The resource version of the watch is too old: list again."""


@dataclass(frozen=True)
class ApiRequest:
    """Verb (as in RBAC) and object of a request, for messages."""

    verb: str
    resource: ResourceKind | None
    namespace: str
    name: str = ""

    def __str__(self) -> str:
        if self.resource is None:
            return f"{self.verb} {self.name}"
        return f"{self.verb} {self.target}" + self._scope

    @property
    def target(self) -> str:
        """Requested object, such as `PyTorchJob r1`."""
        return f"{self.resource.kind if self.resource else ''} {self.name}".strip()

    @property
    def cannot(self) -> str:
        """Start of the text of an error whose field is the target."""
        return f"cannot {self.verb} it{self._scope}"

    @property
    def _scope(self) -> str:
        return f" in namespace {self.namespace}" if self.resource and self.resource.namespaced else ""


def api_error(request: ApiRequest, status: int, answer: dict[str, Any]) -> ApiError:
    """Return the error of an unsuccessful `answer`: the API's Status object, or {'message': text}."""
    message = str(answer.get("message", ""))
    reason = str(answer.get("reason", ""))
    details = answer.get("details") or {}
    if status == 401:
        return _unauthorized_error(request, status, reason)
    if status == 403:
        return _forbidden_error(request, message, reason)
    if status == 404:
        return _not_found_error(request, message, details)
    if status == 409 and reason == "AlreadyExists":
        return ApiAlreadyExists(f"{request.cannot}: it already exists", status, reason, field=request.target)
    if status == 409:
        hint = "Try the same command again."
        return ApiConflict(f"{request.cannot}: {message}", status, reason, field=request.target, hint=hint)
    if status == 410 or reason == "Expired":
        return WatchExpired(f"{request.cannot}: {message}", status, reason, field=request.target)
    return _invalid_error(request, message, status, reason)


def _unauthorized_error(request: ApiRequest, status: int, reason: str) -> ApiError:
    return ApiError(
        f"{request.cannot}: the API server does not accept these credentials (HTTP 401): the token has expired, or it "
        "belongs to another cluster",
        status,
        reason,
        field=request.target,
        hint="Log in again (GKE: `gcloud container clusters get-credentials CLUSTER`), check with "
        "`kubectl auth whoami`, or name another context with launch.cluster.context",
    )


def _forbidden_error(request: ApiRequest, message: str, reason: str) -> ApiError:
    if "exceeded quota" in message:
        problem = message[message.index("exceeded quota") :]
        hint = (
            "Request less, wait for other jobs to end, or ask for a higher quota: "
            f"`kubectl describe quota -n {request.namespace}`"
        )
    elif "being terminated" in message:
        problem = f"namespace {request.namespace} is being deleted"
        hint = "Wait until it is gone, or name another one with launch.cluster.namespace"
    elif "violates PodSecurity" in message:
        problem = f"{message}. The namespace's Pod Security level does not allow it"
        hint = "Set launch.cluster.security=restricted, or use a namespace that allows what this hardware needs."
    elif "blockOwnerDeletion" in message:
        problem = f"{message}. This cluster requires the permission to update finalizers of jobs"
        hint = f"Ask for the chart's launcher role for this account; {_DOCTOR}"
    elif "denied the request" in message or "is forbidden: User" not in message:
        problem = f"refused on admission: {message}"
        hint = "Change the document, or ask the administrator of this cluster."
    elif "system:anonymous" in message:
        return _unauthorized_error(request, 403, reason)
    else:
        user = re.search(r'User "([^"]*)"', message)
        resource = request.resource.full_name if request.resource else "this"
        problem = f"{user.group(1) if user else 'this account'} may not {request.verb} {resource} (RBAC)"
        hint = f"Ask for the chart's launcher role for this account; {_DOCTOR}"
    return ApiError(f"{request.cannot}: {problem}", 403, reason, field=request.target, hint=hint)


_DENIED = "denied request: "
"""Start of the message of a ValidatingAdmissionPolicy within that of an API server (HTTP 422)."""
_DOCTOR = "`podscale doctor --cluster` lists the required permissions."


def _not_found_error(request: ApiRequest, message: str, details: dict[str, Any]) -> ApiError:
    resource = request.resource
    if details.get("kind") == "namespaces":
        return ApiNotFound(
            f"{request.cannot}: there is no namespace {request.namespace}",
            404,
            "NotFound",
            field=request.target,
            hint=f"`kubectl create namespace {request.namespace}`, or set launch.cluster.namespace",
        )
    if resource is not None and (not details.get("name") and not re.search(r'"[^"]+" not found', message)):
        return kind_not_served_error(resource)
    return ApiNotFound(f"{request.cannot}: it does not exist", 404, "NotFound", field=request.target)


def kind_not_served_error(resource: ResourceKind, served: tuple[str, ...] = ()) -> KindNotServed:
    """Return the error of a kind that a cluster does not serve; `served` are its versions of the API group."""
    provider = KIND_PROVIDERS.get(resource.group)
    if served and resource.version not in served:
        name = f"{provider.name} {provider.version} or newer" if provider else "a newer version"
        problem = f"needs {resource.api_version}, and this cluster has only version {', '.join(served)}"
        hint = f"Install {name}" + (f": {provider.install}" if provider else "")
    else:
        problem, hint = f"this cluster does not have {resource.api_version}", ""
        if provider is not None:
            hint = f"Install {provider.name} {provider.version} or newer ({provider.install}), or choose another "
            hint += "launch.backend"
    return KindNotServed(problem, 404, "NotFound", field=resource.kind, hint=hint)


def _invalid_error(request: ApiRequest, message: str, status: int, reason: str) -> ApiError:
    problem, hint = message or f"HTTP {status}", ""
    if "ValidatingAdmissionPolicy" in message and _DENIED in message:
        problem = f"refused by a policy of this cluster: {message.partition(_DENIED)[2]}"
    unknown = re.findall(r'unknown field "([^"]+)"', message)
    if unknown and request.resource is not None:
        provider = KIND_PROVIDERS.get(request.resource.group)
        problem = f"the cluster's {request.resource.kind} is too old for {', '.join(unknown)}"
        hint = f"Install {provider.name} {provider.version} or newer." if provider else "Install a newer version."
    elif "no more than 63 characters" in message or "must be no more than" in message:
        hint = "Choose a shorter run.id"
    elif WEBHOOK_FAILED in message:
        problem = f"{message}. The operator that validates these objects does not answer"
        hint = "Check it with `podscale doctor --cluster`"
    return ApiError(f"{request.cannot}: {problem}", status, reason, field=request.target, hint=hint)
