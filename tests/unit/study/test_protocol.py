"""Protocol of a study: its digest, its commit, and the log of launches."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from podscale.pipelines import presets
from podscale.study import StudyDocument, read_study
from podscale.study.protocol import describe_protocol, protocol_digest, read_launches, record_launch
from podscale.study.sections import ProvenanceSection

STUDY = """
name: s
run: base.yaml
set: {train.global_batch: 64}
variants: [{name: a}, {name: b, set: {train.epochs: 3.0}}]
criteria: [{name: ahead, variant: b, than: a, above: 0.02, budget: free}]
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "s.yaml").write_text(STUDY)
    (folder / "base.yaml").write_text("data: {source: photos.tar}\ntrain: {epochs: 3}\n")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    commit(folder)
    return folder


def git(folder: Path, *words: str) -> str:
    options = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *options, *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def commit(folder: Path) -> str:
    git(folder, "commit", "-q", "-a", "-m", "x")
    return git(folder, "rev-parse", "HEAD")


def read(folder: Path, **changes: Any) -> StudyDocument:
    return read_study(folder / "s.yaml", changes, presets.resolve_preset)


class TestDigest:
    def test_it_does_not_depend_on_the_place(self, repository: Path) -> None:
        digest = protocol_digest(read(repository))
        changes = {"run.workspace": "/w", "data.source": "/data/photos.tar", "launch.threads": 2, "input.workers": 2}
        assert protocol_digest(read(repository, **changes)) == digest
        (repository / "s.yaml").write_text(STUDY + "reading: So it is.\ncell_seconds: 5\n")
        assert protocol_digest(read(repository)) == digest

    @pytest.mark.parametrize(
        ("old", "new"),
        [("0.02", "0.01"), ("64", "65"), ("epochs: 3.0", "epochs: 4.0"), ("name: s", "name: s\nseeds: [1, 2, 3, 4]")],
    )
    def test_it_changes_with_whatever_decides(self, repository: Path, old: str, new: str) -> None:
        digest = protocol_digest(read(repository))
        (repository / "s.yaml").write_text(STUDY.replace(old, new, 1))
        assert protocol_digest(read(repository)) != digest

    def test_the_base_run_and_changes_of_the_command_line_count(self, repository: Path) -> None:
        digest = protocol_digest(read(repository))
        assert protocol_digest(read(repository, **{"train.epochs": 1})) != digest
        (repository / "base.yaml").write_text("data: {source: photos.tar}\ntrain: {epochs: 4}\n")
        assert protocol_digest(read(repository)) != digest


class TestLaunches:
    def test_the_commit_of_the_first_launch_stays(self, repository: Path, tmp_path: Path) -> None:
        first = git(repository, "rev-parse", "HEAD")
        study = read(repository)
        assert study.provenance is not None
        assert (study.provenance.file, study.provenance.commit) == ("s.yaml", first)
        record_launch(study, tmp_path)
        record_launch(study, tmp_path)
        assert [launch.commit for launch in read_launches(tmp_path)] == [first]
        (repository / "s.yaml").write_text(STUDY + "reading: So it is.\n")
        commit(repository)
        record_launch(read(repository), tmp_path)
        (line,) = describe_protocol(read(repository), read_launches(tmp_path))
        assert first[:12] in line

    def test_a_document_that_differs_from_its_commit_has_none(self, repository: Path, tmp_path: Path) -> None:
        (repository / "base.yaml").write_text("train: {epochs: 4}\n")
        assert read(repository).provenance == ProvenanceSection(file="s.yaml")
        (tmp_path / "s.yaml").write_text("name: s\nrun: digits\n")
        assert read(tmp_path).provenance == ProvenanceSection(file="s.yaml"), "not in a repository"

    def test_a_changed_criterion_shows(self, repository: Path, tmp_path: Path) -> None:
        record_launch(read(repository), tmp_path)
        before = protocol_digest(read(repository))
        (repository / "s.yaml").write_text(STUDY.replace("0.02", "0.01"))
        commit(repository)
        record_launch(read(repository), tmp_path)
        lines = describe_protocol(read(repository), read_launches(tmp_path))
        assert len(lines) == 2
        assert before[:12] in lines[1]
        assert before not in lines[0]
