"""Real single-node Kubernetes on this machine, for tests: build, up, down, status, clean, kubeconfig, images.

python -m tests.cluster.lab up            # Kubernetes, DNS, the training operator
python -m tests.cluster.lab up --full     # also JobSet, Trainer, Kueue, Prometheus and fake nodes
python -m tests.cluster.lab up jobset     # also JobSet, by its name in tools/cluster/programs.yaml
python -m tests.cluster.lab images tpu    # build one or all of Podscale's images and load them into the cluster
python -m tests.cluster.lab many-nodes    # settings for thousands of fake nodes; few-nodes: back to the usual ones
python -m tests.cluster.lab image NAME    # load an image from podman, docker or a docker-archive
"""

import argparse
import fcntl
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.lab import (
    addons,
    control_plane,
    images,
    machine,
    many_nodes,
    network,
    node,
    pki,
    places,
    processes,
    programs,
)
from tests.cluster.lab.commands import attempt
from tests.cluster.lab.errors import LabError, Unavailable

STARTED = time.monotonic()
ACTIONS = ("build", "up", "down", "status", "clean", "kubeconfig", "image", "images", "many-nodes", "few-nodes")
CANNOT, FAILED = 69, 1  # EX_UNAVAILABLE of sysexits.h, which continuous integration does not count as a failure


def say(text: str) -> None:
    print(f"{time.monotonic() - STARTED:6.1f} s  {text}", flush=True)


def build(entries: Sequence[programs.Source]) -> list[Path]:
    """Install packages, build programs and their images, which takes minutes. Return the image archives."""
    machine.require(machine.RUNNING, say)
    programs.build(entries, say)
    return images.make(entries, say)


def up(entries: Sequence[programs.Source]) -> None:
    """Start everything that is not running; a second call does nothing."""
    archives = build(entries)
    pki.make()
    network.up()
    node.configure()
    control_plane.up()
    node.start_containers()
    for archive in archives:
        images.load(archive)
    node.start()
    addons.install(entries, say)
    say(f"ready: KUBECONFIG={places.KUBECONFIG}")


def down() -> None:
    """Stop all processes and containers of the cluster and remove all its files except the cache."""
    machine.require_root()
    node.stop()
    control_plane.down()
    for name in processes.recorded():  # processes of add-ons, such as kwok
        processes.stop(name)
    network.down()
    for folder in (places.STATE, places.RUN):
        shutil.rmtree(folder, ignore_errors=True)
    say("down")


def status() -> None:
    """Print the built programs, running processes, loaded images and the content of the cache."""
    for entry in programs.sources():
        print(f"{'built  ' if entry.built() else 'missing'}  {entry.tier}  {entry.name} {entry.version}")
    for name in processes.recorded():
        print(f"{'running' if processes.alive(name) else 'ended  '}  {name}")
    if processes.alive("containerd"):
        print("\n".join(f"image    {name}" for name in images.listing()))
    print(_cached())


def clean() -> None:
    """Remove files kept between clusters; list the caches of Go and podman, which other users share."""
    print(_cached())
    shutil.rmtree(places.cache(), ignore_errors=True)
    print("\n".join(["removed", *(f"removed  podman's {name}" for name in images.remove_ours())]))
    for folder in programs.go_caches():
        print(f"kept     {attempt('du', '-sh', folder).stdout.strip()}")
    print("Go's caches serve other work too: `go clean -cache -modcache`; layers of builds: `podman image prune`")


def _cached() -> str:
    files = [path for path in places.cache().rglob("*") if path.is_file()]
    return f"cache    {places.cache()}: {sum(path.stat().st_size for path in files) / 2**30:.1f} GiB"


@contextmanager
def _alone() -> Iterator[None]:
    """Hold a lock, so that only one `up` or `down` runs at a time."""
    machine.require_root()
    with Path("/run/podscale-cluster.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.lab", description=__doc__.partition("\n")[0])
    parser.add_argument("action", choices=ACTIONS)
    help_of_names = "up, build: programs beyond the core; images: some of base, tools, tpu; image: of podman or docker"
    parser.add_argument("names", nargs="*", help=help_of_names)
    parser.add_argument("--full", action="store_true", help="JobSet, Trainer, Kueue, Prometheus and fake nodes as well")
    arguments = parser.parse_args()
    try:
        match arguments.action:
            case "build" | "up":
                entries = programs.chosen("full" if arguments.full else "core", arguments.names)
                with _alone():
                    (build if arguments.action == "build" else up)(entries)
            case "down":
                with _alone():
                    down()
            case "many-nodes" | "few-nodes":
                with _alone():
                    many_nodes.set_many_nodes(many=arguments.action == "many-nodes")
            case "image":
                for name in arguments.names:
                    images.load_image(name)
            case "images":
                images.build_ours(arguments.names, say)
            case "kubeconfig":
                print(places.KUBECONFIG)
            case "status":
                status()
            case "clean":
                clean()
    except LabError as error:
        print(f"{'cannot' if isinstance(error, Unavailable) else 'failed'}: {error}", file=sys.stderr)
        return CANNOT if isinstance(error, Unavailable) else FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
