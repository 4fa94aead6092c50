"""Real containers for tests: podman as root, with settings that also work inside small virtual machines."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support import podman

REGISTRY = os.environ.get("PODSCALE_TEST_REGISTRY", "localhost")
TAG = os.environ.get("PODSCALE_TEST_TAG", "dev")
HARDENED = (
    "--read-only",
    "--cap-drop=ALL",
    "--security-opt=no-new-privileges",
    "--tmpfs=/tmp:rw,exec,nosuid,nodev,mode=1777",
)
"""Options that restrict a container as Pod Security `restricted` does, with a read-only root file system."""
SECONDS = 840


@dataclass(frozen=True)
class Engine:
    """podman and its environment."""

    variables: dict[str, str] = field(default_factory=dict)

    def __call__(self, *arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["podman", *map(str, arguments)],
            check=check,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            env={**os.environ, **self.variables},
        )

    def image(self, name: str) -> str:
        """Return the full name of an image; skip the test if it was not built."""
        full = f"{REGISTRY}/podscale-{name}:{TAG}"
        if self("image", "exists", full, check=False).returncode != 0:
            pytest.skip(f"image {full} is not built: make images IMAGES={name}")
        return full

    def inspect(self, image: str) -> dict[str, Any]:
        inspection: dict[str, Any] = json.loads(self("image", "inspect", image).stdout)[0]
        return inspection

    def inside(self, image: str, script: str, *options: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a shell script in a hardened container, which is removed afterwards."""
        return self("run", "--rm", "--network=none", *HARDENED, *options, image, "sh", "-c", script, check=check)

    @contextmanager
    def mounted(self, image: str) -> Iterator[Path]:
        """Yield the mounted root of an image, for programs that it does not contain."""
        try:
            yield Path(self("image", "mount", image).stdout.strip())
        finally:
            self("image", "unmount", image, check=False)

    @contextmanager
    def service(self, folder: Path) -> Iterator[str]:
        """Serve podman's Docker-compatible API; yield its address."""
        socket = folder / "podman.sock"
        server = subprocess.Popen(
            ["podman", "system", "service", "--time=0", f"unix://{socket}"], env={**os.environ, **self.variables}
        )
        try:
            deadline = time.monotonic() + 120
            while not socket.exists():
                assert server.poll() is None, "podman system service has exited"
                assert time.monotonic() < deadline, "podman system service does not listen"
                time.sleep(0.05)
            yield f"unix://{socket}"
        finally:
            server.terminate()
            server.wait(30)


def find_engine(folder: Path) -> Engine:
    """Return podman, or skip the test if it cannot run containers here; its settings are written to `folder`."""
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed")
    if os.geteuid() != 0:
        pytest.skip("needs root to start containers")
    variables = {} if "CONTAINERS_CONF" in os.environ else {"CONTAINERS_CONF": str(podman.write(folder))}
    return Engine(variables)
