"""Worker processes that a script or notebook can start without `if __name__ == "__main__"`."""

import sys
import threading
from multiprocessing.context import SpawnContext, SpawnProcess
from types import ModuleType
from typing import Any

_main_lock = threading.Lock()


class _MainlessProcess(SpawnProcess):
    """Spawned process that does not import the main module of its parent."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802
        with _main_lock:
            main = sys.modules["__main__"]
            sys.modules["__main__"] = ModuleType("__main__")  # spawn finds no file to import
            try:
                return SpawnProcess._Popen(process_obj)
            finally:
                sys.modules["__main__"] = main


class MainlessContext(SpawnContext):
    """Start method `spawn` for functions of this library, called from any script or notebook.

    Python's own runs the caller's script again in each process, so that a script without `if __name__ == "__main__"`
    would start processes without end.
    """

    Process = _MainlessProcess
