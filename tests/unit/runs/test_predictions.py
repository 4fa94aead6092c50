"""Predictions file: round trip in key order, and no partial files."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from podscale.runs.predictions import INVERSE_TEMPERATURES, Predictions, read_predictions, write_predictions
from tests.support.refusals import refused


def some_predictions(n: int = 100, k: int = 5, seed: int = 0) -> Predictions:
    rng = np.random.default_rng(seed)
    return Predictions(
        keys=rng.permutation(np.arange(n, dtype=np.uint64) + np.uint64(2**64 - n)),
        labels=rng.integers(0, 10, n).astype(np.int32),
        topk=np.argsort(rng.random((n, 10)), axis=1)[:, :k].astype(np.int32),
        confidences=-np.sort(-rng.random((n, k)), axis=1).astype(np.float32),
        losses=rng.random(n).astype(np.float32),
    )


def test_round_trip_in_key_order(tmp_path: Path) -> None:
    predictions = some_predictions()
    write_predictions(tmp_path / "p.safetensors", predictions)
    restored = read_predictions(tmp_path / "p.safetensors")
    assert (np.diff(restored.keys) > 0).all()
    row_of = {int(key): row for row, key in enumerate(predictions.keys)}
    for row, key in enumerate(restored.keys):
        before = row_of[int(key)]
        assert restored.labels[row] == predictions.labels[before]
        assert restored.losses[row] == predictions.losses[before]
        np.testing.assert_array_equal(restored.topk[row], predictions.topk[before])
        np.testing.assert_array_equal(restored.confidences[row], predictions.confidences[before])


def test_bytes_do_not_depend_on_the_order_of_arrival(tmp_path: Path) -> None:
    predictions = some_predictions()
    write_predictions(tmp_path / "a", predictions)
    write_predictions(tmp_path / "b", predictions.sorted_by_key())
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_losses_at_other_temperatures_are_kept_if_there_are_any(tmp_path: Path) -> None:
    """Another engine or an older version writes none."""
    p = some_predictions()
    tempered = np.arange(len(p) * len(INVERSE_TEMPERATURES), dtype=np.float32).reshape(len(p), -1)
    write_predictions(tmp_path / "p", replace(p, tempered_losses=tempered))
    np.testing.assert_array_equal(read_predictions(tmp_path / "p").tempered_losses, tempered[np.argsort(p.keys)])
    write_predictions(tmp_path / "p", p)
    assert read_predictions(tmp_path / "p").tempered_losses is None
    with pytest.raises(ValueError):
        write_predictions(tmp_path / "q", replace(p, tempered_losses=tempered[:, 1:]))


def test_wider_dtypes_are_narrowed(tmp_path: Path) -> None:
    p = some_predictions()
    wide = Predictions(p.keys, p.labels.astype(np.int64), p.topk.astype(np.int64), p.confidences, p.losses)  # type: ignore[arg-type]
    write_predictions(tmp_path / "p", wide)
    assert read_predictions(tmp_path / "p").topk.dtype == np.int32


def test_a_sample_predicted_twice_is_refused(tmp_path: Path) -> None:
    p = some_predictions()
    p.keys[3] = p.keys[77]
    with pytest.raises(ValueError, match=f"{int(p.keys[3]):016x}"):
        write_predictions(tmp_path / "p", p)
    assert list(tmp_path.iterdir()) == []


def test_columns_of_different_length_are_refused(tmp_path: Path) -> None:
    p = some_predictions()
    with pytest.raises(ValueError, match=f"{len(p.labels) - 1}"):
        write_predictions(tmp_path / "p", Predictions(p.keys, p.labels[:-1], p.topk, p.confidences, p.losses))


@pytest.mark.parametrize("content", [b"", b"not a safetensors file", b"\xff" * 64])
def test_a_damaged_file_is_bad_input(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "p").write_bytes(content)
    with refused("podscale evaluate", field=tmp_path / "p"):
        read_predictions(tmp_path / "p")


def test_a_file_cut_short_is_bad_input(tmp_path: Path) -> None:
    write_predictions(tmp_path / "p", some_predictions())
    (tmp_path / "p").write_bytes((tmp_path / "p").read_bytes()[:-1])
    with refused("podscale evaluate", field=tmp_path / "p"):
        read_predictions(tmp_path / "p")


def test_missing_predictions_name_the_command(tmp_path: Path) -> None:
    with refused("podscale evaluate", field=tmp_path / "none"):
        read_predictions(tmp_path / "none")
