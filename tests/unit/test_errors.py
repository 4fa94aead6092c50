"""Errors that pass between processes, and several errors at once."""

import json
import pickle

import pytest

from podscale.errors import ABSENT, InputError, InputErrors, PodscaleError, fields_of, format_error


@pytest.mark.parametrize("got", [ABSENT, None, True, 3, 0.5, "x"])
def test_an_error_is_restored_from_json(got: object) -> None:
    error = InputError("wrong", field="a.b", got=got, hint="Mend it.", location="run.yaml:3")
    again = InputError(**json.loads(json.dumps(fields_of(error))))
    assert (str(again), again.field, again.hint, again.location) == (str(error), "a.b", "Mend it.", "run.yaml:3")
    assert again.got is got or again.got == got


def test_a_value_without_a_json_type_is_sent_as_text() -> None:
    error = InputError(**json.loads(json.dumps(fields_of(InputError("wrong", got=(2, 1))))))
    assert error.got == "(2, 1)"


@pytest.mark.parametrize("kind", [InputError, PodscaleError])
def test_an_error_survives_pickling(kind: type[PodscaleError]) -> None:
    error = pickle.loads(pickle.dumps(kind("wrong", field="a", got=3, hint="Mend it.")))
    assert (type(error), str(error)) == (kind, "a: wrong (got 3). Mend it.")
    assert (error.problem, error.field, error.got, error.hint) == ("wrong", "a", 3, "Mend it.")


@pytest.mark.parametrize("title", ["", "two things:"])
def test_several_errors_keep_each_of_them(title: str) -> None:
    errors = InputErrors([InputError("wrong", field="a", got=3), InputError("missing", field="b")], title)
    for found in (errors, pickle.loads(pickle.dumps(errors))):
        assert [(error.field, error.got) for error in found.errors] == [("a", 3), ("b", ABSENT)]
        assert (found.field, found.got) == ("a", 3)
        lines = str(found).splitlines()
        assert lines == (
            ["two things:", "  - a: wrong (got 3)", "  - b: missing"] if title else ["a: wrong (got 3)", "b: missing"]
        )
        assert str(InputError(**json.loads(json.dumps(fields_of(found))))) == str(found)


def test_location_and_field_come_first_and_long_values_are_cut() -> None:
    text = format_error("wrong", field="a", got="x" * 1000, hint="Mend it.", location="run.yaml:3")
    assert text.startswith("run.yaml:3: a: wrong (got 'xxx")
    assert text.endswith("...). Mend it.")
    assert len(text) < 200


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        ("no cluster", "no cluster. Set KUBECONFIG."),
        ("No configuration found.", "No configuration found. Set KUBECONFIG."),  # text of a library
        ("two things:\n  - a\n", "two things:\n  - a\n\nSet KUBECONFIG."),
    ],
)
def test_one_period_precedes_the_hint(problem: str, text: str) -> None:
    assert format_error(problem, hint="Set KUBECONFIG.") == text
