"""Sections of run documents for the smallest training: digits of 16 x 16 pixels, ResNet-18 of width 4."""

TINY = """data: {source: digits, shard_bytes: 131072}
input:
  image_size: 16
  loader: reference
  crop: {scale: [0.7, 1.0], ratio: [0.85, 1.18], flip: 0.0}
  mean: [0.3, 0.3, 0.3]
  std: [0.35, 0.35, 0.35]
model: {name: resnet18, stem: small, width: 4}
"""
