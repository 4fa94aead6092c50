"""docs/reference/options.md agrees with the model."""

from podscale.config import option_names
from tools.options_reference import TARGET, render


def test_the_page_is_what_the_model_says() -> None:
    page = render()
    assert TARGET.read_text(encoding="utf-8") == page, "run: python tools/options_reference.py"
    missing = [option for option in option_names() if f"| `{option}` |" not in page]
    assert not missing
