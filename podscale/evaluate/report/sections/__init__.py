"""The sections of the report, one function each; a section without material is None and left out."""

from podscale.evaluate.report.sections.classes import calibration, confusion, mistakes
from podscale.evaluate.report.sections.data import dataset_section
from podscale.evaluate.report.sections.head import claim, headline, problems
from podscale.evaluate.report.sections.origin import environment, reproduce
from podscale.evaluate.report.sections.together import ensemble_section
from podscale.evaluate.report.sections.training import curves, time_section

SECTIONS = (
    headline,
    problems,
    claim,
    ensemble_section,
    curves,
    time_section,
    confusion,
    calibration,
    mistakes,
    dataset_section,
    environment,
    reproduce,
)
"""In the order of the page."""
