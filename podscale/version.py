"""The version of the package, in a module of its own so that building a wheel imports nothing else."""

VERSION = "0.1.0"


def installed(package: str) -> str | None:
    """The version of an installed package; it is not imported."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
