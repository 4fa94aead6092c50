"""Files of onnxruntime-web: from npm or an archive, by the hashes of the lock file, and then from the cache."""

import base64
import hashlib
import io
import json
import tarfile
from importlib.resources import files
from pathlib import Path

import pytest

from podscale.config import RunConfig
from podscale.errors import InputError
from podscale.export import web_runtime
from podscale.export.web_runtime import is_cached, load_web_runtime, read_lock, runtime_problems
from podscale.util import env

MODULE, PROGRAM = b"export default 1", b"\0asm"


def archive_of(path: Path, module: bytes = MODULE) -> bytes:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in (("package/dist/a.mjs", module), ("package/dist/a.wasm", PROGRAM)):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path.read_bytes()


@pytest.fixture(autouse=True)
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Archive of a small package, which the lock file names; the cache is empty."""
    path = tmp_path / "package.tgz"
    digest = hashlib.sha512(archive_of(path)).digest()
    lock = {
        "package": "small",
        "version": "1.2.3",
        "integrity": f"sha512-{base64.b64encode(digest).decode()}",
        "files": {
            "dist/a.mjs": hashlib.sha256(MODULE).hexdigest(),
            "dist/a.wasm": hashlib.sha256(PROGRAM).hexdigest(),
        },
    }
    monkeypatch.setattr(web_runtime, "read_lock", lambda: lock)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(env.WEB_RUNTIME, raising=False)
    return path


def install_npm(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a program named npm on the PATH, in place of the real one."""
    folder.mkdir()
    (folder / "npm").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_an_archive_fills_the_cache(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.WEB_RUNTIME, str(archive))
    assert not is_cached()
    runtime = load_web_runtime()
    assert (runtime.module, runtime.program, runtime.package) == (MODULE, PROGRAM, "small 1.2.3")
    archive.unlink()
    assert is_cached()
    assert load_web_runtime() == runtime
    (tmp_path / "cache" / "podscale" / "small-1.2.3" / "a.wasm").write_bytes(b"changed")
    assert not is_cached()
    with pytest.raises(InputError):
        load_web_runtime()


def test_npm_fetches_the_package(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_npm(tmp_path / "bin", f'[ "$2" = small@1.2.3 ] && cp {archive} "$5"', monkeypatch)
    assert load_web_runtime().program == PROGRAM


@pytest.mark.parametrize("script", ["echo no network >&2; exit 1", "exit 0"])
def test_an_npm_that_fails_names_the_way_without_it(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_npm(tmp_path / "bin", script, monkeypatch)
    with pytest.raises(InputError) as refusal:
        load_web_runtime()
    assert env.WEB_RUNTIME in refusal.value.hint
    assert not (tmp_path / "cache").exists()


def test_a_missing_runtime_is_a_problem_before_the_training(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig.model_validate({"export": {"formats": ["html-int8"]}})
    install_npm(tmp_path / "bin", "exit 1", monkeypatch)
    assert list(runtime_problems(config)) == []
    monkeypatch.setenv("PATH", str(tmp_path))
    (error,) = runtime_problems(config)
    assert error.field == "export.formats"
    assert env.WEB_RUNTIME in error.hint
    assert list(runtime_problems(RunConfig.model_validate({"export": {"formats": ["onnx"]}}))) == []
    monkeypatch.setenv(env.WEB_RUNTIME, str(tmp_path / "none.tgz"))
    (error,) = runtime_problems(config)
    assert (error.field, error.got) == (env.WEB_RUNTIME, str(tmp_path / "none.tgz"))
    (tmp_path / "cache" / "podscale" / "small-1.2.2").mkdir(parents=True)
    assert len(list(runtime_problems(config))) == 1, "another version is in the cache"
    monkeypatch.setenv(env.WEB_RUNTIME, str(archive))
    assert list(runtime_problems(config)) == []
    load_web_runtime()
    monkeypatch.delenv(env.WEB_RUNTIME)
    assert list(runtime_problems(config)) == []


def test_without_npm_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError) as refusal:
        load_web_runtime()
    assert env.WEB_RUNTIME in refusal.value.hint


def test_another_archive_is_refused(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.WEB_RUNTIME, str(archive))
    archive_of(archive, b"another module")
    for content in (archive.read_bytes(), b"no archive", None):
        archive.unlink()
        if content is not None:
            archive.write_bytes(content)
        with pytest.raises(InputError) as refusal:
            load_web_runtime()
        assert refusal.value.field == str(archive)
    assert not (tmp_path / "cache").exists()


def test_the_lock_file_names_one_version_and_its_hashes() -> None:
    lock = json.loads((files("podscale.export") / "web/onnxruntime_web.lock.json").read_bytes())
    assert lock["package"] == "onnxruntime-web"
    assert len(base64.b64decode(lock["integrity"].removeprefix("sha512-"))) == 64
    assert {Path(name).suffix: len(sha256) for name, sha256 in lock["files"].items()} == {".mjs": 64, ".wasm": 64}


def test_the_docs_and_the_preflight_check_name_the_package_of_the_lock_file() -> None:
    lock, docs = read_lock(), Path(__file__).resolve().parents[3] / "docs" / "how-to"
    assert lock["package"] == "onnxruntime-web"
    for page in ("export.md", "kfp.md"):
        assert f"npm pack {lock['package']}@{lock['version']}`" in (docs / page).read_text(encoding="utf-8")
    assert f"onnxruntime-web-{lock['version']}.tgz" in (docs / "kfp.md").read_text(encoding="utf-8")
