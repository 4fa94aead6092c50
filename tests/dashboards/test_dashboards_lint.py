"""The committed dashboards: as the code makes them, and as Grafana's dashboard-linter wants them.

Its rules are said again here, because the program needs a newer Go than most machines have. In its words a run is a
job and a rank is an instance.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grafana_foundation_sdk")

from grafana_foundation_sdk.models import units

from podscale.monitoring.dashboards import DASHBOARDS, render_dashboards
from podscale.monitoring.dashboards.panels import THIRD_PARTY_METRICS
from podscale.monitoring.rule_files import ALERT_RULES
from podscale.monitoring.rule_types import RUNBOOKS_TOKEN
from podscale.telemetry.catalogue import METRICS

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "charts" / "podscale" / "dashboards").glob("*.json"))
BY_STEM = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in FILES}
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
MOST_BYTES = 1 << 20
UNITS = {value for name, value in vars(units).items() if isinstance(value, str) and not name.startswith("_")}

# Counters whose value itself means something, because they are kept over all launches of a run or a packing.
WHOLE = {
    "podscale_train_restarts_total",
    "podscale_train_launches_total",
    "podscale_train_wall_seconds_total",
    "podscale_shard_images_total",
}
OURS = {entry.series: entry for entry in METRICS}
WORDS = {"unless", "or", "and", "bool", "offset"}
LISTS = re.compile(r"\b(by|on|ignoring|group_left|without) \([^)]*\)")
NAMED = re.compile(r"(?<![\w$.])([a-zA-Z_:][\w:]*)(\s*\()?(\{[^}]*\})?(\[[^\]]*\])?")


@dataclass(frozen=True)
class Series:
    """A series as a query names it. called: what stands before it, which ends with the function it is given to."""

    name: str
    matchers: str
    window: str
    called: str

    @property
    def metric(self) -> str:
        known = self.name in OURS or self.name in THIRD_PARTY_METRICS
        return self.name if known else re.sub(r"_(bucket|sum|count)$", "", self.name)


def series(expression: str) -> list[Series]:
    """Every series of an expression: all names that are no function, no keyword and no label."""
    bare = LISTS.sub("", expression.replace("${run}", "$run"))
    matches = [match for match in NAMED.finditer(bare) if not match[2] and match[1] not in WORDS]
    return [Series(match[1], match[3] or "", match[4] or "", bare[: match.start()]) for match in matches]


PANELS = [
    pytest.param(panel, id=f"{stem.removeprefix('podscale-')}: {panel['title']}")
    for stem, dashboard in BY_STEM.items()
    for panel in dashboard["panels"]
    if panel["type"] != "row"
]


def expressions(panel: dict[str, Any]) -> list[str]:
    return [target["expr"] for target in panel["targets"]]


def panel_series(panel: dict[str, Any]) -> list[Series]:
    return [one for expression in expressions(panel) for one in series(expression)]


def test_the_files_are_what_the_code_makes() -> None:
    assert render_dashboards() == {path.name: path.read_text(encoding="utf-8") for path in FILES}, (
        "run `python tools/dashboards.py`"
    )
    assert len(FILES) == 6


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_dashboard_fits_in_a_configmap(path: Path) -> None:
    assert path.stat().st_size < MOST_BYTES


@pytest.mark.parametrize("stem", BY_STEM)
def test_a_board_cannot_be_edited_and_links_to_the_others(stem: str) -> None:
    dashboard = BY_STEM[stem]
    assert dashboard["editable"] is False
    assert dashboard["uid"] == stem
    assert len(stem) <= 40  # Grafana's limit
    assert dashboard["title"].startswith("Podscale / ")
    assert dashboard["description"]
    assert dashboard["schemaVersion"] < 43  # 42 is what Grafana 10 to 13 load
    (boards, runbooks) = dashboard["links"]
    assert set(boards["tags"]) <= set(dashboard["tags"])
    assert boards["includeVars"]
    assert boards["keepTime"]
    assert runbooks["url"] == RUNBOOKS_TOKEN


@pytest.mark.parametrize("stem", BY_STEM)
def test_variables_are_templates_that_reload(stem: str) -> None:
    dashboard = BY_STEM[stem]
    board = next(board for board in DASHBOARDS if board.uid == stem)
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert [*variables] == ["datasource", "namespace", "run", *(["rank"] if board.ranks else [])]
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    for name in [*variables][1:]:
        variable = variables[name]
        assert variable["datasource"] == SOURCE
        assert variable["refresh"] == 2  # when the time range changes
        assert variable["query"]["query"] == variable["definition"]
        several = name != "run" or board.runs
        assert variable["multi"] is variable["includeAll"] is several
        # `.*` where the label may be absent: outside Kubernetes nothing has a namespace.
        assert variable.get("allValue") == ((".*" if name == "namespace" else ".+") if several else None)
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard["panels"])))
    assert set(variables) <= used, "a variable that nothing uses"


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_says_what_it_shows(panel: dict[str, Any]) -> None:
    assert panel["title"]
    assert panel["datasource"] == SOURCE
    defaults = panel["fieldConfig"]["defaults"]
    assert defaults["unit"] in UNITS or defaults["unit"].startswith("count:")
    assert defaults["noValue"]
    metrics = {one.metric for one in panel_series(panel)}
    last = panel["description"].splitlines()[-1]
    assert last.startswith("Metric")
    assert set(re.findall(r"`(\w+)`", last)) == metrics
    assert len(panel["description"].splitlines()[0]) > 5


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_asks_by_the_variables(panel: dict[str, Any]) -> None:
    assert panel["targets"]
    for target in panel["targets"]:
        assert target["datasource"] == SOURCE
    assert all(series(expression) for expression in expressions(panel))
    for one in panel_series(panel):
        if one.metric in OURS:
            assert 'namespace=~"$namespace"' in one.matchers, one
            assert 'run=~"$run"' in one.matchers, one


@pytest.mark.parametrize("panel", PANELS)
def test_every_series_is_known_with_its_labels(panel: dict[str, Any]) -> None:
    for one in panel_series(panel):
        assert one.metric in OURS or one.metric in THIRD_PARTY_METRICS, f"{one.name} is in no catalogue"
        if one.metric in OURS:
            entry = OURS[one.metric]
            labels = set(re.findall(r"(\w+)(?:=~|!=|=)", one.matchers)) - {"namespace"}
            assert labels <= set(entry.labels), f"{one.name} has no label {labels - set(entry.labels)}"
            for label, value in re.findall(r'(\w+)!?="([^"$]+)"', one.matchers):
                assert value in entry.own_labels[label], f"{label} of {one.name} is never {value}"


@pytest.mark.parametrize("panel", PANELS)
def test_counters_are_read_by_their_growth(panel: dict[str, Any]) -> None:
    for one in panel_series(panel):
        counter = one.name.endswith(("_total", "_bucket", "_sum", "_count"))
        if one.window and one.called.endswith("_over_time("):
            assert not counter or one.name in WHOLE
            assert one.window in ("[$__range]", "[5m]")
        elif one.window:
            assert counter, f"{one.name} is no counter"
            assert one.window in ("[$__rate_interval]", "[$__range]")
            assert one.called.endswith(("rate(", "increase("))
        else:
            assert not counter or one.name in WHOLE, f"{one.name} is a counter: use its growth"


def test_panels_link_to_the_runbooks_of_alerts_that_there_are() -> None:
    links = {link["url"] for panel in PANELS for link in panel.values[0].get("links", [])}
    alerts = {f"{RUNBOOKS_TOKEN}{alert.runbook}" for alert in ALERT_RULES}
    assert links
    assert links <= alerts


def test_every_foreign_series_is_used() -> None:
    used = {one.metric for panel in PANELS for text in expressions(panel.values[0]) for one in series(text)}
    assert set(THIRD_PARTY_METRICS) <= used


@pytest.mark.parametrize("stem", BY_STEM)
def test_panels_fill_the_grid_without_overlap(stem: str) -> None:
    occupied: dict[tuple[int, int], str] = {}
    for panel in BY_STEM[stem]["panels"]:
        position = panel["gridPos"]
        assert position["x"] + position["w"] <= 24
        for x in range(position["x"], position["x"] + position["w"]):
            for y in range(position["y"], position["y"] + position["h"]):
                assert (x, y) not in occupied, f"{panel['title']} lies on {occupied[x, y]}"
                occupied[x, y] = panel["title"]
    height = max(y for _, y in occupied) + 1
    assert len(occupied) == 24 * height, "a hole in the grid"
    ids = [panel["id"] for panel in BY_STEM[stem]["panels"]]
    assert len(set(ids)) == len(ids)
