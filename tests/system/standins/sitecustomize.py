"""Replace packer, trainer and report by small real stages in every process started with this folder on its path.

They take no time, so that tests of the pipeline (kfp, processes, signals, outcomes) are fast. The real stages have
tests of their own, and test_pipeline_digits tests all together.

STANDIN_PYTHON names a program to start the stages with, in place of this interpreter (tests/support/task_server.py).
"""

import importlib.abc
import importlib.util
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
STANDINS = {
    "podscale.data.sharding.build_shard_set": HERE / "standin_build.py",
    "podscale.launch.supervisor": HERE / "standin_supervisor.py",
    "podscale.kubernetes.run_stage": HERE / "standin_run_stage.py",
    "podscale.report.model_card": HERE / "standin_card.py",
    "podscale.evaluation.evaluation_json": HERE / "standin_evaluation.py",
    "podscale.report.page": HERE / "standin_report.py",
    "podscale.export.export_model": HERE / "standin_export.py",
}


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name not in STANDINS:
            return None
        package_folder = ROOT.joinpath(*name.split("."))  # a package keeps its other modules
        return importlib.util.spec_from_file_location(
            name, STANDINS[name], submodule_search_locations=[str(package_folder)] if package_folder.is_dir() else None
        )


sys.meta_path.insert(0, Finder())
sys.executable = os.environ.get("STANDIN_PYTHON", sys.executable)
