"""What stops the lab."""


class LabError(Exception):
    """Something went wrong: what, and where to look."""


class Unavailable(LabError):
    """This machine cannot carry a cluster (no root, no Go, no way to the module proxy): not a defect of the code."""
