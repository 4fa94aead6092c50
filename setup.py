"""Map directories outside podscale/ into the package; everything else about the package is in pyproject.toml.

components/ and pipelines/ are at the top of the repository, where Kubeflow users look for them. The dashboards are in
the chart.
"""

from setuptools import find_packages, setup

TOP = ("components", "pipelines")
DASHBOARDS = {"podscale.dashboards": "charts/podscale/dashboards"}

setup(
    packages=find_packages(include=["podscale", "podscale.*"])
    + [f"podscale.{name}" for top in TOP for name in find_packages(include=[top, f"{top}.*"])]
    + [*DASHBOARDS],
    package_dir={"podscale": "podscale", **{f"podscale.{top}": top for top in TOP}, **DASHBOARDS},
)
