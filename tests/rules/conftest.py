"""Fixture: the promtool programs for tests of the rules."""

import pytest

from tests.support import promtool
from tests.support.promtool import Promtool


@pytest.fixture(params=promtool.PLACES)
def tool(request: pytest.FixtureRequest) -> Promtool:
    """Each available promtool in turn."""
    return promtool.at(request.param)
