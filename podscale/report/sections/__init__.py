"""Sections of the report, one function each; a section without data is None and left out."""

from podscale.report.sections.classes import calibration, confusion, mistakes
from podscale.report.sections.dataset import dataset_section
from podscale.report.sections.ensemble import ensemble_section
from podscale.report.sections.summary import claim, environment, headline, problems, reproduce
from podscale.report.sections.training import curves, time_section

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
"""Sections in the order of the page."""
