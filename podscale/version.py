"""Version of the package: that of the build if there was one, else the release of this checkout."""

RELEASE = "0.2.0"
"""Release that this code is, or becomes: the chart, the changelog and the tag of the release have it too."""

try:
    # setup.py writes the module into wheels, by the tag in git.
    from podscale._build_version import VERSION as _BUILT  # type: ignore[import-not-found]

    VERSION: str = _BUILT
except ImportError:
    VERSION = RELEASE


def installed(package: str) -> str | None:
    """The version of an installed package; it is not imported."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
