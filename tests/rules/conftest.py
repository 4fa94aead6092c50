"""The promtools that tests of the rules are carried out with."""

import pytest

from tests.support import promtool
from tests.support.promtool import Promtool


@pytest.fixture(params=promtool.PLACES)
def tool(request: pytest.FixtureRequest) -> Promtool:
    """Each promtool that is at hand, one after the other."""
    return promtool.at(request.param)
