"""Map directories outside podscale/ into the package, take the version from git, and build native/.

The rest is in pyproject.toml.

components/ and pipelines/ are at the top of the repository, where Kubeflow users look for them. The dashboards are in
the chart. The extension is optional: without cargo, or if its crates cannot be downloaded, the package is installed
without it, and images are decoded by the reference path.
"""

import os
import re
import shutil
from pathlib import Path
from typing import Any

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
TOP = ("components", "pipelines")
DASHBOARDS = {"podscale.dashboards": "charts/podscale/dashboards"}
RELEASE = re.findall(r'^RELEASE = "(.+)"$', (HERE / "podscale" / "version.py").read_text(encoding="utf-8"), re.M)[0]
"""Release that this code is, or becomes. The package is not imported, since its dependencies may be missing."""


def version_of_commit(version: Any) -> str:
    """Return the version of a setuptools-scm version: its tag, or the number of commits on the way to RELEASE."""
    from packaging.version import Version
    from setuptools_scm.version import guess_next_dev_version

    if version.exact or version.tag >= Version(RELEASE):
        return str(guess_next_dev_version(version))
    return f"{RELEASE}.dev{version.distance}"


def native_extensions() -> list[Any]:
    """Return the extension; none without cargo or with PODSCALE_NATIVE=0, so that the wheel is one for all machines."""
    if os.environ.get("PODSCALE_NATIVE") == "0" or shutil.which(os.environ.get("CARGO", "cargo")) is None:
        return []
    try:
        from setuptools_rust import Binding, RustExtension
    except ImportError:  # an environment without requirements/build.txt
        return []
    extension = RustExtension(
        "podscale.data._native",
        path="native/Cargo.toml",
        args=["--locked"],
        binding=Binding.PyO3,
        debug=False,
        optional=True,
        py_limited_api=True,
    )
    return [extension]


class BuildWithVersion(build_py):
    """Build of the modules, with the version of the build as one of them."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "podscale" / "_build_version.py"
            version = self.distribution.get_version()
            target.write_text(f'"""Version of this build."""\n\nVERSION = "{version}"\n', encoding="utf-8")


EXTENSIONS = native_extensions()

setup(
    # A copy without git, such as the build context of an image, has RELEASE; a source distribution has PKG-INFO.
    use_scm_version={
        "version_scheme": version_of_commit,
        "fallback_version": None if (HERE / ".git").exists() else RELEASE,
    },
    cmdclass={"build_py": BuildWithVersion},
    packages=find_packages(include=["podscale", "podscale.*"])
    + [f"podscale.{name}" for top in TOP for name in find_packages(include=[top, f"{top}.*"])]
    + [*DASHBOARDS],
    rust_extensions=EXTENSIONS,
    # The extension uses Python's stable interface only, so that a wheel with it serves all later versions.
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if EXTENSIONS else {},
    package_dir={"podscale": "podscale", **{f"podscale.{top}": top for top in TOP}, **DASHBOARDS},
)
