"""Waiting for what may hang, for a while only."""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def call_with_timeout(timeout_seconds: float, action: Callable[[], T]) -> T:
    """The result of `action`, or TimeoutError; an action that hangs is left in a thread that holds up no exit."""
    result: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(action())
        except BaseException as error:  # handed to the caller's thread
            failure.append(error)

    thread = threading.Thread(target=run, name="podscale-within", daemon=True)
    thread.start()
    thread.join(timeout_seconds)
    if thread.is_alive():
        raise TimeoutError(f"no answer within {timeout_seconds:g} s")
    if failure:
        raise failure[0]
    return result[0]
