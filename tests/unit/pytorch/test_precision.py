"""Precision policies: the loss scale of fp16, and the values that stay fp32."""

from typing import Any

import pytest
import torch
from torch import nn

from podscale.config import ModelSection
from podscale.pytorch.batch_norm import BatchNorm
from podscale.pytorch.models import build_model
from podscale.pytorch.precision import GROWTH_INTERVAL, Precision
from podscale.pytorch.train_step import smoothed_cross_entropy

CPU = torch.device("cpu")
YES, NO = torch.tensor(True), torch.tensor(False)


def test_loss_scale_halves_at_once_and_doubles_after_many() -> None:
    precision = Precision("fp16", CPU, 1024.0)
    precision.update_loss_scale(NO)
    assert precision.loss_scale == 512
    for _ in range(GROWTH_INTERVAL - 1):
        precision.update_loss_scale(YES)
    assert precision.loss_scale == 512
    precision.update_loss_scale(YES)
    assert precision.loss_scale == 1024
    for _ in range(GROWTH_INTERVAL - 1):
        precision.update_loss_scale(YES)
    precision.update_loss_scale(NO)
    precision.update_loss_scale(YES)
    assert precision.state_dict() == {"loss_scale": 512.0, "finite_in_a_row": 1}


def test_state_can_be_saved_and_loaded() -> None:
    first, second = Precision("fp16", CPU, 1024.0), Precision("fp16", CPU, 1024.0)
    for finite in (NO, YES, YES):
        first.update_loss_scale(finite)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict() == {"loss_scale": 512.0, "finite_in_a_row": 2}


def test_unscale_reverses_the_loss_scale() -> None:
    precision = Precision("fp16", CPU, 4096.0)
    weight = torch.tensor([3.0], requires_grad=True)
    precision.scale_loss((weight * 2).sum()).backward()
    assert weight.grad == 8192
    precision.unscale([weight.grad])
    assert weight.grad == 2


def test_fp32_and_bf16_do_not_scale() -> None:
    for name in ("fp32", "bf16"):
        precision = Precision(name, CPU, 65536.0)
        precision.update_loss_scale(NO)
        assert precision.scale_loss(torch.tensor(3.0)) == 3
        assert precision.state_dict()["loss_scale"] == 1


@pytest.mark.parametrize(("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_weights_gradients_and_statistics_stay_fp32(name: str, dtype: torch.dtype) -> None:
    model = build_model(ModelSection(name="resnet18", stem="small", width=4), 3)
    with Precision(name, CPU).autocast():
        logits = model(torch.randn(4, 3, 16, 16))
    assert logits.dtype == dtype
    loss = smoothed_cross_entropy(logits, torch.tensor([0, 1, 2, 0]), 0.1)
    assert loss.dtype == torch.float32
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    assert all(b.dtype == torch.float32 for b in model.buffers())


@pytest.mark.parametrize(
    ("section", "side"),
    [
        ({"name": "resnet18", "stem": "small", "width": 4}, 16),
        ({"name": "resnet50", "width": 4}, 32),
        ({"name": "alexnet"}, 63),
    ],
)
def test_pure_bf16_keeps_batch_norm_and_loss_in_fp32(section: dict[str, Any], side: int) -> None:
    model = build_model(ModelSection(**section), 3).to(memory_format=torch.channels_last)
    Precision("bf16-pure", CPU).cast_parameters(model)
    seen = set()
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear | BatchNorm):
            module.register_forward_hook(lambda _, inputs, output: seen.add((inputs[0].dtype, output.dtype)))
    with Precision("bf16-pure", CPU).autocast():
        logits = model(torch.randn(4, 3, side, side))
    assert seen == {(torch.bfloat16, torch.bfloat16)}
    smoothed_cross_entropy(logits, torch.tensor([0, 1, 2, 0]), 0.1).backward()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            want = torch.float32 if isinstance(module, BatchNorm) else torch.bfloat16
            assert parameter.dtype == want
            assert parameter.grad is not None
            assert parameter.grad.dtype == want
    assert all(buffer.dtype == torch.float32 for buffer in model.buffers())


def test_label_smoothing_is_szegedys() -> None:
    logits, labels = torch.randn(6, 5, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 4, 0])
    target = torch.full((6, 5), 0.1 / 5, dtype=torch.float64)
    target[torch.arange(6), labels] += 0.9
    want = -(target * logits.log_softmax(1)).sum(1).mean()
    assert smoothed_cross_entropy(logits, labels, 0.1).item() == pytest.approx(want.item(), abs=1e-6)
