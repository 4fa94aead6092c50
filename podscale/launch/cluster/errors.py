"""What an API server refuses, told for people: what, why, and what to do next."""

import re
from dataclasses import dataclass
from typing import Any

from podscale.errors import InputError, PodscaleError
from podscale.launch.cluster.resources import PROVIDERS, Resource


class Unreachable(PodscaleError):
    """No API server answered, or none that could; the same request may succeed later.

    Args:
        problem: text of the error.
        hint: what to do next.
        notice: text for the user while the request is retried.
        retry_after: pause that the server asked for, seconds.
        retry_for: time after which retries are in vain, seconds.
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


WEBHOOK_SILENT = "failed calling webhook"
"""What an API server says (HTTP 500) where an operator that has to check an object does not answer."""


class ApiError(InputError):
    """The API server answered and will answer the same again; `status` is the HTTP status, `reason` the API's own."""

    def __init__(self, text: str, status: int, reason: str = "") -> None:
        super().__init__(text)
        self.status = status
        self.reason = reason


class NotFound(ApiError):
    """There is no such object."""


class Missing(ApiError):
    """The cluster does not have this kind of object: its operator is not installed, or another version of it."""


class AlreadyExists(ApiError):
    """Somebody was faster: an object of this name exists."""


class Conflict(ApiError):
    """The object has changed since it was read, or is another one than was meant."""


class Expired(ApiError):
    """The place in the stream of changes is too old: list again."""


@dataclass(frozen=True)
class Request:
    """What was asked for, for messages: verb as in RBAC, and the object."""

    verb: str
    resource: Resource | None
    namespace: str
    name: str = ""

    def __str__(self) -> str:
        if self.resource is None:
            return f"{self.verb} {self.name}"
        where = f" in namespace {self.namespace}" if self.resource.namespaced else ""
        return f"{self.verb} {self.resource.kind} {self.name}".rstrip() + where


def api_error(request: Request, status: int, answer: dict[str, Any]) -> ApiError:
    """The error of an answer that is no success. answer: the API's Status object, or {'message': text}."""
    message = str(answer.get("message", ""))
    reason = str(answer.get("reason", ""))
    details = answer.get("details") or {}
    if status == 401:
        return ApiError(_unauthorized(request), status, reason)
    if status == 403:
        return ApiError(_forbidden(request, message), status, reason)
    if status == 404:
        return _not_found(request, message, details)
    if status == 409 and reason == "AlreadyExists":
        return AlreadyExists(f"{request}: it exists already", status, reason)
    if status == 409:
        return Conflict(f"{request}: {message}; try the same command again", status, reason)
    if status == 410 or reason == "Expired":
        return Expired(f"{request}: {message}", status, reason)
    return ApiError(_invalid(request, message, status), status, reason)


def _unauthorized(request: Request) -> str:
    return (
        f"cannot {request}: the API server does not accept these credentials (HTTP 401): the token has expired, or it "
        "belongs to another cluster. Log in again (GKE: `gcloud container clusters get-credentials CLUSTER`), check "
        "with `kubectl auth whoami`, or name another context with launch.cluster.context"
    )


def _forbidden(request: Request, message: str) -> str:
    if "exceeded quota" in message:
        quota = message[message.index("exceeded quota") :]
        return (
            f"cannot {request}: {quota}. Ask for less, wait for other jobs to end, or have the quota raised: "
            f"`kubectl describe quota -n {request.namespace}`"
        )
    if "being terminated" in message:
        return f"cannot {request}: the namespace is being deleted; wait until it is gone, or use another one"
    if "violates PodSecurity" in message:
        return (
            f"cannot {request}: {message}. The namespace's Pod Security level does not allow it: set "
            "launch.cluster.security=restricted, or use a namespace that allows what this hardware needs"
        )
    if "blockOwnerDeletion" in message:
        return (
            f"cannot {request}: {message}. This cluster asks for the right to update finalizers of jobs: have the "
            "chart's launcher role bound to this account; `podscale doctor --cluster` lists everything that is needed"
        )
    if "denied the request" in message or "is forbidden: User" not in message:
        return f"cannot {request}: refused on admission: {message}. Change the document or ask who runs this cluster"
    if "system:anonymous" in message:
        return _unauthorized(request)
    user = re.search(r'User "([^"]*)"', message)
    resource = request.resource.full_name if request.resource else "this"
    who = user.group(1) if user else "this account"
    return (
        f"{who} may not {request.verb} {resource} in namespace {request.namespace} (RBAC): have the chart's launcher "
        "role bound to it; `podscale doctor --cluster` lists everything that is needed"
    )


def _not_found(request: Request, message: str, details: dict[str, Any]) -> ApiError:
    resource = request.resource
    if details.get("kind") == "namespaces":
        return NotFound(
            f"cannot {request}: there is no namespace {request.namespace}: `kubectl create namespace "
            f"{request.namespace}`, or set launch.cluster.namespace",
            404,
            "NotFound",
        )
    if resource is not None and (not details.get("name") and not re.search(r'"[^"]+" not found', message)):
        return Missing(missing_kind(resource), 404, "NotFound")
    return NotFound(f"cannot {request}: there is none", 404, "NotFound")


def missing_kind(resource: Resource, served: tuple[str, ...] = ()) -> str:
    """What to do where a cluster lacks a kind. served: versions of its API group that the cluster does have."""
    provider = PROVIDERS.get(resource.group)
    if served and resource.version not in served:
        name = f"{provider.name} {provider.version} or newer" if provider else "a newer version"
        return (
            f"this cluster has {resource.group} in version {', '.join(served)} only, and {resource.kind} needs "
            f"{resource.api_version}: install {name}" + (f": {provider.install}" if provider else "")
        )
    if provider is None:
        return f"this cluster knows no {resource.kind} ({resource.api_version})"
    return (
        f"this cluster knows no {resource.kind} ({resource.api_version}): install {provider.name} {provider.version} "
        f"or newer ({provider.install}), or choose another launch.backend"
    )


def _invalid(request: Request, message: str, status: int) -> str:
    unknown = re.findall(r'unknown field "([^"]+)"', message)
    if unknown and request.resource is not None:
        provider = PROVIDERS.get(request.resource.group)
        newer = f"{provider.name} {provider.version} or newer" if provider else "a newer version"
        return (
            f"cannot {request}: the cluster's {request.resource.kind} has no field {', '.join(unknown)}: it is older "
            f"than what is needed; install {newer}"
        )
    if "no more than 63 characters" in message or "must be no more than" in message:
        return f"cannot {request}: {message}. Choose a shorter run.id"
    if WEBHOOK_SILENT in message:
        return (
            f"cannot {request}: {message}. The operator that checks these objects does not answer: "
            "`podscale doctor --cluster` tells whether it is up"
        )
    return f"cannot {request}: {message or f'HTTP {status}'}"
