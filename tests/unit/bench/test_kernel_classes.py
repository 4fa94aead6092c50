"""Kernels of a step by class: names as an H200 reported them, sums, and the table of ncu."""

from pathlib import Path

import pytest

from podscale.bench import kernel_classes
from podscale.bench.kernel_classes import (
    KernelTotal,
    add_counted_bytes,
    combine_totals,
    format_totals,
    kernel_class,
    operator_class,
    read_ncu_table,
)
from podscale.bench.sweep import SweepRow
from podscale.bench.train_report import LONGEST_KERNELS, format_report
from tests.support.refusals import refused


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64", "convolutions"),
        ("nvjet_sm90_tst_128x128_64x6_1x2_h_bz_splitK_NTT", "convolutions"),
        ("_ZN17cutlass__5x_cudnn6KernelINS_4conv6kernel23ImplicitGemmConvolution", "convolutions"),
        ("void nhwcAddPaddingKernel<__nv_bfloat16, __nv_bfloat16, float, true>", "layout changes"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "convolutions"),
        ("void at::native::batch_norm_backward_elemt_channels_last_kernel<4, c10::BFloat16>", "batch norm"),
        ("_gradient_sums_kernel", "batch norm"),
        ("_finish_moments_kernel", "batch norm"),
        ("_pool_input_gradient_kernel", "pooling"),
        ("void at::native::(anonymous namespace)::max_pool_backward_nhwc<c10::BFloat16, float>", "pooling"),
        ("triton_red_fused__native_batch_norm_legit_functional_14", "compiled reductions"),
        ("triton_poi_fused_add_max_pool2d_with_indices_backward_61", "compiled element-wise"),
        ("_momentum_kernel", "optimizer"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<2>>", "optimizer"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "collectives"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("Memset (Unknown)", "copies"),
        (
            "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>>",
            "element-wise",
        ),
        ("something_new", "other"),
    ],
)
def test_a_kernel_has_a_class(name: str, expected: str) -> None:
    assert kernel_class(name).startswith(expected)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("aten::convolution_backward", "convolutions"),
        ("aten::addmm", "convolutions"),
        ("aten::native_batch_norm", "batch norm"),
        ("aten::batch_norm_backward_elemt", "batch norm"),
        ("aten::max_pool2d_with_indices_backward", "pooling"),
        ("aten::_foreach_mul_", "optimizer"),
        ("aten::_to_copy", "copies"),
        ("aten::copy_", "copies"),
        ("aten::zero_", "copies"),
        ("aten::add_", "element-wise"),
        ("aten::threshold_backward", "element-wise"),
        ("aten::_log_softmax", "element-wise"),
        ("aten::commit", "element-wise"),
        ("_gemm_forward_kernel", "convolutions"),
        ("_pool_kernel", "pooling"),
    ],
)
def test_an_operator_has_the_class_of_its_kernels(name: str, expected: str) -> None:
    assert operator_class(name).startswith(expected)


def test_counted_bytes_are_added_to_their_class() -> None:
    classes = [KernelTotal("batch norm", 2, 0.002), KernelTotal("other", 1, 0.001)]
    sizes = {"aten::native_batch_norm": 1e9, "_moments_kernel": 2e9, "aten::copy_": 5e8, "aten::clone": 1e8}
    counted = add_counted_bytes(classes, sizes, by=operator_class)
    assert [(total.name, total.bytes) for total in counted] == [("batch norm", 3e9), ("other", None), ("copies", 6e8)]
    lines = format_totals(counted, bandwidth=3000.0, is_counted=True)
    assert lines[0] == "| class | launches | ms | share | GB (counted) | GB/s | of the bandwidth |"
    assert lines[2:] == [
        "| batch norm | 2 | 2.00 | 66.7% | 3.00 | 1,500 | 50% |",
        "| other | 1 | 1.00 | 33.3% |  |  |  |",
        "| copies |  |  |  | 0.60 |  |  |",
    ]


def test_totals_add_up_and_the_longest_comes_first() -> None:
    kernels = [
        KernelTotal("_momentum_kernel", 1, 0.001, 1e9),
        KernelTotal("nvjet_a", 3, 0.004, 6e9),
        KernelTotal("nvjet_b", 2, 0.003),
    ]
    convolutions, optimizer = combine_totals(kernels)
    assert (convolutions.launches, convolutions.seconds, convolutions.bytes) == (5, 0.007, 6e9)
    assert (optimizer.launches, optimizer.seconds, optimizer.bytes) == (1, 0.001, 1e9)
    lines = format_totals([convolutions, optimizer])
    assert lines[2] == "| convolutions and matrix products | 5 | 7.00 | 87.5% | 6.00 | 857 |"
    assert [kernel.name for kernel in combine_totals(kernels, by=str)] == ["nvjet_a", "nvjet_b", "_momentum_kernel"]


def test_a_cut_list_has_the_shares_of_all_kernels() -> None:
    kernels = [KernelTotal("nvjet_a", 1, 0.006), KernelTotal("nvjet_b", 1, 0.003), KernelTotal("nvjet_c", 1, 0.001)]
    lines = format_totals(kernels, longest=2)
    assert lines[2:] == ["| nvjet_a | 1 | 6.00 | 60.0% |", "| nvjet_b | 1 | 3.00 | 30.0% |"]


def test_the_share_of_the_bandwidth_is_that_of_the_gpu() -> None:
    kernels = [KernelTotal("nvjet_a", 1, 0.001, 2.4e9), KernelTotal("nvjet_b", 1, 0.001)]
    lines = format_totals(kernels, bandwidth=4800.0)
    assert lines[0] == "| class | launches | ms | share | GB | GB/s | of the bandwidth |"
    assert lines[2:] == [
        "| nvjet_a | 1 | 1.00 | 50.0% | 2.40 | 2,400 | 50% |",
        "| nvjet_b | 1 | 1.00 | 50.0% |  |  |  |",
    ]


NCU = """==PROF== Connected to process 1 (/usr/bin/python3.12)
"ID","Process ID","Kernel Name","dram__bytes.sum","gpu__time_duration.sum"
"","","","Mbyte","us"
"0","1","nvjet_a","1,024.5","250.00"
"1","1","_moments_kernel","411.0","100.00"
"""


def test_a_table_of_ncu_is_read_in_its_units(tmp_path: Path) -> None:
    path = tmp_path / "kernels.csv"
    path.write_text(NCU, encoding="utf-8")
    first, second = read_ncu_table(path)
    assert (first.name, first.seconds, first.bytes) == ("nvjet_a", pytest.approx(250e-6), 1.0245e9)
    assert second.bytes == 4.11e8


@pytest.mark.parametrize(
    ("gpu", "shares"), [(["NVIDIA H200"], {"85%", "86%"}), (["an unknown GPU"], set()), ([], set())]
)
def test_the_command_prints_shares_of_a_known_gpus_bandwidth(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    gpu: list[str],
    shares: set[str],
) -> None:
    path = tmp_path / "kernels.csv"
    path.write_text(NCU, encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["kernel_classes", str(path), *gpu])
    monkeypatch.setattr(kernel_classes, "LONGEST_KERNELS", 1)
    kernel_classes.main()
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert {row[-1].removesuffix(" |") for row in rows if len(row) == 7} - {"of the bandwidth"} == shares
    assert [row[3] for row in rows if row[0] == "| nvjet_a"] == ["71.4%"]
    assert not any(row[0] == "| _moments_kernel" for row in rows)


def test_a_file_without_table_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "kernels.csv"
    path.write_text("==WARNING== No kernels were profiled.\n", encoding="utf-8")
    with refused("ncu with --csv --page raw --metrics", field=path):
        read_ncu_table(path)


MEASURED = {
    "device": "NVIDIA H200",
    "versions": {},
    "ranks": 1,
    "batch": 256,
    "images_per_second": 6865.0,
    "step_median_seconds": 0.010,
    "step_p95_seconds": 0.010,
    "first_step_seconds": 1.0,
    "host_seconds": {},
    "part_seconds": {},
    "memory_bytes": 1,
    "training_flops_per_image": 1,
}


def report(**found: object) -> list[str]:
    key = {"images": "synthetic", "options": {"train.precision": "bf16"}}
    return format_report("podscale bench train", [SweepRow("bf16", key, {**MEASURED, **found})])


def test_the_report_has_the_kernels_of_a_profiled_row() -> None:
    kernels = [{"name": "nvjet_" + "a" * 200, "launches": 3.0, "seconds": 0.002, "bytes": 4.8e9}]
    kernels += [
        {"name": f"nvjet_{n}", "launches": 1.0, "seconds": 2e-3 / LONGEST_KERNELS} for n in range(LONGEST_KERNELS)
    ]
    lines = report(kernels=kernels)
    assert any("4.0 ms" in line and "10.0 ms" in line for line in lines)
    assert "| convolutions and matrix products | 28 | 4.00 | 100.0% | 4.80 | 1,200 | 25% |" in lines
    assert any(line.endswith("…` | 3 | 2.00 | 50.0% | 4.80 | 2,400 | 50% |") for line in lines)
    assert sum(line.startswith("| `nvjet_") for line in lines) == LONGEST_KERNELS
    assert max(map(len, lines)) < 300


COUNTED = {"aten::convolution": 4.8e9, "_moments_kernel": 2.4e9, "_norms_kernel": 1e8, "aten::add_": 1e8}


def test_the_report_has_the_bytes_that_were_counted() -> None:
    """By class, and of our own kernels, which have the same names on the device."""
    kernels = [
        {"name": "nvjet_a", "launches": 3.0, "seconds": 0.002},
        {"name": "_moments_kernel", "launches": 2.0, "seconds": 0.001},
    ]
    lines = report(kernels=kernels, counted_bytes=COUNTED)
    text = "\n".join(lines)
    assert "7.4 GB, at least 1.5 ms at 4,800 GB/s" in text
    assert "ncu measures" in text
    assert "| convolutions and matrix products | 3 | 2.00 | 66.7% | 4.80 | 2,400 | 50% |" in lines
    assert "| batch norm | 2 | 1.00 | 33.3% | 2.40 | 2,400 | 50% |" in lines
    assert "| optimizer |  |  |  | 0.10 |  |  |" in lines
    assert "| `_moments_kernel` | 2 | 1.00 | 33.3% | 2.40 | 2,400 | 50% |" in lines
    assert "| `nvjet_a` | 3 | 2.00 | 66.7% |  |  |  |" in lines
    assert "| `_norms_kernel`" not in text


def test_the_report_has_inductors_count_of_a_compiled_row() -> None:
    kernels = [{"name": "triton_poi_fused_add_1", "launches": 1.0, "seconds": 0.002}]
    lines = report(kernels=kernels, compiled_bytes=154.65e9)
    assert "Inductor counts 154.7 GB for forward and backward, at least 32.2 ms at 4,800 GB/s." in lines
    assert "| compiled element-wise | 1 | 2.00 | 100.0% |" in lines
    assert not any("Inductor" in line for line in report(kernels=kernels, compiled_bytes=0))


def test_a_count_without_kernels_is_a_table_of_bytes() -> None:
    """On a CPU, whose kernels have no times."""
    lines = report(device="a CPU", kernels=[], counted_bytes=COUNTED)
    assert "| convolutions and matrix products |  |  |  | 4.80 |  |" in lines
    assert any(line.startswith("It moves 7.4 GB.") for line in lines)
    assert not any("longest" in line for line in lines)
