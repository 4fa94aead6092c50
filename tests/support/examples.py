"""Mark of tests that run what a page or a benchmark shows, at its full size: tutorials and small forms of benchmarks.

They take some four CPU minutes and cannot be made smaller, because a page shows what its commands print.
"""

import os

import pytest

runs_examples = pytest.mark.skipif(
    "PODSCALE_TEST_EXAMPLES" not in os.environ, reason="takes minutes: make test-examples runs it"
)
