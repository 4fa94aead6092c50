"""What TensorBoard shows of a directory, by its own reader."""

from pathlib import Path

import pytest


def curves(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Every scalar's points as (step, value), in their order."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(directory), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
