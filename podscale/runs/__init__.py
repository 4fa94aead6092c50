"""Run directory: its files, the outcomes of stages, and the lease that limits it to one writer."""

from podscale.runs.directory import RunDirectory, dataset_directory, local_path, programs_directory
from podscale.runs.lease import Lease, LeaseLost, LeaseTaken, check_not_taken, is_held, lease_fence
from podscale.runs.stage_outcomes import StageOutcome, read_outcomes, record_stage, write_outcome

__all__ = [
    "Lease",
    "LeaseLost",
    "LeaseTaken",
    "RunDirectory",
    "StageOutcome",
    "check_not_taken",
    "dataset_directory",
    "is_held",
    "lease_fence",
    "local_path",
    "programs_directory",
    "read_outcomes",
    "record_stage",
    "write_outcome",
]
