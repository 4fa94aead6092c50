"""Named waits for other ranks, so that an error can name the collective that a rank waited in.

Code that waits names the wait: `with waiting_for("a barrier"): ...`. An exception that leaves the block carries the
name, also from a helper thread or an autograd hook to the thread that receives it. The heartbeat thread reads the names
of all threads. A wait costs one push, one pop and no new object, because one step has about a hundred of them.
"""

import threading
from contextlib import ContextDecorator
from functools import cache
from threading import get_ident
from types import TracebackType

BARRIER = "a barrier"
BATCH_NORM = "the statistics of batch norm"
CHECKPOINT = "the gather of a checkpoint"
EVALUATION = "an evaluation"
GRADIENTS = "the average of a gradient bucket"
OPTIMIZER = "the optimizer"
STEP_STATUS = "the step status"

_ATTRIBUTE = "_podscale_wait"
_open: dict[int, list[str]] = {}
"""Names of the open waits of each thread, the innermost last."""


class Wait(ContextDecorator):
    """Wait by its name, as a block or a decorator; holds no state, so that any thread may enter it at any depth."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        try:
            _open[get_ident()].append(self.name)
        except KeyError:
            _open[get_ident()] = [self.name]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _open[get_ident()].pop()
        if error is not None and not hasattr(error, _ATTRIBUTE):
            setattr(error, _ATTRIBUTE, self.name)


@cache
def waiting_for(name: str) -> Wait:
    return Wait(name)


@cache
def waiting_for_bucket(number: int) -> Wait:
    """Return the wait for a step's gradient bucket; `number` counts from 1."""
    return Wait(f"the average of gradient bucket {number}")


def wait_of(error: BaseException) -> str:
    """Return the name of the innermost wait that `error` left; "" if it left none."""
    return str(getattr(error, _ATTRIBUTE, ""))


def current_wait() -> str:
    """Return the wait of the main thread, else of a helper thread, else ""; any thread may call it."""
    main = threading.main_thread().ident or 0
    for thread in (main, *list(_open)):
        if names := _open.get(thread, [])[-1:]:  # a copy: the thread may leave its wait meanwhile
            return names[0]
    return ""
