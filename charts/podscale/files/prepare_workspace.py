"""What the release runs in one pod, before any run: makes sure that pods of user or group 65532 may write everywhere.

Most of it is done when this starts: where a pod has an `fsGroup`, the kubelet gives a volume that knows owners to that
group, for good. Pods of Kubeflow Pipelines have none and go by what this one left.
"""

import os
import sys
import tempfile
from pathlib import Path

FOLDERS = ("datasets", "runs")
SHARED = 0o2775
"""The group may write, and what is made inside belongs to it too."""


def prepare(folder: Path) -> None:
    """Makes the folder where it is missing; raises OSError where nothing can be written in it."""
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
                f"{where}: user {os.getuid()} cannot write there ({error.strerror}): {owner(where)}, and its volume "
                "does not heed fsGroup. Give it to that user on the storage's side (`chown -R 65532:65532`; for NFS "
                "also an export with all_squash, anonuid and anongid), then `helm upgrade` again",
                file=sys.stderr,
            )
            return 2
        print(f"{folder}: {owner(folder)}; user {os.getuid()} may write there")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
