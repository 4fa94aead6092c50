"""Sections of the report, one function each, which returns None without data."""

from podscale.report.sections.classes import calibration, confusion, mistakes
from podscale.report.sections.dataset import dataset_section
from podscale.report.sections.ensemble import ensemble_section
from podscale.report.sections.summary import claim, demo, environment, headline, problems, reproduce
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
    demo,
    dataset_section,
    environment,
    reproduce,
)
