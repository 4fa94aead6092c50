"""Collectives in the text of compiled programs: recorded lines of libtpu 0.0.42.1, shortened."""

import numpy as np
import pytest

from podscale.errors import PodscaleError
from podscale.jax.aot.hlo import (
    Collective,
    CompilerCycles,
    axes_of_groups,
    find_collectives,
    find_cycles,
    replica_groups,
    summarise_collectives,
)
from tests.support.refusals import refused

# v3:4x4 with batch-norm groups of 8 cores, and two slices of v5e:4x4 with groups of 4 chips.
V3 = {"slice": 1, "column": 2, "row": 2, "group_column": 2, "group_row": 4}
TWO_V5E = {"slice": 2, "column": 4, "row": 1, "group_column": 1, "group_row": 4}
ROWS = "{{0,1,2,3,8,9,10,11},{4,5,6,7,12,13,14,15},{16,17,18,19,24,25,26,27},{20,21,22,23,28,29,30,31}}"
COLUMNS = "{{0,4,16,20},{1,5,17,21},{2,6,18,22},{3,7,19,23},{8,12,24,28},{9,13,25,29},{10,14,26,30},{11,15,27,31}}"
GROUPS = "{{0,1,2,3,4,5,6,7},{8,9,10,11,12,13,14,15},{16,17,18,19,20,21,22,23},{24,25,26,27,28,29,30,31}}"
KIB = 1024


def only(line: str, mesh: dict[str, int]) -> Collective:
    (collective,) = find_collectives(line, mesh)
    return collective


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            f"  %psum.28 = f32[2048]{{0:T(1024)}} all-reduce(%fusion.2), channel_id=1, replica_groups={GROUPS}, "
            'use_global_device_ids=true, to_apply=%region_1.0, metadata={op_name="jit(f)/shard_map/psum"}',
            Collective("all-reduce", "group_column+group_row", 8, 8 * KIB),
        ),
        (
            f"  ROOT %reduce_scatter.7 = f32[4096,128]{{1,0:T(8,128)}} reduce-scatter(%tanh), replica_groups={ROWS}, "
            "use_global_device_ids=true, dimensions={0}, to_apply=%region_0.0",
            Collective("reduce-scatter", "row+group_row", 8, 8 * 4096 * 128 * 4),
        ),
        (
            f"  %all_gather.3 = f32[2097152]{{0:T(1024)}} all-gather(%get-tuple-element.5), replica_groups={ROWS}, "
            "dimensions={0}, use_global_device_ids=true",
            Collective("all-gather", "row+group_row", 8, 8192 * KIB),
        ),
        (
            f"  %psum.29 = bf16[262144]{{0:T(1024)}} all-reduce(%dynamic-slice.1), replica_groups={COLUMNS}",
            Collective("all-reduce", "column+group_column", 4, 512 * KIB),
        ),
        (
            "  %psum.31 = f32[2048]{0:T(1024)} all-reduce(%fusion.1), replica_groups=[1,32]<=[32]",
            Collective("all-reduce", "all", 32, 8 * KIB),
        ),
        (
            "  %all-reduce.4 = (f32[16]{0}, f32[8]{0:T(128)S(1)}) all-reduce(%a, %b), replica_groups={}, to_apply=%add",
            Collective("all-reduce", "all", 32, 96),
        ),
        (
            "  %all-gather-start = (f32[64]{0}, f32[512]{0}) all-gather-start(%a), "
            "replica_groups=[4,8]<=[2,2,8]T(1,0,2), dimensions={0}",
            Collective("all-gather", "irregular", 8, 2 * KIB),
        ),
        (
            "  %collective-permute-start = (f32[512,64]{1,0}, f32[512,64]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) "
            "collective-permute-start(%copy), source_target_pairs={{0,8},{8,0},{1,9},{9,1}}",
            Collective("collective-permute", "row", 2, 128 * KIB),
        ),
    ],
    ids=lambda value: value.kind if isinstance(value, Collective) else "",
)
def test_an_instruction(line: str, expected: Collective) -> None:
    if expected.axes == "irregular":  # groups of some devices of an axis, not all
        line = line.replace("[4,8]<=[2,2,8]T(1,0,2)", "[8,4]<=[2,16]T(1,0)")
        expected = expected._replace(members=4)
    assert only(line, V3) == expected


def test_groups_as_counts_are_the_same_as_groups_as_lists() -> None:
    """`[8,4]<=[2,2,2,4]T(1,3,0,2)`: a range in that shape, transposed, and cut into groups."""
    listed = f"  %a = f32[4]{{0}} all-reduce(%x), replica_groups={COLUMNS}, to_apply=%add"
    counted = "  %a = f32[4]{0} all-reduce(%x), replica_groups=[8,4]<=[2,2,2,4]T(1,3,0,2), to_apply=%add"
    assert only(listed, V3) == only(counted, V3) == Collective("all-reduce", "column+group_column", 4, 16)


V3_MESH = "mesh['slice'=1,'column'=2,'row'=2,'group_column'=2,'group_row'=4]"


@pytest.mark.parametrize(
    ("axes", "listed"),
    [("'column','group_column'", COLUMNS), ("'row','group_row'", ROWS), ("'slice','group_column','group_row'", GROUPS)],
)
def test_groups_by_axes_of_a_mesh_are_the_same_as_groups_as_lists(axes: str, listed: str) -> None:
    """As jaxlib 0.11 writes them."""
    instruction = "  %a = f32[4]{0} all-reduce(%x), channel_id=1, replica_groups="
    expected = replica_groups(f"{instruction}{listed}, to_apply=%add", 32)
    line = f"{instruction}{V3_MESH} {{{axes}}}, use_global_device_ids=true, to_apply=%add"
    np.testing.assert_array_equal(replica_groups(line, 32), expected)
    assert only(line, V3) == only(f"{instruction}{listed}, to_apply=%add", V3)


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ("'y','x'", [[0, 2, 4, 6, 1, 3, 5, 7]]),
        ("'x':(1)2", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("'x':(2)2", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("'x':(2)2,'y'", [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ],
)
def test_parts_of_axes_and_their_order(axes: str, expected: list[list[int]]) -> None:
    found = replica_groups(f"replica_groups=mesh['x'=4,'y'=2] {{{axes}}}, to_apply=%add", 8)
    assert found.tolist() == expected


def test_groups_in_an_unknown_form_are_an_error_and_not_all_devices() -> None:
    with refused("<8 of 32>", kind=PodscaleError):
        only("  %a = f32[4]{0} all-reduce(%x), replica_groups=<8 of 32>, to_apply=%add", V3)
    assert only("  %a = f32[4]{0} all-reduce(%x), to_apply=%add", V3).axes == "all"


def test_a_fused_scatter_is_a_scatter_and_not_the_all_reduce_inside() -> None:
    """Reduce-scatter as compiled for v5e: one fused operation that adds the whole padded array and slices it."""
    text = """
%all-reduce-scatter (input: f32[32768,128]) -> f32[8208,128] {
  %input = f32[32768,128]{1,0:T(8,128)} parameter(0)
  %all-reduce.1 = f32[32832,128]{1,0:T(8,128)} all-reduce(%pad), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  ROOT %dynamic-slice.3 = f32[8208,128]{1,0:T(8,128)S(1)} dynamic-slice(%all-reduce.1, %multiply.2, %constant.6)
}

ENTRY %main.10_spmd (param: f32[4194304]) -> f32[1050624] {
  %fusion = f32[8208,128]{1,0:T(8,128)S(1)} fusion(%bitcast), kind=kCustom, calls=%all-reduce-scatter
  %all-reduce.2 = f32[8]{0} all-reduce(%b), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  %all-reduce-done = f32[8]{0} all-reduce-done(%all-reduce.2)
}
"""
    assert find_collectives(text, {"column": 2, "group_row": 4}) == [
        Collective("reduce-scatter", "group_row", 4, 32832 * 128 * 4),
        Collective("all-reduce", "group_row", 4, 32),
    ]


def test_an_asynchronous_message_is_one_message() -> None:
    """All-gather as compiled for v5e: a start, convolutions that repeat its instruction, and a done."""
    groups = "channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}"
    text = f"""
%fused_computation.2192 (param_0.6960: f32[1024]) -> (f32[1024], f32[4096], s32[2], u32[]) {{
  %all-gather.38 = f32[4096]{{0:T(1024)}} all-gather(%param_0.6960), {groups}
  ROOT %custom-call.40 = (f32[1024]{{0}}, f32[4096]{{0}}) custom-call(%all-gather.38), \
custom_call_target="AsyncCollectiveStart"
}}

%async_collective_fusion.1417 (param_0.6964: f32[1024], param_1.8949: f32[4096]) -> (f32[64], f32[4096]) {{
  %all-gather.40 = f32[4096]{{0:T(1024)}} all-gather(%param_0.6964), {groups}
}}

%fused_computation.2220 (param_0.7152: f32[1024], param_1.9108: f32[4096]) -> f32[4096] {{
  %all-gather.94 = f32[4096]{{0:T(1024)}} all-gather(%param_0.7152), {groups}
  ROOT %custom-call.42 = f32[4096]{{0}} custom-call(%param_0.7152, %param_1.9108, %all-gather.94, /*index=5*/%p), \
custom_call_target="AsyncCollectiveDone"
}}

ENTRY %main.10_spmd (param: f32[4096]) -> f32[4096] {{
  %async-collective-start = (f32[1024]{{0}}, f32[4096]{{0}}) fusion(%copy.430), calls=%fused_computation.2192
  %all-gather.151 = f32[2048]{{0:T(1024)}} all-gather(%copy.433), {groups}
}}
"""
    assert find_collectives(text.replace("\\\n", ""), {"column": 2, "group_row": 4}) == [
        Collective("all-gather", "group_row", 4, 4096 * 4, is_early=True),
        Collective("all-gather", "group_row", 4, 2048 * 4),
    ]


def test_a_message_is_early_if_work_lies_between_its_start_and_its_end() -> None:
    """Moved rows of two gradients as compiled for v5e; beside the second message the device only waits."""
    text = """
ENTRY %main.8_spmd (param: f32[48,2048]) -> f32[96,2048] {
  %collective-permute-start = (f32[48,2048]{1,0:T(8,128)S(1)}, f32[48,2048]{1,0:T(8,128)}, u32[]{:S(2)}, u32[]{:S(2)}) \
collective-permute-start(%slice), channel_id=1, source_target_pairs={{0,1},{1,2},{2,3}}
  %fusion.5 = f32[528,2048]{1,0:T(8,128)S(1)} fusion(%fusion.6), kind=kCustom, calls=%add, \
backend_config={"window_config":{},"estimated_cycles":"2153"}
  %collective-permute-done = f32[48,2048]{1,0:T(8,128)} collective-permute-done(%collective-permute-start)
  %collective-permute-start.1 = (f32[48,2048]{1,0:T(8,128)}, f32[48,2048]{1,0:T(8,128)}, u32[]{:S(2)}, u32[]{:S(2)}) \
collective-permute-start(%slice.1), channel_id=1, source_target_pairs={{0,1},{1,2},{2,3}}
  %bitcast = f32[528,2048]{1,0:T(8,128)S(1)} bitcast(%fusion.5), backend_config={"estimated_cycles":"0"}
  %collective-permute-done.1 = f32[48,2048]{1,0:T(8,128)} collective-permute-done(%collective-permute-start.1)
  %fusion.7 = f32[96,2048]{1,0} fusion(%a), kind=kLoop, calls=%join, backend_config={"estimated_cycles":"900"}
}
"""
    early = [collective.is_early for collective in find_collectives(text.replace("\\\n", ""), {"rank": 4})]
    assert early == [True, False]


def test_a_message_between_slices_is_a_transfer_to_the_host() -> None:
    line = (
        "  %send = (f32[128,8,128]{2,1,0:T(8,128)}, u32[], token[]) send(%fusion, %after-all), channel_id=2, "
        'is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",'
        '_xla_megascale_target="{1,2}x{0:15}",_xla_megascale_transfer_type="ALL_REDUCE"}'
    )
    received = line.replace("%send =", "%recv =").replace(" send(", " recv(")
    collective = only(f"{line}\n{received}", TWO_V5E)
    assert collective == Collective("all-reduce", "network", 2, 512 * KIB)
    assert collective.bytes_sent == 512 * KIB


def test_axes_of_groups() -> None:
    numbers = np.arange(32).reshape(tuple(V3.values()))
    assert axes_of_groups(numbers.reshape(1, 32), V3) == "all"
    assert axes_of_groups(numbers.reshape(32, 1), V3) == "none"
    assert axes_of_groups(numbers.transpose(0, 1, 2, 4, 3).reshape(16, 2), V3) == "group_column"
    assert axes_of_groups(np.array([[0, 1], [2, 3]]), V3) == "irregular", "half of an axis"


def test_bytes_sent_are_those_of_a_ring() -> None:
    assert Collective("all-reduce", "row", 4, 1000).bytes_sent == 1500
    assert (
        Collective("reduce-scatter", "row", 4, 1000).bytes_sent
        == Collective("all-gather", "row", 4, 1000).bytes_sent
        == 750
    )
    assert Collective("collective-permute", "row", 2, 1000).bytes_sent == 1000
    assert Collective("collective-permute", "none", 2, 1000).bytes_sent == 0


def test_messages_are_grouped_by_kind_and_axes() -> None:
    small, large = Collective("all-reduce", "row", 4, 10), Collective("all-gather", "row", 4, 1000)
    assert summarise_collectives([small, large, small]) == [
        {"kind": "all-gather", "axes": "row", "members": 4, "messages": 1, "bytes": 1000, "sent": 750.0},
        {"kind": "all-reduce", "axes": "row", "members": 4, "messages": 2, "bytes": 20, "sent": 30.0},
    ]
    assert summarise_collectives([]) == []


def test_cycles_of_operations_and_of_copies() -> None:
    text = """
  %copy.459 = f32[512,512,3,3]{3,2,1,0:T(4,128)} copy(%fusion.9), \\
backend_config={"window_config":{"estimated_cycles":"2658000","x":["1"]}}
  %fusion.21 = (f32[256]{0:T(256)}, bf16[16,56,56,256]{3,0,2,1:T(8,128)(2,1)}) fusion(%copy.459, %b), kind=kOutput, \\
calls=%fused, backend_config={"window_config":{"estimated_cycles":"470000"}}
  %psum = f32[8]{0} all-reduce(%x), replica_groups={}, backend_config={"barrier_config":{"id":"3"}}
"""
    assert find_cycles(text.replace("\\\n", "")) == CompilerCycles(3_128_000, 2_658_000)
