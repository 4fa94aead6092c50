"""Locations: which are local, their paths, and joined names."""

from pathlib import Path

import pytest

from podscale.util.locations import Location


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("/data/images", "/data/images"),
        ("data/images", "data/images"),
        ("/data/images/", "/data/images"),
        ("", "."),
        ("~/images", "~/images"),
        ("C:/images", "C:/images"),
        ("file:///data/images", "/data/images"),
        ("file://images", "images"),
        ("file:///odd://name", "/odd://name"),
        ("file:/data", "file:/data"),
    ],
)
def test_a_path_and_a_file_url_are_local(text: str, path: str) -> None:
    location = Location.parse(text)
    assert not location.is_remote
    assert location.local_path == Path(path)
    assert str(location) == text


@pytest.mark.parametrize(
    ("text", "scheme"),
    [
        ("gs://bucket/images", "gs"),
        ("s3://bucket", "s3"),
        ("https://host/images/", "https"),
        ("memory://", "memory"),
        ("FILE:///data", "FILE"),
        ("://data", ""),
        ("data/file:///images", "data/file"),
    ],
)
def test_every_other_url_is_remote_and_has_no_local_path(text: str, scheme: str) -> None:
    location = Location.parse(text)
    assert location.is_remote
    assert location.scheme == scheme
    assert location.local_path is None
    assert str(location) == text


@pytest.mark.parametrize(
    ("text", "joined"),
    [
        ("/work", "/work/datasets/d1"),
        ("/work//", "/work/datasets/d1"),
        (".", "./datasets/d1"),
        ("", "datasets/d1"),
        ("/", "/datasets/d1"),
        ("file:///", "file:///datasets/d1"),
        ("file:///work/", "file:///work/datasets/d1"),
        ("gs://bucket/", "gs://bucket/datasets/d1"),
    ],
)
def test_names_are_joined_with_one_slash(text: str, joined: str) -> None:
    assert str(Location.parse(text).join("datasets", "d1")) == joined
