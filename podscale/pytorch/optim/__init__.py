"""Update rules by their names in the document."""

from podscale.pytorch.optim.base import Displaced, Hyper, Optimizer
from podscale.pytorch.optim.build import build_optimizer, build_share
from podscale.pytorch.optim.lamb import Lamb
from podscale.pytorch.optim.lars import Lars
from podscale.pytorch.optim.neumann import Neumann
from podscale.pytorch.optim.nlcg import Nlcg
from podscale.pytorch.optim.sgd import Sgd
from podscale.pytorch.optim.share import Segment, Share

__all__ = [
    "Displaced",
    "Hyper",
    "Lamb",
    "Lars",
    "Neumann",
    "Nlcg",
    "Optimizer",
    "Segment",
    "Sgd",
    "Share",
    "build_optimizer",
    "build_share",
]
