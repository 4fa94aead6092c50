"""Make the workspace writable for user and group 65532, in one pod of the release and before any run.

The kubelet does most of the work before this script starts: it gives a volume with file owners to the `fsGroup` of the
pod, permanently. Pods of Kubeflow Pipelines have no `fsGroup` and depend on these permissions.
"""

import os
import sys
import tempfile
from pathlib import Path

FOLDERS = ("datasets", "runs")
SHARED = 0o2775
"""Mode of folders: the group may write, and new files belong to the group."""


def prepare(folder: Path) -> None:
    """Create the folder if it is missing. Raises OSError if no file can be written in it."""
    folder.mkdir(exist_ok=True)
    if folder.stat().st_uid == os.getuid():
        folder.chmod(SHARED)
    with tempfile.TemporaryFile(dir=folder):
        pass


def owner(folder: Path) -> str:
    found = folder.stat()
    return f"it belongs to {found.st_uid}:{found.st_gid} with mode {found.st_mode & 0o7777:o}"


def main(workspace: Path) -> int:
    for folder in (workspace, *(workspace / name for name in FOLDERS)):
        try:
            prepare(folder)
        except OSError as error:
            where = folder if folder.exists() else folder.parent
            print(
                f"{where}: not writable for user {os.getuid()} ({error.strerror}): {owner(where)}, and its volume "
                "ignores fsGroup. Change the owner on the storage server (`chown -R 65532:65532`; for NFS also an "
                "export with all_squash, anonuid and anongid), then repeat `helm upgrade`.",
                file=sys.stderr,
            )
            return 2
        print(f"{folder}: {owner(folder)}; user {os.getuid()} may write there")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
