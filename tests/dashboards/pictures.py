"""Draws the dashboards into docs/images/dashboards: `python -m tests.dashboards.pictures` (or `make dashboards`).

Needs Prometheus, Chromium, Node.js, and about ten minutes: the pictures are of a real training. `--keep FOLDER` leaves
the run and what Prometheus collected of it there.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

from podscale.monitoring.dashboards import DASHBOARDS as BOARDS
from tests.dashboards.live import RUN, SECOND, Recorded, record
from tests.support.browser import browser, find_browser
from tests.support.drawing import EVERYTHING, ROOT, bundle, draw

TARGET = ROOT / "docs" / "images" / "dashboards"
DASHBOARDS = ROOT / "charts" / "podscale" / "dashboards"
WIDTHS = {"": 1440, "-phone": 390}
MOST_BYTES = 250_000
FOREIGN = "cluster"
"""The board whose panels may be empty: no GPU, TPU or Kubernetes is under this run."""


def pictures(recorded: Recorded, scratch: Path, target: Path) -> None:
    """Every board at every width. Raises RuntimeError where one cannot be drawn."""
    program = find_browser()
    assert program is not None
    target.mkdir(parents=True, exist_ok=True)
    with browser(program) as tab:
        for board in BOARDS:
            dashboard = json.loads((DASHBOARDS / f"{board.uid}.json").read_text(encoding="utf-8"))
            compares = board.name == "compare"
            span = recorded.both if compares else recorded.first
            for suffix, width in WIDTHS.items():
                runs_text = f"Run: {RUN}, {SECOND}" if compares else f"Run: {RUN}"
                chosen = EVERYTHING if compares else {**EVERYTHING, "run": RUN}
                page = scratch / "page.html"
                empty = draw(tab, dashboard, span, page, width=width, subtitle=runs_text, variables=chosen)
                full_page = scratch / "whole.png"
                tab.screenshot(full_page, width=width)
                save(full_page, target / f"{board.name}{suffix}.png")
                print(f"{board.name}{suffix}: without data: {', '.join(empty) or 'none'}")


def save(picture: Path, target: Path) -> None:
    """With as many colours as fit below the limit of the repository."""
    for colors in (256, 128, 64, 32):
        Image.open(picture).convert("RGB").quantize(colors, dither=Image.Dither.NONE).save(target, optimize=True)
        if target.stat().st_size < MOST_BYTES:
            return
    raise RuntimeError(f"{target} is larger than {MOST_BYTES} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="folder for the run, which must not exist")
    parser.add_argument("--into", type=Path, default=TARGET)
    arguments = parser.parse_args()
    for program in ("prometheus", "npm"):
        if shutil.which(program) is None:
            sys.exit(f"{program} is needed: install the package {program}")
    if find_browser() is None:
        sys.exit("Chromium is needed: install the package chromium")
    bundle()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.keep or Path(scratch) / "training"
        folder.mkdir(exist_ok=True)
        with record(folder) as recorded:
            print(f"trained for {time.monotonic() - began:.0f} s", flush=True)
            (folder / "recorded.json").write_text(json.dumps([recorded.first.__dict__, recorded.both.__dict__]))
            pictures(recorded, Path(scratch), arguments.into)


if __name__ == "__main__":
    main()
