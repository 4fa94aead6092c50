"""Weight decay and heavy-ball momentum, the parts that SGD and LARS share, in few passes over the memory.

Factors are fp32 on the device: one scalar for all slots, or one for each. `addcmul` with such a scalar is a
multiply-add in one pass.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from podscale.pytorch.optim.base import Slot, where_finite


def add_decay(slots: Sequence[Slot], weight_decay: Tensor) -> None:
    """g += weight_decay * w for every slot that decays."""
    decaying = [slot for slot in slots if slot.decays]
    gradients, weights = [slot.gradient for slot in decaying], [slot.weight for slot in decaying]
    torch._foreach_addcmul_(gradients, weights, [weight_decay] * len(decaying))


def apply_momentum(
    slots: Sequence[Slot], *, inside: Tensor, outside: Tensor, momentum: Tensor, nesterov: bool, finite: Tensor
) -> None:
    """u = inside * g;  m = momentum * m + u;  w -= outside * (u + momentum * m if nesterov else m).

    Where the learning rate stands, inside or outside, decides whether a change of it acts on old gradients too.
    Gradients are used up. Changes nothing where not finite.
    """
    weights, momenta = [slot.weight for slot in slots], [slot.momentum for slot in slots]
    updates = [slot.gradient for slot in slots]
    into = _for_each(where_finite(finite, inside, 0.0), len(slots))
    away = _for_each(where_finite(finite, -outside, 0.0), len(slots))
    torch._foreach_mul_(momenta, where_finite(finite, momentum, 1.0))
    if not nesterov:
        torch._foreach_addcmul_(momenta, updates, into)
        torch._foreach_addcmul_(weights, momenta, away)
        return
    torch._foreach_mul_(updates, into)
    torch._foreach_add_(momenta, updates)
    torch._foreach_addcmul_(updates, momenta, _for_each(momentum, len(slots)))
    torch._foreach_addcmul_(weights, updates, away)


def _for_each(factor: Tensor, slots: int) -> list[Tensor]:
    return list(factor.expand(slots).unbind())
