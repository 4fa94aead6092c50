"""Headless Chromium driven over its debugging pipe: no driver, no port."""

import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--hide-scrollbars",
    "--disable-dev-shm-usage",
    "--disable-features=IsolateSandboxedIframes,Translate,OptimizationHints",
    "--remote-debugging-pipe",
]


def find_browser() -> str | None:
    """Return the path of an installed Chromium."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def browser_or_skip() -> str:
    """Return the path of an installed Chromium; skips the test without one."""
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium)")
    return program


class Browser:
    """One browser tab; `events` has the page's requests, console messages and exceptions."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back, self._number, self._buffer = to, back, 0, b""
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command of the DevTools protocol and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def open(self, page: Path | str, *, width: int = 1280, dark: bool = False) -> None:
        """Load a file or an address in a window of `width` CSS pixels and wait until it is drawn."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.events.clear()
        self.call("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        deadline = time.monotonic() + 60
        while self.evaluate("document.readyState") != "complete" and time.monotonic() < deadline:
            time.sleep(0.05)

    def evaluate(self, script: str) -> Any:
        """Evaluate an expression in the page and return its JSON value; promises are awaited."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def requests(self) -> list[str]:
        """Return the addresses that the page asked for since it was opened, except `data:`."""
        sent = [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return [address for address in sent if not address.startswith("data:")]

    def screenshot(self, path: Path, *, width: int = 1280) -> None:
        """Return the whole page as a PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": width, "height": size["height"], "scale": 1}
        image = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(image["data"]))

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            chunk = os.read(self._back, 1 << 20)
            if not chunk:
                raise RuntimeError("the browser has exited")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message


@contextmanager
def browser(program: str) -> Iterator[Browser]:
    """Yield a browser with its own process group and profile; both are removed afterwards."""
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    for kept in (to_read, from_write):
        os.set_inheritable(kept, True)
    profile = tempfile.mkdtemp(prefix="browser-")
    # The protocol's pipe is descriptors 3 and 4 of the browser.
    command = [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    script = f'exec 13<&{to_read} 14>&{from_write} 3<&13 4>&14 13<&- 14>&-; exec "$@"'
    process = subprocess.Popen(
        ["bash", "-c", script, "bash", *command],
        pass_fds=(to_read, from_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(to_read)
    os.close(from_write)
    try:
        yield Browser(to_write, from_read)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(to_write)
        os.close(from_read)
        shutil.rmtree(profile, ignore_errors=True)
