"""`podscale run --runner docker`: each stage in a container of its own, by Docker or what answers like it (podman).

kfp's DockerRunner does the work, with one of its functions replaced: it starts containers that are removed as they
end, and takes one that is gone before it could be asked how it ended for a success (kubeflow/pipelines issue 13332).

Stages see the same paths as outside: the workspace, and the folder of the source for reading. They run as the user
who started the run, without capabilities, on a root file system that is read-only.

What carries out a stage of a pipeline on this machine, for podscale.pipelines.local_runner: processes, or containers.
"""

import codecs
import contextlib
import importlib
import os
import signal
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from podscale.config import RunConfig
from podscale.config.preflight import local_directory
from podscale.errors import InputError
from podscale.runs import RunDirectory
from podscale.util import env, host_info
from podscale.util.processes import hold_lock_file


class StageRunner(Protocol):
    """One way to run the tasks of a pipeline; kfp calls it from a thread of its own."""

    def prepare(self, variables: Mapping[str, str], scratch: Path) -> contextlib.AbstractContextManager[None]:
        """Around the whole pipeline. variables: the environment of each stage; scratch: a directory that lasts as
        long, which stages can write."""

    def kfp_runner(self) -> Any:
        """kfp's own runner."""

    def place_task(self, task: Any, role: str) -> None:
        """Completes a task of the pipeline."""

    def send_signal(self, pid: int, signal_number: int) -> None:
        """Sends a signal to the running stage, by the pid that it gave itself; nothing happens where it has ended."""


class ProcessRunner:
    """Stages are processes of this machine."""

    @contextlib.contextmanager
    def prepare(self, variables: Mapping[str, str], scratch: Path) -> Iterator[None]:
        # kfp leaves one directory a task in TMPDIR
        ours = {**variables, env.LAUNCHER_PID: str(os.getpid()), "TMPDIR": str(scratch)}
        with set_environment(ours):
            yield

    def kfp_runner(self) -> Any:
        from podscale.pipelines.kfp_fast_import import local

        return local.SubprocessRunner(use_venv=False)

    def place_task(self, task: Any, role: str) -> None:
        """Images mean nothing here."""

    def send_signal(self, pid: int, signal_number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal_number)


@contextlib.contextmanager
def set_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables of this process, and gives them back."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


DOCKER_HOST_VARIABLE = "DOCKER_HOST"
LEASE_LABEL = "podscale.dev/lease"
"""Label of a container: the lease file of its run, by which the containers of a launch that was killed are found."""
MIN_SHM_GIB = 1.0
"""/dev/shm of a container where the document does not say; Docker's own 64 MiB are too small for loader processes."""


class ContainerRunner:
    """Stages are containers of `launch.image`.

    Raises InputError where no engine answers, or where it has no such image and cannot pull it.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._docker = _import_docker()
        self._host = _engine_address()
        self._client = _connect_engine(self._docker, self._host)
        self._image = config.launch.image
        _ensure_image(self._docker, self._client, self._image)
        self._lease = str(RunDirectory.for_config(config).lease.absolute())
        self._variables: Mapping[str, str] = {}
        self._scratch = Path()
        self._running = ""
        """Id of the running container."""

    @contextlib.contextmanager
    def prepare(self, variables: Mapping[str, str], scratch: Path) -> Iterator[None]:
        handler = importlib.import_module("kfp.local.docker_task_handler")
        lifeline = scratch / "lifeline"
        theirs = handler.run_docker_container
        self._variables = {**variables, env.LIFELINE: str(lifeline), env.COMMAND: os.environ.get(env.COMMAND, "")}
        self._scratch = scratch
        self._remove_leftovers()
        handler.run_docker_container = self._run  # type: ignore[attr-defined]
        try:
            with hold_lock_file(lifeline), set_environment({DOCKER_HOST_VARIABLE: self._host}):
                yield
        finally:
            handler.run_docker_container = theirs  # type: ignore[attr-defined]
            self._client.close()

    def kfp_runner(self) -> Any:
        from podscale.pipelines.kfp_fast_import import local

        return local.DockerRunner()

    def place_task(self, task: Any, role: str) -> None:
        """All stages in one image: here, none is only a launcher."""
        task.set_container_image(self._image)

    def send_signal(self, pid: int, signal_number: int) -> None:
        """By a process in the container: what the engine signals is the shell that kfp puts around the stage."""
        if not self._running:
            return
        with contextlib.suppress(self._docker.errors.APIError):
            container = self._client.containers.get(self._running)
            if signal_number == signal.SIGKILL:
                container.remove(force=True)
            else:
                container.exec_run(["sh", "-c", f"kill -{signal_number} {pid}"])

    def _run(self, client: Any, image: str, command: list[str], volumes: dict[str, Any], **given: Any) -> int:
        """Stands in for kfp's run_docker_container: runs one task and returns its exit status."""
        variables = {**self._variables, **given.pop("environment", {})}
        container = client.containers.create(
            image, command, volumes={**volumes, **self._volumes()}, environment=variables, **self._settings(), **given
        )
        try:
            container.start()
            self._running = container.id
            for text in _decode_chunks(container.logs(stream=True, follow=True)):
                print(text, end="")
            return int(container.wait()["StatusCode"])
        finally:
            self._running = ""
            with contextlib.suppress(self._docker.errors.NotFound):
                container.remove(force=True)

    def _volumes(self) -> dict[str, dict[str, str]]:
        """Paths that the stages need, at the same place inside."""
        source = None if self._config.data.source == "digits" else local_directory(self._config.data.source)
        workspace = local_directory(self._config.run.workspace)
        wanted = [(source, "ro"), (workspace, "rw"), (self._scratch, "rw")]
        paths = {str(path.absolute()): mode for path, mode in wanted if path is not None}
        return {path: {"bind": path, "mode": mode} for path, mode in paths.items()}

    def _settings(self) -> dict[str, Any]:
        resources, here = self._config.launch.resources, str(Path.cwd())
        security = self._client.info().get("SecurityOptions") or []
        rootless = any("rootless" in option for option in security)  # there, root inside is the user outside
        gpus = [self._docker.types.DeviceRequest(count=-1, capabilities=[["gpu"]])] if host_info.visible_gpus() else []
        inside = any(Path(here).is_relative_to(path) for path in self._volumes())
        return {
            "labels": {"app.kubernetes.io/name": "podscale", LEASE_LABEL: self._lease},
            "user": "0:0" if rootless else f"{os.getuid()}:{os.getgid()}",
            "working_dir": here,  # relative paths of the document mean the same inside
            "tmpfs": dict.fromkeys(["/tmp", *([] if inside else [here])], "rw,exec,nosuid,nodev,mode=1777"),
            "read_only": True,
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges"],
            "network_mode": "host",  # so that /metrics is where the stage says
            "shm_size": round((resources.shm_gib or MIN_SHM_GIB) * 2**30),
            "device_requests": gpus,
        }

    def _remove_leftovers(self) -> None:
        """The lease is ours, so what still stands here of an earlier launch of this run has lost its launcher."""
        for container in self._client.containers.list(all=True, filters={"label": f"{LEASE_LABEL}={self._lease}"}):
            with contextlib.suppress(self._docker.errors.APIError):
                container.remove(force=True)


def _import_docker() -> ModuleType:
    try:
        return importlib.import_module("docker")
    except ImportError:
        hint = "pip install 'podscale[containers]'"
        raise InputError("docker needs the docker package", field="--runner", hint=hint) from None


def _engine_address() -> str:
    """The engine's address: DOCKER_HOST, else the first of the usual sockets of Docker and podman."""
    given = os.environ.get(DOCKER_HOST_VARIABLE)
    if given:
        return given
    own = Path(os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.getuid()}"))
    usual = (
        Path("/var/run/docker.sock"),
        own / "docker.sock",
        own / "podman/podman.sock",
        Path("/run/podman/podman.sock"),
    )
    for path in usual:
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(path.stat().st_mode) and os.access(path, os.R_OK | os.W_OK):
                return f"unix://{path}"
    raise InputError(
        "docker found no container engine: this user has none of the usual sockets, and DOCKER_HOST is not set",
        field="--runner",
        hint="Start Docker, or podman's service (systemctl --user start podman.socket), or set DOCKER_HOST",
    )


def _connect_engine(docker: Any, host: str) -> Any:
    try:
        client = docker.DockerClient(base_url=host)
        client.ping()
    except (docker.errors.DockerException, OSError) as error:
        raise InputError(
            f"no container engine answers at {host} ({error})",
            field="--runner",
            hint=f"Start it, or set {DOCKER_HOST_VARIABLE}",
        ) from error
    return client


def _ensure_image(docker: Any, client: Any, image: str) -> None:
    """Pulls the image where it is missing."""
    try:
        client.images.get(image)
    except docker.errors.ImageNotFound:
        try:
            client.images.pull(*docker.utils.parse_repository_tag(image))
        except docker.errors.APIError as error:
            raise InputError(
                f"not on this machine, and it cannot be pulled ({error.explanation or error})",
                field="launch.image",
                got=image,
                hint="Build it with `make images`, or name another with --set launch.image=...",
            ) from error


def _decode_chunks(chunks: Iterable[bytes]) -> Iterator[str]:
    """Text of a log that comes in pieces, which may end within a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    yield from (decoder.decode(chunk) for chunk in chunks)
