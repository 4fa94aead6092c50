"""Maps components/ and pipelines/, which stand at the top of the repository where Kubeflow users look for them, into
the package as podscale.components and podscale.pipelines. Everything else about the package is in pyproject.toml."""

from setuptools import find_packages, setup

TOP = ("components", "pipelines")

setup(
    packages=find_packages(include=["podscale", "podscale.*"])
    + [f"podscale.{name}" for top in TOP for name in find_packages(include=[top, f"{top}.*"])],
    package_dir={"podscale": "podscale", **{f"podscale.{top}": top for top in TOP}},
)
