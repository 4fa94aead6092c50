"""Precision of forward and backward: fp32, bf16 or fp16 under autocast, or bf16 weights; the loss scale of fp16.

The optimizer always works in fp32: averaged gradients, norms, trust ratio, momentum and master weights (Jia 2018). So
do batch norm's parameters and statistics, and the loss.
"""

import os
from typing import Any

import torch
from torch import Tensor, nn

from podscale.config import TrainSection
from podscale.pytorch.world import World

GROWTH_INTERVAL = 2000
"""Finite steps in a row after which the loss scale doubles (Micikevicius 2018, section 3.2)."""


class Precision:
    """Precision policy of a run. Its state is on the device, so the host never waits for it."""

    def __init__(self, name: str, device: torch.device, loss_scale: float = 1.0) -> None:
        self._dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name)
        self._casts_parameters = name == "bf16-pure"
        self._device = device
        self.uses_loss_scale = name == "fp16"
        self.loss_scale = torch.full((), loss_scale if self.uses_loss_scale else 1.0, device=device)
        self._finite_streak = torch.zeros((), dtype=torch.int32, device=device)

    def autocast(self) -> Any:
        return torch.autocast(self._device.type, dtype=self._dtype or torch.bfloat16, enabled=self._dtype is not None)

    def cast_parameters(self, model: nn.Module) -> None:
        """Cast the parameters of convolutions and linear layers, and the input images, to bf16 for bf16-pure."""
        if not self._casts_parameters:
            return
        for module in model.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                for parameter in module.parameters(recurse=False):
                    parameter.data = parameter.data.to(torch.bfloat16)
        model.register_forward_pre_hook(lambda _, images: tuple(image.to(torch.bfloat16) for image in images))

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss to differentiate, scaled so that fp16 gradients do not underflow."""
        return loss * self.loss_scale if self.uses_loss_scale else loss

    def unscale(self, gradients: list[Tensor]) -> None:
        """Divide averaged gradients by the loss scale, in place."""
        if self.uses_loss_scale:
            torch._foreach_mul_(gradients, 1.0 / self.loss_scale)

    def update_loss_scale(self, finite: Tensor) -> None:
        """Halve the loss scale after a non-finite step, double it after many finite ones."""
        if not self.uses_loss_scale:
            return
        count = torch.where(finite, self._finite_streak + 1, 0)
        grow = count == GROWTH_INTERVAL
        self.loss_scale.copy_(
            torch.where(finite, torch.where(grow, self.loss_scale * 2.0, self.loss_scale), self.loss_scale * 0.5)
        )
        self._finite_streak.copy_(torch.where(grow, 0, count))

    def state_dict(self) -> dict[str, float]:
        return {"loss_scale": self.loss_scale.item(), "finite_in_a_row": self._finite_streak.item()}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.loss_scale.fill_(state["loss_scale"])
        self._finite_streak.fill_(state["finite_in_a_row"])


def build_precision(train: TrainSection, world: World) -> Precision:
    return Precision(train.precision, world.device, train.loss_scale)


def set_numerics(train: TrainSection) -> None:
    """Set process-wide numerics: no TF32; deterministic kernels on request, else the fastest ones."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = not train.deterministic
    if train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    # Not use_deterministic_algorithms: it does the same and imports the compiler first, which takes 20 s.
    torch.set_deterministic_debug_mode("error" if train.deterministic else "default")
