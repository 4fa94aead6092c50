"""Run document: one typed model, its reader and its identity."""

from podscale.config.data import DataSection, InputSection
from podscale.config.document import Defaults, dumps, json_schema, load, load_values, loads, option_names
from podscale.config.identity import Difference, data_fingerprint, differences, fingerprint, result_values
from podscale.config.model import ModelSection
from podscale.config.run import ClaimSection
from podscale.config.run_config import RunConfig
from podscale.config.train import TrainSection

__all__ = [
    "ClaimSection",
    "DataSection",
    "Defaults",
    "Difference",
    "InputSection",
    "ModelSection",
    "RunConfig",
    "TrainSection",
    "data_fingerprint",
    "differences",
    "dumps",
    "fingerprint",
    "json_schema",
    "load",
    "load_values",
    "loads",
    "option_names",
    "result_values",
]
