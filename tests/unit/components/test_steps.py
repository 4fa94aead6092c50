"""Artifacts of the components: files that an earlier attempt left are replaced."""

from pathlib import Path

from podscale.components.steps import _link_or_copy


def test_a_file_of_an_earlier_attempt_is_replaced_and_its_other_links_stay(tmp_path: Path) -> None:
    source, target, other = tmp_path / "source", tmp_path / "target", tmp_path / "other"
    source.write_text("first")
    for _ in range(2):
        assert _link_or_copy(str(source), str(target)) == str(target)
    other.hardlink_to(target)
    source.unlink()
    source.write_text("second")
    _link_or_copy(str(source), str(target))
    assert (target.read_text(), other.read_text()) == ("second", "first")
