"""Stage runners of local_runner: each stage of a pipeline as a local process or as a container.

`podscale run --runner docker` uses Docker or a compatible engine (podman) through kfp's DockerRunner with one function
replaced: kfp's auto-removes containers and reports success if one is gone before its exit status was read
(kubeflow/pipelines issue 13332).

Stages see the workspace, the source directory read-only, and the files of `USER_FILES` read-only, at the same paths as
outside. They run as the user who started the run, without capabilities, on a read-only root file system.
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
from podscale.config.images import stage_image
from podscale.errors import InputError
from podscale.runs import RunDirectory
from podscale.util import env, host_info
from podscale.util.files import file_lock
from podscale.util.locations import Location


class StageRunner(Protocol):
    """Runs the tasks of a pipeline; called from kfp's thread."""

    def prepare(self, variables: Mapping[str, str], scratch: Path) -> contextlib.AbstractContextManager[None]:
        """Return a context around the whole pipeline.

        Args:
            variables: environment of each stage.
            scratch: temporary directory of the launch, writable by stages.
        """

    def kfp_runner(self) -> Any:
        """Return kfp's own runner."""

    def place_task(self, task: Any, role: str) -> None:
        """Set image and resources of a task."""

    def send_signal(self, pid: int, signal_number: int) -> None:
        """Send a signal to the running stage, which reported `pid`; do nothing if it has exited."""


class ProcessRunner:
    """Runs stages as processes of this machine."""

    @contextlib.contextmanager
    def prepare(self, variables: Mapping[str, str], scratch: Path) -> Iterator[None]:
        # kfp leaves one directory per task in TMPDIR
        with set_environment({**variables, env.LAUNCHER_PID: str(os.getpid()), "TMPDIR": str(scratch)}):
            yield

    def kfp_runner(self) -> Any:
        from podscale.pipelines.kfp_fast_import import local

        return local.SubprocessRunner(use_venv=False)

    def place_task(self, task: Any, role: str) -> None:
        """Do nothing: processes have no image."""

    def send_signal(self, pid: int, signal_number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal_number)


@contextlib.contextmanager
def set_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables of this process; restore them afterwards."""
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
USER_FILES = (env.WEB_RUNTIME, env.KF_PIPELINES_SA_TOKEN_PATH, "SSL_CERT_FILE")
"""Variables of the user that name a file, which containers see too."""
LEASE_LABEL = "podscale.dev/lease"
"""Container label with the lease file of the run, which identifies the containers of a killed launch."""
MIN_SHM_GIB = 1.0
"""Default /dev/shm of a container, GiB; Docker's 64 MiB are too small for loader processes."""


class ContainerRunner:
    """Runs stages as containers of `launch.image`. Raises InputError without an engine, or if it cannot pull it."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._docker = _import_docker()
        self._host = _engine_address()
        self._client = _connect_engine(self._docker, self._host)
        self._image = stage_image(config)
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
        original = handler.run_docker_container
        self._variables = {**variables, env.LIFELINE: str(lifeline), env.COMMAND: os.environ.get(env.COMMAND, "")}
        self._scratch = scratch
        self._remove_leftovers()
        handler.run_docker_container = self._run  # type: ignore[attr-defined]
        try:
            with file_lock(lifeline), set_environment({DOCKER_HOST_VARIABLE: self._host}):
                yield
        finally:
            handler.run_docker_container = original  # type: ignore[attr-defined]
            self._client.close()

    def kfp_runner(self) -> Any:
        from podscale.pipelines.kfp_fast_import import local

        return local.DockerRunner()

    def place_task(self, task: Any, role: str) -> None:
        """Set the image, the same for all stages, because no stage is only a launcher here."""
        task.set_container_image(self._image)

    def send_signal(self, pid: int, signal_number: int) -> None:
        """Send the signal by a process in the container, because the engine would signal kfp's shell instead."""
        if not self._running:
            return
        with contextlib.suppress(self._docker.errors.APIError):
            container = self._client.containers.get(self._running)
            if signal_number == signal.SIGKILL:
                container.remove(force=True)
            else:
                container.exec_run(["sh", "-c", f"kill -{signal_number} {pid}"])

    def _run(self, client: Any, image: str, command: list[str], volumes: dict[str, Any], **options: Any) -> int:
        """Run one task and return its exit status; replaces kfp's run_docker_container."""
        options |= {"environment": {**self._variables, **options.get("environment", {})}, **self._settings()}
        container = client.containers.create(image, command, volumes={**volumes, **self._volumes()}, **options)
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
        """Return the bind mounts of the stages, at the same path inside."""
        data = self._config.data
        source = Location.parse(data.source).local_path if data.source_is_location else None
        workspace = Location.parse(self._config.run.workspace).local_path
        named = [path for name in USER_FILES if (path := env.read_path(name)) is not None]
        files = [path for path in named if os.access(path, os.R_OK)]  # an engine creates or refuses missing ones
        modes = [*((path, "ro") for path in files), (source, "ro"), (workspace, "rw"), (self._scratch, "rw")]
        paths = {str(path.absolute()): mode for path, mode in modes if path is not None}
        return {path: {"bind": path, "mode": mode} for path, mode in paths.items()}

    def _settings(self) -> dict[str, Any]:
        resources, directory = self._config.launch.resources, str(Path.cwd())
        security = self._client.info().get("SecurityOptions") or []
        rootless = any("rootless" in option for option in security)  # maps root of the container to this user
        gpus = [self._docker.types.DeviceRequest(count=-1, capabilities=[["gpu"]])] if host_info.visible_gpus() else []
        is_mounted = any(Path(directory).is_relative_to(path) for path in self._volumes())
        return {
            "labels": {"app.kubernetes.io/name": "podscale", LEASE_LABEL: self._lease},
            "user": "0:0" if rootless else f"{os.getuid()}:{os.getgid()}",
            "working_dir": directory,  # for relative paths of the document
            "tmpfs": dict.fromkeys(["/tmp", *([] if is_mounted else [directory])], "rw,exec,nosuid,nodev,mode=1777"),
            "read_only": True,
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges"],
            "network_mode": "host",  # so that /metrics has the address that the stage reports
            "shm_size": round((resources.shm_gib or MIN_SHM_GIB) * 2**30),
            "device_requests": gpus,
        }

    def _remove_leftovers(self) -> None:
        """Remove containers of earlier launches, whose launcher no longer holds the lease."""
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
    """Return the engine's address: DOCKER_HOST, else the first of the usual sockets of Docker and podman."""
    if host := os.environ.get(DOCKER_HOST_VARIABLE):
        return host
    runtime_directory = Path(os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.getuid()}"))
    sockets = (
        Path("/var/run/docker.sock"),
        runtime_directory / "docker.sock",
        runtime_directory / "podman/podman.sock",
        Path("/run/podman/podman.sock"),
    )
    for path in sockets:
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(path.stat().st_mode) and os.access(path, os.R_OK | os.W_OK):
                return f"unix://{path}"
    raise InputError(
        "no container engine: none of the usual sockets is accessible, and DOCKER_HOST is not set",
        field="--runner",
        hint="Start Docker, or podman's service (systemctl --user start podman.socket), or set DOCKER_HOST.",
    )


def _connect_engine(docker: Any, host: str) -> Any:
    try:
        client = docker.DockerClient(base_url=host)
        client.ping()
    except (docker.errors.DockerException, OSError) as error:
        raise InputError(
            f"no container engine answers at {host} ({error})",
            field="--runner",
            hint=f"Start it, or set {DOCKER_HOST_VARIABLE}.",
        ) from error
    return client


def _ensure_image(docker: Any, client: Any, image: str) -> None:
    """Pull the image if it is missing."""
    try:
        client.images.get(image)
    except docker.errors.ImageNotFound:
        try:
            client.images.pull(*docker.utils.parse_repository_tag(image))
        except docker.errors.APIError as error:
            raise InputError(
                f"not on this machine, and cannot be pulled ({error.explanation or error})",
                field="launch.image",
                got=image,
                hint="Build it with `make images`, or set another one: --set launch.image=...",
            ) from error


def _decode_chunks(chunks: Iterable[bytes]) -> Iterator[str]:
    """Decode a log that arrives in chunks, which may end within a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    yield from (decoder.decode(chunk) for chunk in chunks)
