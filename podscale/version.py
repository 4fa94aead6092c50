"""Version of the package: that of the build if there was one, else the release of this checkout."""

RELEASE = "0.2.0"
"""Release that this code is, or becomes: the chart, the changelog and the tag of the release have it too."""

try:
    from podscale import _build_version  # type: ignore[attr-defined]  # setup.py writes it into wheels, by git's tag

    VERSION: str = _build_version.VERSION
except ImportError:
    VERSION = RELEASE


def installed(package: str) -> str | None:
    """The version of an installed package; it is not imported."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
