"""Update rules by their names in the document."""

from podscale.pytorch.optim.adam import Adam
from podscale.pytorch.optim.base import Displaced, Hyper, Optimizer, Periodic, Shaped
from podscale.pytorch.optim.build import build_optimizer, build_share
from podscale.pytorch.optim.lamb import Lamb
from podscale.pytorch.optim.lars import Lars
from podscale.pytorch.optim.neumann import Neumann
from podscale.pytorch.optim.nlcg import Nlcg
from podscale.pytorch.optim.rmsprop import RmsProp
from podscale.pytorch.optim.sgd import Sgd
from podscale.pytorch.optim.shampoo import Shampoo
from podscale.pytorch.optim.share import Segment, Share

__all__ = [
    "Adam",
    "Displaced",
    "Hyper",
    "Lamb",
    "Lars",
    "Neumann",
    "Nlcg",
    "Optimizer",
    "Periodic",
    "RmsProp",
    "Segment",
    "Sgd",
    "Shampoo",
    "Shaped",
    "Share",
    "build_optimizer",
    "build_share",
]
