"""Draw the first screen of a run's report into docs/images/report.png, for the README.

    python tools/report_picture.py runs/digits

Needs Chromium on the PATH. The picture is a screenshot of a real report.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

TARGET = Path(__file__).resolve().parent.parent / "docs" / "images" / "report.png"
WIDTH, HEIGHT, SCALE = 1180, 1100, 1.5


def draw(report: Path, target: Path) -> None:
    """Take a screenshot of the top of `report` and reduce it to 128 colours."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        sys.exit("chromium: not on the PATH. Install the package chromium.")
    with tempfile.TemporaryDirectory() as scratch:
        picture = Path(scratch) / "report.png"
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        command += [f"--user-data-dir={scratch}/profile", f"--window-size={WIDTH},{HEIGHT}"]
        command += [f"--force-device-scale-factor={SCALE}", f"--screenshot={picture}", report.resolve().as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.open(picture).convert("RGB").quantize(128).save(target, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run directory")
    draw(parser.parse_args().run / "report.html", TARGET)
    print(TARGET)


if __name__ == "__main__":
    main()
