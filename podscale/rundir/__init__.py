"""The run directory: its layout, how stages ended, and the lease that keeps it to one writer."""

from podscale.rundir.layout import RunDirectory, dataset_directory, local_path, programs_directory
from podscale.rundir.lease import Lease, LeaseLost, LeaseTaken, fence, is_held, refuse_taken
from podscale.rundir.outcome import Outcome, read_outcomes, recorded_stage, write_outcome

__all__ = [
    "Lease",
    "LeaseLost",
    "LeaseTaken",
    "Outcome",
    "RunDirectory",
    "dataset_directory",
    "fence",
    "is_held",
    "local_path",
    "programs_directory",
    "read_outcomes",
    "recorded_stage",
    "refuse_taken",
    "write_outcome",
]
