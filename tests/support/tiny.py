"""The smallest training: sections of run documents, with digits of 16 x 16 pixels, and ResNets with few blocks."""

from unittest.mock import patch

from podscale.models.resnet import BASIC, BOTTLENECK, IMAGENET_BLOCKS

TINY = """data: {source: digits, shard_bytes: 131072}
input:
  image_size: 16
  loader: reference
  crop: {scale: [0.7, 1.0], ratio: [0.85, 1.18], flip: 0.0}
  mean: [0.3, 0.3, 0.3]
  std: [0.35, 0.35, 0.35]
model: {name: resnet18, stem: small, width: 4}
"""

SHALLOW = patch.dict(IMAGENET_BLOCKS, resnet18=(BASIC, (1, 1, 1, 1)), resnet101=(BOTTLENECK, (2, 1, 1, 1)))
"""Context, or decorator, in which these networks have one or two blocks in each stage."""
