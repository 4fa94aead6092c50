"""Pytest plugin: a run ends with one paragraph on the skipped tests, by what is missing, and what installs it.

`GROUPS` sorts the reasons that tests give; a reason that fits none counts as `other`.
"""

import re
from collections import Counter
from collections.abc import Generator, Iterable
from typing import Any, NamedTuple

import pytest

COMMAND = "make test-programs"
"""The command that installs the Debian packages of all groups."""


class Group(NamedTuple):
    """Skipped tests that need the same thing.

    Args:
        pattern: regular expression of the reasons.
        package: Debian package that holds it; "" if COMMAND does not install it.
        advice: the way to get it without a package.
    """

    name: str
    pattern: str
    package: str = ""
    advice: str = ""


GROUPS = (
    Group("a cluster", r"needs a Kubernetes cluster|[Tt]his cluster lacks|the cluster lacks", advice="make cluster-up"),
    Group("the time of slow tests", r"make test-slow", advice="make test-slow"),
    Group("the time of the examples", r"make test-examples", advice="make test-examples"),
    Group("the time of the drills", r"make test-drills", advice="make test-drills"),
    Group("the time of the GPU on paper", r"make test-gpu-paper", advice="make test-gpu-paper"),
    Group("a second promtool", r"no other promtool(?!.*not on the PATH)", advice="make cluster-up"),
    Group("helm or kubectl", r"\b(helm|kubectl) is neither", advice="make cluster-up"),
    Group("definitions in Go modules", r"is in a Go module", advice="Go, online"),
    Group("container images", r"make images IMAGES=|PODSCALE_TEST_BUILDS", advice="make images"),
    Group("the page that draws dashboards", r"the page that `make dashboards` builds", advice="make dashboards"),
    Group("Prometheus", r"\b(prometheus|promtool) is not|package prometheus\b(?!-)", "prometheus"),
    Group("Pushgateway", r"[Pp]ushgateway", "prometheus-pushgateway"),
    Group("onnxruntime-web", r"onnxruntime-web", advice="podscale export --format html, online"),
    Group("Chromium", r"Chromium", "chromium"),
    Group("podman", r"podman is not installed", "podman"),
    Group("a C or C++ compiler", r"\b(gcc|g\+\+)", "g++"),
    Group("Python packages", r"not installed: |checkov", advice="pip"),
    Group("binutils", r"binutils", "binutils"),
    Group("an emulator of ARM", r"qemu", "qemu-user"),
    Group("Rust for other machines", r"no Rust", advice="rustup target add"),
    Group("real images", r"PODSCALE_TEST_DATA|imagenette224", advice="PODSCALE_TEST_DATA=folder"),
    Group("a GPU", r"CUDA|\bGPU|\bNCCL|\bNVIDIA", advice="make bench-gpu"),
    Group("libtpu", r"libtpu", advice="requirements/tpu.txt"),
    Group("a user other than root", r"root (may read|reads) everything"),
    Group("root", r"\broot\b|mount a tmpfs|namespace"),
)


def describe_skipped(reasons: Iterable[str]) -> str:
    """Return one paragraph on tests that were skipped for these reasons, one a test; "" if there are none."""
    counts = Counter(map(_group_of, reasons))
    if not counts:
        return ""
    packaged = [group for group in counts if group.package]
    others = [group for group in counts if not group.package]
    text = f"Not run: {_tests(counts.total())}."
    if packaged:
        text += f" `{COMMAND}` installs what {_tests(sum(counts[group] for group in packaged))} of them need: "
        text += f"{_listed(packaged, counts, [f'package {group.package}' for group in packaged])}."
    if others:
        text += f" {'The others need' if packaged else 'They need'} "
        text += f"{_listed(others, counts, [group.advice for group in others])}."
    return text


def _group_of(reason: str) -> Group:
    return next((group for group in GROUPS if re.search(group.pattern, reason)), Group("other things, named above", ""))


def _listed(groups: list[Group], counts: Counter[Group], details: list[str]) -> str:
    """Return the groups, that with most tests first."""
    order = sorted(range(len(groups)), key=lambda index: -counts[groups[index]])
    return "; ".join(
        f"{groups[i].name} {counts[groups[i]]}" + (f" ({details[i]})" if details[i] else "") for i in order
    )


def _tests(number: int) -> str:
    return f"{number} test{'s' if number != 1 else ''}"


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the controller of pytest-xdist, or the only process
        config.pluginmanager.register(Summary(config))


class Summary:
    """Print the paragraph after all that pytest prints."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self) -> Generator[None, object, object]:
        result = yield
        reporter: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reports = reporter.stats.get("skipped", ())
            if text := describe_skipped(str(report.longrepr[2]) for report in reports):
                reporter.write_line(f"\n{text}")
        return result
