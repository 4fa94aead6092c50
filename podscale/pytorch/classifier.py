"""Trained model as a function from pixels to log-probabilities, in the numerics of its evaluation."""

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from podscale.config import RunConfig
from podscale.pytorch.device_prefetcher import Normalise
from podscale.pytorch.evaluator import mean_logits
from podscale.pytorch.precision import build_precision, set_numerics
from podscale.pytorch.train_state import load_weights_file
from podscale.pytorch.trainer import build_model_on_device
from podscale.pytorch.world import World
from podscale.runs.model_files import EvaluatedModel


class TorchClassifier:
    """Model of a model directory on one device: GPU `index`, or the CPU if there is none."""

    def __init__(self, model: EvaluatedModel, config: RunConfig, index: int = 0) -> None:
        """Load the weights. Raises InputError if they are missing or of another architecture."""
        set_numerics(config.train)
        device = torch.device("cuda", index) if torch.cuda.is_available() else torch.device("cpu")
        world = World(rank=0, size=1, local_rank=0, local_size=1, device=device)  # without a process group
        self._precision = build_precision(config.train, world)
        self._model = build_model_on_device(config, world, len(model.description["classes"])).eval()
        self._precision.cast_parameters(self._model)
        load_weights_file(self._model, model.weights)
        self._normalise = Normalise(config.input, world, channels_last=config.train.channels_last)
        self._flip, self._device = config.evaluate.flip, device

    def log_probabilities(self, images: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """Return the log-softmax of the logits, float32 [n, classes].

        Args:
            images: uint8 [n, size, size, 3].
        """
        with torch.inference_mode(), self._precision.autocast():
            pixels = torch.from_numpy(images).to(self._device)
            logits = mean_logits(self._model, self._normalise(pixels), flip=self._flip)
        values: npt.NDArray[np.float32] = F.log_softmax(logits.float(), dim=1).cpu().numpy()
        return values


def use_threads(threads: int) -> None:
    """Limit the threads of one operation on the CPU."""
    torch.set_num_threads(threads)
