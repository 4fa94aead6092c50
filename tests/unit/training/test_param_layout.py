"""Flat layout: tensors do not overlap, are aligned and can be sharded."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from podscale.pytorch.flat_buffers import strided_like, view_like
from podscale.training.param_layout import ALIGNMENT_ELEMENTS, plan_buckets


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=40), st.integers(1, 8000), st.integers(1, 12))
def test_layout_invariants(sizes: list[int], bucket: int, multiple: int) -> None:
    layout = plan_buckets(sizes, bucket, multiple)
    assert layout.bounds[0][0] == 0
    assert all(a[1] == b[0] for a, b in zip(layout.bounds, layout.bounds[1:], strict=False))
    assert all((stop - start) % multiple == 0 for start, stop in layout.bounds)
    end = 0
    for start, size, number in zip(layout.starts, layout.sizes, layout.buckets, strict=True):
        assert start >= end
        assert start % ALIGNMENT_ELEMENTS == 0
        end = start + size
        low, high = layout.bounds[number]
        assert low <= start
        assert end <= high
    assert list(layout.buckets) == sorted(layout.buckets)
    assert set(layout.buckets) == set(range(len(layout.bounds)))
    assert layout == plan_buckets(sizes, bucket, multiple)


def test_small_tensors_share_a_bucket_and_a_large_one_has_its_own() -> None:
    assert plan_buckets([10, 10, 1000, 10], 100, 1).buckets == (0, 0, 1, 2)


def test_views_keep_the_memory_order_of_filters() -> None:
    filters = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    flat = torch.zeros(1000)
    view = view_like(flat, 96, filters)
    view.copy_(filters)
    assert view.stride() == filters.stride()
    assert torch.equal(flat[96 : 96 + 300], filters.permute(0, 2, 3, 1).reshape(-1))
    assert torch.equal(view_like(flat, 0, torch.empty(7, 2)), flat[:14].view(7, 2))


def test_strides_of_dimensions_of_size_1_are_adapted() -> None:
    flat = torch.zeros(64)
    filters = torch.randn(8, 4, 1, 1).to(memory_format=torch.channels_last)
    view = view_like(flat, 0, filters)
    gradient = torch.randn(8, 4, 1, 1).as_strided((8, 4, 1, 1), (4, 1, 4, 4))
    assert gradient.stride() != view.stride()
    strided = strided_like(gradient, view)
    assert strided.stride() == view.stride()
    assert strided.data_ptr() == gradient.data_ptr()
    assert torch.equal(strided, gradient)
    large = torch.randn(8, 4, 3, 3)
    assert strided_like(large, view_like(torch.zeros(288), 0, large.to(memory_format=torch.channels_last))) is large
