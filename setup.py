"""Map directories outside podscale/ into the package, and build native/; the rest of the package is in pyproject.toml.

components/ and pipelines/ are at the top of the repository, where Kubeflow users look for them. The dashboards are in
the chart. The extension is optional: without cargo, or if its crates cannot be downloaded, the package is installed
without it, and images are decoded by the reference path.
"""

from setuptools import find_packages, setup

try:
    from setuptools_rust import Binding, RustExtension
except ImportError:  # an environment without requirements/build.txt
    extensions = []
else:
    extensions = [
        RustExtension(
            "podscale.data._native",
            path="native/Cargo.toml",
            args=["--locked"],
            binding=Binding.PyO3,
            debug=False,
            optional=True,
            py_limited_api=True,
        )
    ]

TOP = ("components", "pipelines")
DASHBOARDS = {"podscale.dashboards": "charts/podscale/dashboards"}

setup(
    packages=find_packages(include=["podscale", "podscale.*"])
    + [f"podscale.{name}" for top in TOP for name in find_packages(include=[top, f"{top}.*"])]
    + [*DASHBOARDS],
    rust_extensions=extensions,
    package_dir={"podscale": "podscale", **{f"podscale.{top}": top for top in TOP}, **DASHBOARDS},
)
