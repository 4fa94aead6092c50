"""Puts trouble into the training of one rank, or of all, in every process started with this on its path.

TROUBLE is `slow:<rank>`: every batch takes most of a step longer, however long that is on this machine;
`stuck:<rank>:<batch>`: this batch never comes; or `files:<folder>`: while there is a file of that name in the folder,
`starved`: on every rank batches take as long as a step longer; `nonfinite-<rank>`: in every fourth update that rank
has a gradient that is not a number, and a loss that is one. With files, every step also rests for a moment: such a
training goes on for minutes, and leaves the machine to others.
"""

import importlib.abc
import importlib.util
import itertools
import math
import os
import sys
import time
from pathlib import Path

KIND, WHERE, *BATCH = os.environ.get("TROUBLE", "none:-1").split(":")
EVERY = 4
REST_SECONDS = 0.03


def rank():  # type: ignore[no-untyped-def]
    """Asked late: a rank is a copy of a process that was none."""
    return os.environ.get("RANK")


class Finder(importlib.abc.MetaPathFinder):
    """Changes a module right after it was loaded."""

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
        if KIND != "files" and rank() != WHERE:
            yield from calm(self, start, stop)
            return
        before = time.monotonic()
        for number, batch in enumerate(calm(self, start, stop)):
            now = time.monotonic()
            if KIND == "slow":
                time.sleep(max(0.02, 0.6 * (now - before)))
            if on("starved"):
                time.sleep(max(0.02, now - before))
            while [str(number)] == BATCH:
                time.sleep(1)
            before = time.monotonic() if KIND == "files" else now
            yield batch

    loader.batches = batches


def rest_and_spoil_gradients(module):  # type: ignore[no-untyped-def]
    calm = module.smoothed_cross_entropy
    updates = itertools.count(1)

    def loss(logits, *arguments):  # type: ignore[no-untyped-def]
        time.sleep(REST_SECONDS)
        if next(updates) % EVERY == 0 and on(f"nonfinite-{rank()}"):
            logits.register_hook(lambda gradient: gradient * math.nan)
        return calm(logits, *arguments)

    module.smoothed_cross_entropy = loss


changes = {"podscale.data.loaders.pillow": delay_batches}
if KIND == "files":
    changes["podscale.pytorch.train_step"] = rest_and_spoil_gradients
if KIND != "none":
    sys.meta_path.insert(0, Finder(changes))
