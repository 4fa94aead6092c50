"""Twenty steps on the embedded digits with and without the kernels of 1x1 convolutions, in Triton's interpreter.

`python -m tests.support.gemm_digits` prints the losses in fp32 and bf16 of separate operations, and of the kernels, as
JSON.
"""

import json
from unittest import mock

import torch
from torch.nn import functional as F

from podscale.config import ModelSection
from podscale.data.sources.digits import load
from podscale.models import resnet
from podscale.pytorch.batch_norm import BatchNorm
from podscale.pytorch.models import build_model
from tests.support.gemm_oracle import prepare_interpreter

STEPS, IMAGES = 20, 16
LEARNING_RATE, MOMENTUM = 0.05, 0.9
BLOCKS = {"resnet50": ("bottleneck", (1, 2))}
"""Two stages, with blocks that stride, project and keep their shortcut."""


def losses(dtype: torch.dtype, *, kernels: bool) -> list[float]:
    torch.manual_seed(0)
    with mock.patch.dict(resnet.IMAGENET_BLOCKS, BLOCKS):
        model = build_model(ModelSection(name="resnet50", stem="small", width=16), 10)
    model.to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    for module in model.modules():
        if isinstance(module, BatchNorm):
            module.is_fused = module.folds_convolutions = kernels
    digits = load()
    pixels = torch.from_numpy(digits["levels"]).float()[:, None].expand(-1, 3, -1, -1) / 8 - 1
    labels = torch.from_numpy(digits["labels"]).long()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    found = []
    for step in range(STEPS):
        batch = slice(step * IMAGES, (step + 1) * IMAGES)
        images = pixels[batch].contiguous(memory_format=torch.channels_last)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = F.cross_entropy(model(images).float(), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def main() -> None:
    prepare_interpreter()
    found = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        found[name] = losses(dtype, kernels=False)
        found[f"{name}, kernels"] = losses(dtype, kernels=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
