"""Twenty steps on the embedded digits with and without the kernels of 1x1 convolutions, in Triton's interpreter.

`python -m tests.support.gemm_digits` prints the losses in fp32 and bf16 of separate operations, and of the kernels, as
JSON.
"""

import json
from unittest import mock

import torch

from podscale.config import ModelSection
from podscale.data.sources.digits import load
from podscale.models import resnet
from tests.support.gemm_oracle import prepare_interpreter
from tests.support.gemm_training import train, use_large_tiles

STEPS, IMAGES = 20, 16
LEARNING_RATE = 0.05
MODEL = ModelSection(name="resnet50", stem="small", width=16)
BLOCKS = {"resnet50": ("bottleneck", (1, 2))}
"""Two stages, with blocks that stride, project and keep their shortcut."""


def main() -> None:
    prepare_interpreter()
    use_large_tiles()
    digits = load()
    images = torch.from_numpy(digits["levels"]).float()[:, None].expand(-1, 3, -1, -1) / 8 - 1
    labels = torch.from_numpy(digits["labels"]).long()
    batches = list(zip(images.split(IMAGES), labels.split(IMAGES), strict=True))[:STEPS]
    found = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        for kernels in (False, True):
            with mock.patch.dict(resnet.IMAGENET_BLOCKS, BLOCKS):
                losses = train(batches, MODEL, 10, LEARNING_RATE, dtype, kernels=kernels)
            found[f"{name}, kernels" if kernels else name] = losses
    print(json.dumps(found))


if __name__ == "__main__":
    main()
