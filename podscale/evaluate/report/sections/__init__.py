"""The sections of the report, one function each; a section without material is None and left out."""

from podscale.evaluate.report.sections.classes import calibration, confusion, mistakes
from podscale.evaluate.report.sections.data import dataset
from podscale.evaluate.report.sections.head import claim, headline, problems
from podscale.evaluate.report.sections.origin import environment, reproduce
from podscale.evaluate.report.sections.together import together
from podscale.evaluate.report.sections.training import curves, time

ALL = (
    headline,
    problems,
    claim,
    together,
    curves,
    time,
    confusion,
    calibration,
    mistakes,
    dataset,
    environment,
    reproduce,
)
"""In the order of the page."""
