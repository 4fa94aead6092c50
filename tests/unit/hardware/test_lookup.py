"""Hardware by name: existing shapes with the requests of a pod, and the errors for others."""

import pytest

from podscale.hardware import GPU_KINDS, TPU_KINDS, chip_count, find_hardware, hardware_names
from tests.support.refusals import refused
from tools.hardware_reference import TARGET
from tools.hardware_reference import render as page


@pytest.mark.parametrize(
    ("name", "machine", "label", "accelerators", "hosts"),
    [
        ("nvidia-l4", "g2-standard-12", "nvidia-l4", 1, 1),
        ("nvidia-l4 x8", "g2-standard-96", "nvidia-l4", 8, 1),
        ("nvidia-h100-80gb x8", "a3-highgpu-8g", "nvidia-h100-80gb", 8, 1),
        ("nvidia-h200-141gb", "a3-ultragpu-8g", "nvidia-h200-141gb", 8, 1),
        ("nvidia-a100-40gb x16", "a2-megagpu-16g", "nvidia-tesla-a100", 16, 1),
        ("NVIDIA-Tesla-A100  x2", "a2-highgpu-2g", "nvidia-tesla-a100", 2, 1),
        ("tpu-v5e-1x1", "ct5lp-hightpu-1t", "tpu-v5-lite-podslice", 1, 1),
        ("tpu-v5e-2x2", "ct5lp-hightpu-4t", "tpu-v5-lite-podslice", 4, 1),
        ("tpu-v5e-4x4", "ct5lp-hightpu-4t", "tpu-v5-lite-podslice", 4, 4),
        ("tpu-v6e-8x8", "ct6e-standard-4t", "tpu-v6e-slice", 4, 16),
        ("tpu-v6e-16x16", "ct6e-standard-4t", "tpu-v6e-slice", 4, 64),
        ("tpu-v5p-2x2x1", "ct5p-hightpu-4t", "tpu-v5p-slice", 4, 1),
        ("tpu-v5p-8x8x16", "ct5p-hightpu-4t", "tpu-v5p-slice", 4, 256),
        ("tpu-v4-8x16x32", "ct4p-hightpu-4t", "tpu-v4-podslice", 4, 1024),
        ("tpu7x-2x2x2", "tpu7x-standard-4t", "tpu7x", 4, 2),
    ],
)
def test_hardware_gives_the_requests_of_a_pod(
    name: str, machine: str, label: str, accelerators: int, hosts: int
) -> None:
    hardware = find_hardware(name)
    assert (hardware.machine, hardware.accelerators, hardware.hosts) == (machine, accelerators, hosts)
    assert label in hardware.node_selector.values()
    assert find_hardware(hardware.name) == hardware, "its own name gives the same hardware"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nvidia-l4 x3", "Choose nvidia-l4 x1 or nvidia-l4 x2 or nvidia-l4 x4 or nvidia-l4 x8"),
        ("nvidia-h200-141gb x4", "Choose nvidia-h200-141gb x8"),
        ("tpu-v5e-3x3", "It has 1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16"),
        ("tpu-v5e-32x32", "no such slice"),
        ("tpu-v5p-8x4x4", "no such slice"),
        ("tpu-v5p-4x4x4x4", "no such slice"),
        ("tpu-v5p-4x4x6", "multiples of 4 up to 8960 chips"),
        ("tpu-v5p-20x20x24", "up to 8960 chips"),
        ("tpu-v5p-04x4x4", "no such slice"),
        ("tpu-v5e", "needs a topology"),
        ("nvidia-h100 x8", "Did you mean nvidia-h100-80gb?"),
        ("tpu-v3-32x32", "no such hardware"),
        ("", "Known: cpu, nvidia-t4"),
        ("nvidia-l4 x0", "no machine has 0"),
        ("nvidia-l4 x-1", "no such hardware"),
    ],
)
def test_the_error_of_impossible_hardware_lists_what_exists(name: str, expected: str) -> None:
    with refused(expected, field="launch.hardware", got=name):
        find_hardware(name)


def test_every_kind_in_the_list_can_be_chosen() -> None:
    for kind in GPU_KINDS:
        assert f"{kind.name} x{'|'.join(map(str, kind.gpus_per_machine))}" in hardware_names()
        for count in kind.gpus_per_machine:
            hardware = find_hardware(f"{kind.name} x{count}")
            assert 0 < hardware.cpus_to_request < hardware.cpus
            assert 0 < hardware.memory_gib_to_request < hardware.memory_gib
    for tpu in TPU_KINDS:
        for topology in tpu.smallest_topologies:
            hardware = find_hardware(f"{tpu.name}-{topology}")
            assert hardware.hosts * hardware.accelerators == chip_count(topology)


def test_gpudirect_needs_all_gpus_of_a_machine() -> None:
    assert find_hardware("nvidia-h100-80gb x8").gpudirect == "tcpx"
    assert find_hardware("nvidia-h100-80gb x4").gpudirect is None
    assert find_hardware("nvidia-l4 x8").gpudirect is None


def test_the_reference_page_is_current() -> None:
    assert TARGET.read_text(encoding="utf-8") == page(), "run: python tools/hardware_reference.py"
