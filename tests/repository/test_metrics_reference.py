"""docs/reference/metrics.md agrees with catalogue, rules and dashboards; names follow the conventions of Prometheus."""

import json
from pathlib import Path

import pytest

from podscale.telemetry.catalogue import CATALOGUE, METRICS, MetricSpec
from tools.metrics_reference import TARGET, names_in, read_panels, read_rules, render, uses

UNITS = {"seconds": "_seconds", "bytes": "_bytes", "ratio": "_ratio", "watts": "_watts", "degrees Celsius": "_celsius"}


def test_the_page_is_what_the_catalogue_says() -> None:
    page = render()
    assert TARGET.read_text(encoding="utf-8") == page, "run: python tools/metrics_reference.py"
    missing = [entry.series for entry in METRICS if f"| `{entry.series}` |" not in page]
    assert not missing


@pytest.mark.parametrize("entry", METRICS, ids=[entry.name for entry in METRICS])
def test_names_follow_prometheus_conventions(entry: MetricSpec) -> None:
    assert entry.name.replace("_", "").isalnum()
    assert entry.name.islower()
    assert not entry.name.endswith("_total")  # the text format adds it to counters
    assert entry.name.endswith("_info") == (entry.kind == "info")
    suffix = UNITS.get(entry.unit, "")
    assert suffix in entry.name, f"a number in {entry.unit} says so in its name"
    assert entry.meaning.endswith((".", "1."))
    assert len(entry.labels) == len(set(entry.labels))


def test_every_name_is_there_once() -> None:
    assert len(CATALOGUE) == len(METRICS)


def test_the_page_knows_who_uses_a_series(tmp_path: Path) -> None:
    """A panel of a recorded series counts as a panel of the series that it was recorded from."""
    (tmp_path / "a.yaml").write_text(
        """
groups:
  - name: g
    rules:
      - {record: "run:images:rate5m", expr: "sum by (run) (rate(podscale_train_images_total[5m]))"}
      - {alert: Slow, expr: "histogram_quantile(0.9, rate(podscale_train_step_duration_seconds_bucket[5m])) > 1"}
"""
    )
    panels = [
        {"title": "Rate", "targets": [{"expr": "run:images:rate5m{run=~'$run'}"}]},
        {"title": "Row", "panels": [{"title": "Inside", "targets": [{"expr": "podscale_train_images_total"}]}]},
        {"title": "Text"},
    ]
    (tmp_path / "b.json").write_text(json.dumps({"title": "Board", "panels": panels}))
    rules, shown = list(read_rules(tmp_path)), list(read_panels(tmp_path))
    images = uses(CATALOGUE["train_images"], rules, shown)
    assert images is not None
    assert images.splitlines() == [
        "- `podscale_train_images_total`",
        "    - panels: Board (Rate, Inside)",
        "    - rules: `run:images:rate5m`",
    ]
    slow = uses(CATALOGUE["train_step_duration_seconds"], rules, shown)
    assert slow == "- `podscale_train_step_duration_seconds`\n    - rules: `Slow`"
    assert uses(CATALOGUE["train_steps"], rules, shown) is None


def test_a_series_is_found_as_a_whole_word() -> None:
    assert "podscale_train_images_total" in names_in("rate(podscale_train_images_total{run='x'}[5m])")
    assert "podscale_train_images_total" not in names_in("run:podscale_train_images_total:rate5m")
