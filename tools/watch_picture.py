"""Save the display of `podscale watch` as docs/images/watch.svg, for the README.

    podscale run digits --set run.id=digits-b64 & python tools/watch_picture.py runs/digits-b64

The picture shows a real run after the fraction `--share` of its steps.
"""

import argparse
import io
import re
import time
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI

from podscale.monitoring.watch.live import INTERVAL_SECONDS, WatchedRun
from podscale.monitoring.watch.sources import DirectorySource
from podscale.runs import RunDirectory

TARGET = Path(__file__).resolve().parent.parent / "docs" / "images" / "watch.svg"
WIDTH = 112
FONTS = "ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace"


def save_picture(run: Path, share: float, target: Path) -> None:
    """Watch the run until a fraction of its steps is done, and save the picture."""
    watched = WatchedRun(DirectorySource(RunDirectory(run)))
    while not _is_due(watched, share):
        if watched.source.has_ended():
            raise SystemExit(f"{run}: the run ended before --share {share} of its steps")
        time.sleep(INTERVAL_SECONDS)
        watched.poll()
    console = Console(file=io.StringIO(), record=True, width=WIDTH, force_terminal=True, color_system="truecolor")
    console.print(watched.render())
    console.save_svg(str(target), title=f"podscale watch {run}", theme=MONOKAI, code_format=_offline_template())


def _is_due(watched: WatchedRun, share: float) -> bool:
    """Return True if enough steps are done, and metrics of ranks and an accuracy are available."""
    status = watched.status
    complete = bool(watched.stats.ranks) and status.evaluation is not None and status.state == "training"
    return complete and status.step >= share * (status.total_steps or float("inf"))


def _offline_template() -> str:
    """Return rich's SVG template with local fonts, so that the picture downloads nothing."""
    text = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.S)
    return text.replace("Fira Code, monospace", FONTS).replace("font-family: arial", f"font-family: {FONTS}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--share", type=float, default=0.6, help="fraction of the steps before the picture")
    arguments = parser.parse_args()
    save_picture(arguments.run, arguments.share, TARGET)
    print(TARGET)


if __name__ == "__main__":
    main()
