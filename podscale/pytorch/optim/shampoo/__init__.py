"""Distributed Shampoo, from the cutting of parameters to the rule."""

from podscale.pytorch.optim.shampoo.rule import Shampoo

__all__ = ["Shampoo"]
