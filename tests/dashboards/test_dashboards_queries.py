"""Every query of every dashboard, against a real Prometheus with samples of every series."""

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from podscale.monitoring.dashboards.panels import THIRD_PARTY_METRICS
from podscale.telemetry.catalogue import METRICS
from tests.support import synthetic_run
from tests.support.helm import CHART
from tests.support.prometheus import Prometheus, fill, prometheus
from tests.support.synthetic_run import EVERY, LENGTH

BOARDS = sorted((CHART / "dashboards").glob("*.json"))
VALUES = {"$__rate_interval": "60s", "$__interval": "15s", "$__range": f"{LENGTH:.0f}s"}
VARIABLES = {
    "Grafana's All": {"namespace": ".*", "run": ".+", "rank": ".+"},
    "several chosen": {"namespace": "(|training)", "run": f"({synthetic_run.RUN}|another)", "rank": "(0|1)"},
}
SHARES = ("percentunit",)
MARKS = {
    "Restarts": {synthetic_run.BACK},
    "Checkpoints": {120.0 * number for number in range(11)},
    "Evaluations": {300.0 * number for number in range(5)},
}
"""Times after the start of the synthetic run, seconds."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Prometheus, float]]:
    """Prometheus with twenty minutes of a synthetic run, and the end of that run."""
    data = tmp_path_factory.mktemp("prometheus") / "data"
    begin = time.time() // EVERY * EVERY - LENGTH
    fill(data, synthetic_run.history().text(begin))
    with prometheus(data) as running:
        yield running, begin + LENGTH


def filled(expression: str, variables: dict[str, str]) -> str:
    """Return the query with Grafana's variables filled in."""
    for name, value in {**VALUES, **{f"${name}": value for name, value in variables.items()}}.items():
        expression = expression.replace(f"${{{name[1:]}}}", value).replace(name, value)
    assert "$" not in expression, expression
    return expression


def targets(path: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    panels = json.loads(path.read_text(encoding="utf-8"))["panels"]
    return [(panel, target) for panel in panels if panel["type"] != "row" for target in panel["targets"]]


@pytest.mark.parametrize("chosen", VARIABLES)
@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_every_query_returns_data_of_its_kind(path: Path, chosen: str, server: tuple[Prometheus, float]) -> None:
    running, end = server
    for panel, target in targets(path):
        query = filled(target["expr"], VARIABLES[chosen])
        if target["instant"]:
            values = [float(one["value"][1]) for one in running.instant(query, end)]
            labels = [one["metric"] for one in running.instant(query, end)]
        else:
            answer = running.course(query, end - LENGTH, end, EVERY)
            values = [float(value) for one in answer for _, value in one["values"]]
            labels = [one["metric"] for one in answer]
        assert values, f"{panel['title']}: {query} returns nothing"
        assert all(math.isfinite(value) for value in values), f"{panel['title']}: {query} is not a number somewhere"
        if panel["fieldConfig"]["defaults"]["unit"] in SHARES:
            assert -0.01 <= min(values) <= max(values) <= 1.01, (
                f"{panel['title']}: {query}: {min(values)}, {max(values)}"
            )
        legend = target["legendFormat"]
        for label in [part.partition("}}")[0] for part in legend.split("{{")[1:]]:
            assert all(label in one for one in labels), f"{panel['title']}: no label {label} for {legend}: {labels[:2]}"
        names = [tuple(sorted(one.items())) for one in labels]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_variables_and_annotations_find_what_happened(path: Path, server: tuple[Prometheus, float]) -> None:
    running, end = server
    dashboard = json.loads(path.read_text(encoding="utf-8"))
    everything = VARIABLES["Grafana's All"]
    for variable in dashboard["templating"]["list"][1:]:
        series, label = variable["definition"].removeprefix("label_values(").removesuffix(")").rsplit(", ", 1)
        events = running.get(
            f"label/{label}/values", start=end - LENGTH, end=end, **{"match[]": filled(series, everything)}
        )
        expected = {"run": [synthetic_run.RUN], "rank": ["0", "1"], "namespace": []}  # no namespace outside Kubernetes
        assert events == expected[label]
    for event in dashboard["annotations"].get("list", []):
        answer = running.course(filled(event["expr"], everything), end - LENGTH, end, EVERY)
        assert event["useValueForTime"]
        begin = end - LENGTH
        times = {round(float(value) / 1000 - begin, 3) for one in answer for _, value in one["values"]}
        assert times == MARKS[event["name"]], event["name"]


def test_the_synthetic_run_has_every_series(server: tuple[Prometheus, float]) -> None:
    running, _ = server
    names = {name.removesuffix("_bucket").removesuffix("_sum") for name in running.get("label/__name__/values")}
    assert {entry.series for entry in METRICS} | set(THIRD_PARTY_METRICS) <= names
