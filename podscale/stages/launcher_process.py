"""Launcher of a job in a child process, which its parent starts again if a signal kills it.

Kubeflow Pipelines may not retry a launcher that the kernel's out-of-memory killer ended (a default retry policy OnError
covers lost pods only). The parent, 95 MiB of which 80 are kfp, waits and does not grow. The child holds the client and
its caches, and asks the kernel to be killed first. A child that starts again adopts the job.

This does not help if the kernel kills the whole container at once (memory.oom.group, which kubelets set with cgroup
v2): KFP then has to retry the task.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from podscale.config import RunConfig, loads
from podscale.errors import ExitCode, PodscaleError, error_from_exit_code
from podscale.kubernetes.job_spec import launched_stages
from podscale.runs import StageOutcome
from podscale.runs.stage_outcomes import StageName
from podscale.util import processes
from podscale.util.files import write_json
from podscale.util.processes import SigtermReceived, preempt_on_sigterm, signal_name

MAX_RESTARTS = 5
"""Restarts of a killed launcher."""
RESTART_PAUSE_SECONDS = 2.0
"""Time before a restart, seconds; longer with every restart."""
OOM_SCORE = "500"
"""Value of oom_score_adj by which the kernel prefers the child to its parent."""


def is_launched(config: RunConfig, stage: StageName) -> bool:
    """Return True if the task of a stage in a pipeline launches a job and waits for it."""
    return stage in launched_stages(config)


def launch_in_child(config: RunConfig, stage: StageName, shard_set: str) -> StageOutcome:
    """Run `on_cluster.run_on_cluster` in a child process; call it from the main thread.

    Raises:
        PodscaleError: The error of the child, or a signal has killed it too often.
    """
    with tempfile.TemporaryDirectory(prefix="podscale-launcher-") as folder:
        task, result = Path(folder) / "task.json", Path(folder) / "result.json"
        write_json(task, {"document": config.model_dump_json(), "stage": stage, "shard_set": shard_set})
        for restarts_left in range(MAX_RESTARTS, -1, -1):
            status = _run_child(task, result)
            if status >= 0:
                return _read_result(result, status)
            killer = signal_name(-status)
            if restarts_left:
                print(f"[cluster] {killer} killed the launcher; it starts again ({restarts_left} left)", flush=True)
                time.sleep(RESTART_PAUSE_SECONDS * (MAX_RESTARTS + 1 - restarts_left))
    raise PodscaleError(
        f"the launcher was killed by {killer} {MAX_RESTARTS + 1} times; its job runs on",
        hint="If its memory is too small, compile the pipeline again with more (docs/how-to/kfp.md).",
    )


def _run_child(task: Path, result: Path) -> int:
    """Return the exit status of the child (negative: a signal). A stop request is passed on to it."""
    command = [sys.executable, "-m", "podscale.stages.launcher_process", str(task), str(result), str(os.getpid())]
    child = subprocess.Popen(command)
    try:
        return child.wait()
    except SigtermReceived:
        child.terminate()
        child.wait()
        raise


def _read_result(path: Path, status: int) -> StageOutcome:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise error_from_exit_code(status, f"the launcher exited with code {status}; see its log") from None
    if "outcome" in result:
        return StageOutcome(**result["outcome"])
    raise error_from_exit_code(result["exit_code"], result["error"])


def main(task: str, result: str, parent: str) -> int:
    """Run the child: write the outcome or the error of the stage to the file `result`."""
    processes.exit_with_parent(int(parent))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE, encoding="ascii")
    from podscale.stages import on_cluster

    work = json.loads(Path(task).read_text(encoding="utf-8"))
    config = loads(work["document"], "the launcher's document")
    content: dict[str, Any]
    try:
        with preempt_on_sigterm():
            outcome = on_cluster.run_on_cluster(config, work["stage"], work["shard_set"])
        code, content = int(ExitCode.DONE), {"outcome": asdict(outcome)}
    except PodscaleError as error:
        code, content = int(error.exit_code), {"exit_code": int(error.exit_code), "error": str(error)}
    except Exception as error:
        failure = {"exit_code": int(ExitCode.FAILED), "error": f"{type(error).__name__}: {error}"}
        write_json(Path(result), failure)
        raise
    write_json(Path(result), content)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
