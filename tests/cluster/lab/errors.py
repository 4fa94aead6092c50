"""Errors of the lab."""


class LabError(Exception):
    """Failure, with a hint where to look."""


class Unavailable(LabError):
    """This machine cannot run a cluster (no root, no Go, no access to the module proxy); not a defect of the code."""
