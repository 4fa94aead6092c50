"""Informer: a current copy of some objects of the API server, by one list and then watches of a minute each."""

import threading
import time
from collections.abc import Callable, Sequence

from podscale.kubernetes.client import ClusterClient
from podscale.kubernetes.errors import WatchExpired
from podscale.kubernetes.resources import KubernetesObject, ResourceKind, uid_of
from podscale.kubernetes.transport import StreamInterrupted

RETRY_SECONDS = 1.0
"""Minimal time between the starts of two watches, seconds."""


class Informer:
    """Current objects of one kind, updated by a background thread until closed.

    Args:
        on_change: set when an object changes, and when the thread fails.
        trim: returns the part of an object to keep in memory.
    """

    def __init__(
        self,
        api: ClusterClient,
        resource: ResourceKind,
        on_change: threading.Event,
        *,
        labels: str = "",
        fields: str = "",
        trim: Callable[[KubernetesObject], KubernetesObject] = lambda item: item,
    ) -> None:
        self._api = api
        self._resource = resource
        self._on_change = on_change
        self._labels = labels
        self._fields = fields
        self._trim = trim
        self._objects: dict[str, KubernetesObject] = {}
        self._lock = threading.Lock()
        self._synced = threading.Event()
        self._closed = threading.Event()
        self._failure: Exception | None = None
        threading.Thread(target=self._run, name=f"watch {resource.plural}", daemon=True).start()

    def objects(self) -> Sequence[KubernetesObject]:
        """Return the objects; wait for the first list. Raises the error of the thread if it failed."""
        while not self._synced.wait(0.2):  # in slices, so that signals are handled
            pass
        if self._failure is not None:
            raise self._failure
        with self._lock:
            return list(self._objects.values())

    def close(self) -> None:
        """Stop the thread when its watch ends, within a minute."""
        self._closed.set()

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                self._watch(self._list())
        except Exception as error:  # raised by `objects`
            self._failure = error
        finally:
            self._synced.set()
            self._on_change.set()

    def _list(self) -> str:
        """Fetch all objects; return the resource version to watch from."""
        while True:
            try:
                items, version = self._api.list(
                    self._resource, labels=self._labels, fields=self._fields, keep=self._trim
                )
                break
            except WatchExpired:  # between two pages of a long list
                self._closed.wait(RETRY_SECONDS)
        with self._lock:
            self._objects = {uid_of(item): item for item in items}
        self._synced.set()
        self._on_change.set()
        return version

    def _watch(self, version: str) -> None:
        """Watch until `version` is too old or the informer is closed; resume an interrupted stream."""
        while not self._closed.is_set():
            started = time.monotonic()
            try:
                for change in self._api.watch(self._resource, version, labels=self._labels, fields=self._fields):
                    version = self._apply_change(change)
                    if self._closed.is_set():
                        return
            except WatchExpired:
                return
            except StreamInterrupted:
                pass
            self._closed.wait(max(0.0, RETRY_SECONDS - (time.monotonic() - started)))

    def _apply_change(self, change: KubernetesObject) -> str:
        """Apply one change; return its resource version."""
        item = change["object"]
        version = str(item["metadata"]["resourceVersion"])
        if change["type"] == "BOOKMARK":
            return version
        with self._lock:
            if change["type"] == "DELETED":
                self._objects.pop(uid_of(item), None)
            else:
                self._objects[uid_of(item)] = self._trim(item)
        self._on_change.set()
        return version
