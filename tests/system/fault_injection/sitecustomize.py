"""Inject faults into the training of one rank, or of all, in every process started with this folder on its path.

INJECTED_FAULT is one of:

- `slow:<rank>`: every batch takes most of a step longer, measured on this machine.
- `stuck:<rank>:<batch>`: this batch never arrives.
- `rest:<file>[:<seconds>]`: every step of every rank sleeps (for REST_STEP_SECONDS) while there is such a file.
- `count:<file>`: as `rest`, but a counter is trained in place of a network, without PyTorch
  (programs/counting_rank.py).
- `files:<folder>`: a fault lasts while the folder has a file of its name. `starved`: every batch of every rank takes a
  step longer. `nonfinite-<rank>`: in every fourth step, that rank's gradient is NaN and its loss is finite. Every step
  also sleeps for a moment, because such a training runs for minutes and must leave CPU time to other processes.
"""

import functools
import importlib.abc
import importlib.util
import itertools
import math
import os
import sys
import time
from pathlib import Path

KIND, WHERE, *OPTION = os.environ.get("INJECTED_FAULT", "none:-1").split(":")
EVERY = 4
REST_SECONDS = 0.03
REST_STEP_SECONDS = 0.2


def rank():  # type: ignore[no-untyped-def]
    """Return the rank, read late because a rank is forked from a process without one."""
    return os.environ.get("RANK")


class Finder(importlib.abc.MetaPathFinder):
    """Import finder that changes a module right after it was loaded."""

    def __init__(self, changes):  # type: ignore[no-untyped-def]
        self._changes = changes

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        change = self._changes.pop(name, None)
        if change is None:
            return None
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_and_change(module):  # type: ignore[no-untyped-def]
            load(module)
            change(module)

        spec.loader.exec_module = load_and_change
        return spec


def on(switch):  # type: ignore[no-untyped-def]
    return KIND == "files" and Path(WHERE, switch).exists()


def delay_batches(module):  # type: ignore[no-untyped-def]
    loader = module.PillowLoader
    calm = loader.batches

    def batches(self, start, stop):  # type: ignore[no-untyped-def]
        if KIND == "rest" or (KIND != "files" and rank() != WHERE):
            yield from calm(self, start, stop)
            return
        before = time.monotonic()
        for number, batch in enumerate(calm(self, start, stop)):
            now = time.monotonic()
            if KIND == "slow":
                time.sleep(max(0.02, 0.6 * (now - before)))
            if on("starved"):
                time.sleep(max(0.02, now - before))
            while [str(number)] == OPTION:
                time.sleep(1)
            before = time.monotonic() if KIND == "files" else now
            yield batch

    loader.batches = batches


def rest_and_spoil_gradients(module):  # type: ignore[no-untyped-def]
    calm = module.smoothed_cross_entropy
    steps = itertools.count(1)

    def loss(logits, *arguments):  # type: ignore[no-untyped-def]
        if KIND != "rest":
            time.sleep(REST_SECONDS)
        elif Path(WHERE).exists():
            time.sleep(float(OPTION[0]) if OPTION else REST_STEP_SECONDS)
        if next(steps) % EVERY == 0 and on(f"nonfinite-{rank()}"):
            logits.register_hook(lambda gradient: gradient * math.nan)
        return calm(logits, *arguments)

    module.smoothed_cross_entropy = loss


def replace_worker(module):  # type: ignore[no-untyped-def]
    module.supervise_stage = functools.partial(module.supervise_stage, worker_module="counting_rank")


changes = {"podscale.data.loaders.cpu": delay_batches}
if KIND == "count":
    changes["podscale.launch.supervisor"] = replace_worker
if KIND in ("files", "rest"):
    changes["podscale.pytorch.train_step"] = rest_and_spoil_gradients
if KIND != "none":
    sys.meta_path.insert(0, Finder(changes))
