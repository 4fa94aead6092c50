"""Training of a network with and without the kernels of 1x1 convolutions, in Triton's interpreter.

`python -m tests.support.gemm_training FILE fp32 [--kernels | --disturbed]` trains what `benchmarks.fused_training`
wrote to FILE, and prints the losses as JSON. `--disturbed` changes each value of the images by a small part of itself.
"""

import json
import sys
from collections.abc import Iterable
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from podscale.config import ModelSection
from podscale.models import resnet
from podscale.pytorch.batch_norm import BatchNorm, fused_calls, gemm_calls
from podscale.pytorch.models import build_model
from tests.support.gemm_oracle import prepare_interpreter

MOMENTUM = 0.9


def use_large_tiles() -> None:
    """Let few programs compute a layer: each takes milliseconds in the interpreter, whatever its size."""
    fused_calls.TILE, fused_calls.TILE_CHANNELS = 65536, 512
    fused_calls.FINISH_PARTS, fused_calls.FINISH_CHANNELS = 32, 512
    gemm_calls.BLOCK_ROWS = gemm_calls.SPLIT_ROWS = 1024
    gemm_calls.BLOCK_INPUTS = gemm_calls.BLOCK_OUTPUTS = gemm_calls.SUM_INPUTS = 512
    gemm_calls.SPLIT_INPUTS = gemm_calls.SPLIT_OUTPUTS = gemm_calls.MERGED_CHANNELS = 512
    gemm_calls.ADDED_ELEMENTS = 2**18


def train(
    batches: Iterable[tuple[Tensor, Tensor]],
    model: ModelSection,
    classes: int,
    learning_rate: float,
    dtype: torch.dtype,
    *,
    kernels: bool,
) -> list[float]:
    """Train a new network by SGD with momentum, and return the loss of each step.

    Args:
        batches: images, fp32 [n, 3, height, width], and their labels, int64 [n].
        dtype: fp32, or bf16 by autocast.
        kernels: run the kernels, else separate operations. Call `prepare_interpreter` before.
    """
    torch.manual_seed(0)
    network = build_model(model, classes)
    network.to(memory_format=torch.channels_last).train()
    for module in network.modules():
        if isinstance(module, BatchNorm):
            module.is_fused = module.folds_convolutions = kernels
    optimizer = torch.optim.SGD(network.parameters(), lr=learning_rate, momentum=MOMENTUM)
    losses = []
    for images, labels in batches:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            logits = network(images.contiguous(memory_format=torch.channels_last))
        loss = F.cross_entropy(logits.float(), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    file, dtype, *options = sys.argv[1:]
    training = np.load(file)
    images = torch.from_numpy(training["images"]).permute(0, 1, 4, 2, 3)
    if options == ["--disturbed"]:
        random = torch.randn(images.shape, generator=torch.Generator().manual_seed(1))
        images *= 1 + float(training["disturbance"]) * random
    prepare_interpreter()
    use_large_tiles()
    model = ModelSection.model_validate_json(str(training["model"]))
    blocks = {model.name: ("bottleneck", tuple(training["blocks"].tolist()))}
    with mock.patch.dict(resnet.IMAGENET_BLOCKS, blocks):
        losses = train(
            zip(images, torch.from_numpy(training["labels"]), strict=True),
            model,
            int(training["classes"]),
            float(training["learning_rate"]),
            torch.bfloat16 if dtype == "bf16" else torch.float32,
            kernels=options == ["--kernels"],
        )
    print(json.dumps(losses))


if __name__ == "__main__":
    main()
