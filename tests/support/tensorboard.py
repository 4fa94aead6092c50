"""TensorBoard's content of a directory, by its own reader."""

from pathlib import Path

import pytest


def curves(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Return every scalar's points as (step, value), in order."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(directory), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
