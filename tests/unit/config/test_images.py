"""Image of the stages that follows from the engine and the accelerators."""

import pytest

from podscale.config import loads
from podscale.config.images import stage_image


@pytest.mark.parametrize(
    ("engine", "launch", "image"),
    [
        ("pytorch", "", "podscale-base:latest"),
        ("pytorch", "hardware: nvidia-l4", "podscale-gpu:latest"),
        ("pytorch", "resources: {accelerator: nvidia.com/gpu, accelerators: 8}", "podscale-gpu:latest"),
        ("pytorch", "hardware: nvidia-l4, image: registry/own:1", "registry/own:1"),
        ("jax", "", "podscale-tpu:latest"),
        ("jax", "hardware: tpu-v5e-2x2", "podscale-tpu:latest"),
        ("jax", "hardware: nvidia-l4", "podscale-gpu-jax:latest"),
    ],
)
def test_the_image_has_the_engine_and_the_software_of_the_accelerators(engine: str, launch: str, image: str) -> None:
    assert stage_image(loads(f"train: {{engine: {engine}}}\nlaunch: {{{launch}}}\n")) == image


def test_other_pods_of_a_run_may_need_another_engine() -> None:
    """Predictions are PyTorch's, whatever trained."""
    config = loads("train: {engine: jax}\nlaunch: {hardware: nvidia-l4}\n")
    assert stage_image(config, engine="pytorch") == "podscale-gpu:latest"
