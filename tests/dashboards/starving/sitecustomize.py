"""Slow down JPEG decoding while the file PODSCALE_STARVE exists, to starve the training."""

import os
import time
from pathlib import Path
from typing import Any

import simplejpeg

_decode = simplejpeg.decode_jpeg
_file = Path(os.environ["PODSCALE_STARVE"])
SECONDS = 0.02


def _slowly(*arguments: Any, **options: Any) -> Any:
    if _file.exists():
        time.sleep(SECONDS)
    return _decode(*arguments, **options)


simplejpeg.decode_jpeg = _slowly
