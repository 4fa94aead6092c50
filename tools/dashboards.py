"""Write the dashboards' JSON into the chart: `python tools/dashboards.py`."""

from pathlib import Path

from podscale.monitoring.dashboards import render_dashboards

TARGET = Path(__file__).resolve().parent.parent / "charts" / "podscale" / "dashboards"

if __name__ == "__main__":
    TARGET.mkdir(exist_ok=True)
    for name, content in render_dashboards().items():
        (TARGET / name).write_text(content, encoding="utf-8")
