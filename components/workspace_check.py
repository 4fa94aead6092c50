"""Check that a pod's workspace is on a mounted volume, because files in the container are lost with the pod."""

import os
import re
from pathlib import Path

from podscale.errors import InputError
from podscale.runs import local_path

MOUNT_TABLE = Path("/proc/self/mountinfo")


def check_workspace_mounted(workspace: str, mount_table: Path = MOUNT_TABLE) -> None:
    """Raise InputError if no volume is mounted at the workspace or above it, or if this user cannot write there."""
    path = local_path(workspace)
    mounts = [mount for mount in _mount_points(mount_table) if path.is_relative_to(mount)]
    if not mounts:
        return  # no table: not Linux
    volume = max(mounts, key=lambda mount: len(mount.parts))
    if volume == Path("/"):
        raise InputError(
            "no volume is mounted there, so that every task would have a directory of its own, which is lost at its "
            "end",
            field="run.workspace",
            got=workspace,
            hint="Compile the package again with the claim of a shared volume: podscale compile RUN --set "
            f"run.workspace={workspace} --set launch.cluster.workspace_claim=CLAIM",
        )
    folder = next(folder for folder in (path / "runs", path, *path.parents) if folder.exists())
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(
            f"{folder} cannot be written by user {os.getuid()}, group {os.getgid()}",
            field="run.workspace",
            got=workspace,
            hint="Install the chart with workspace.prepare=true, or change the group of the volume's root to "
            f"{os.getgid()} and make it writable.",
        )


def _mount_points(table: Path) -> list[Path]:
    """Return the mount points of this process; spaces in their paths are octal escapes in the table."""
    try:
        lines = table.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [Path(re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), line.split()[4])) for line in lines]
