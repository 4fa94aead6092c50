"""Stand-in for a cluster: its job is the stand-in stage in this process; it can refuse, fail, or never finish."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from podscale.config import loads
from podscale.errors import InputError
from podscale.kubernetes.client import connect_cluster
from podscale.kubernetes.resources import JOB_KINDS
from podscale.kubernetes.transport import NamedCluster


@dataclass(frozen=True)
class JobResult:
    stage: str
    exit_code: int
    error: str = ""
    reused: bool = False

    @property
    def is_done(self):
        return self.exit_code == 0


def _job_is_there():
    api = connect_cluster(NamedCluster())
    return api.get_or_none(JOB_KINDS["pytorchjob"], "digits") is not None


def run_stage(config, stage, shard_set=None, *, out=None, pipeline=False):
    how = os.environ.get("STANDIN_JOB", "")
    if how.startswith("refuse"):
        raise InputError(how.partition(":")[2])
    if how.startswith("lost"):
        _, code, message = how.split(":", 2)
        return JobResult(stage, int(code), message)
    if how == "succeeded" and _job_is_there():
        return JobResult(stage, 0, reused=True)
    if how in ("wait", f"wait {stage}"):
        Path(os.environ["STANDIN_PIDS"]).write_text(str(os.getpid()))
        time.sleep(600)
    from podscale.stages import local

    print("[cluster] PyTorchJob submitted", file=out, flush=True)
    here = ["launch.backend=local", "launch.hardware=null", "train.engine=pytorch"]  # this machine has no TPU
    config = loads(config.model_dump_json(), overrides=here)
    try:
        {"train": local.train, "evaluate": local.evaluate}[stage](config, shard_set)
    except Exception as error:
        return JobResult(stage, int(getattr(error, "exit_code", 1)), "the pod ended")
    return JobResult(stage, 0)
