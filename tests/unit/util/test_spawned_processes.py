"""Worker processes of a script that has no `if __name__ == "__main__"`."""

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, sys
from concurrent.futures import ProcessPoolExecutor
from podscale.util.spawned_processes import MainlessContext
print("the script runs", flush=True)
pool = ProcessPoolExecutor(2, MainlessContext())
print(sorted(pool.map(abs, [-1, 2])), flush=True)
pool.shutdown()
print(sys.modules["__main__"].__file__ == __file__)
"""


def test_a_script_without_a_guard_is_not_run_again(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["the script runs", "[1, 2]", "True"]
    assert done.stderr == ""
