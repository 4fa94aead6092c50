"""`python -m tools.mutation_check` takes minutes; this checks that its texts and tests still exist."""

import pytest

from tools.mutation_check import (
    MISSED,
    NOT_RUN,
    OUTCOMES,
    ROOT,
    MutatedSource,
    outcomes_page,
    read_outcomes,
)
from tools.mutation_table import MUTATIONS, Mutation
from tools.paper_evidence import check_test


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.name for mutation in MUTATIONS])
def test_a_mutation_applies(mutation: Mutation) -> None:
    MutatedSource(mutation)  # asserts that the text occurs once
    file, *_ = mutation.tests.split()
    assert (ROOT / file).is_file()


def test_the_list_of_outcomes_has_every_mutation_and_tests_that_exist() -> None:
    outcomes = read_outcomes()
    assert list(outcomes) == [mutation.name for mutation in MUTATIONS]
    assert OUTCOMES.read_text(encoding="utf-8") == outcomes_page(outcomes), "run: make mutation-check"
    assert MISSED not in outcomes.values()
    for noticed in set(outcomes.values()) - {NOT_RUN}:
        check_test(noticed.strip("`").partition("[")[0])
