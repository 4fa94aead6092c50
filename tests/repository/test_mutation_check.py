"""`python -m tools.mutation_check` takes minutes; this checks that its texts and tests still exist."""

import pytest

from tools.mutation_check import MUTATIONS, ROOT, MutatedSource, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.name for mutation in MUTATIONS])
def test_a_mutation_applies(mutation: Mutation) -> None:
    MutatedSource(mutation)  # asserts that the text occurs once
    file, *_ = mutation.tests.split()
    assert (ROOT / file).is_file()
