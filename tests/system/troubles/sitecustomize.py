"""Puts trouble into the training loader of one rank, in every process started with this on its path.

TROUBLE is `slow:<rank>`: every batch takes most of an update longer, however long that is on this machine; or
`stuck:<rank>:<batch>`: this batch never comes.
"""

import importlib.abc
import importlib.util
import os
import sys
import time

LOADER = "podscale.input.loaders.torchvision"
KIND, RANK, *BATCH = os.environ.get("TROUBLE", "none:-1").split(":")


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != LOADER or os.environ.get("RANK") != RANK:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_and_trouble(module):  # type: ignore[no-untyped-def]
            load(module)
            trouble(module.TorchvisionLoader)

        spec.loader.exec_module = load_and_trouble
        return spec


def trouble(loader):  # type: ignore[no-untyped-def]
    calm = loader.batches

    def batches(self, start, stop):  # type: ignore[no-untyped-def]
        before = time.monotonic()
        for number, batch in enumerate(calm(self, start, stop)):
            now = time.monotonic()
            if KIND == "slow":
                time.sleep(max(0.02, 0.6 * (now - before)))
            while [str(number)] == BATCH:
                time.sleep(1)
            before = now
            yield batch

    loader.batches = batches


sys.meta_path.insert(0, Finder())
