"""Write all generated pages of docs/reference/: `make reference`."""

from pathlib import Path

from tools import (
    api_reference,
    cli_reference,
    environment_reference,
    exit_codes_reference,
    files_reference,
    hardware_reference,
    metrics_reference,
    models_reference,
    modules_reference,
    options_reference,
    presets_reference,
)

SINGLE_PAGES = (
    api_reference,
    cli_reference,
    environment_reference,
    exit_codes_reference,
    files_reference,
    hardware_reference,
    metrics_reference,
    presets_reference,
)
FOLDERS = (options_reference.SECTION_PAGES, modules_reference.PACKAGE_PAGES)
"""Folders that hold generated pages alone."""


def reference_pages() -> dict[Path, str]:
    """Return the text of each generated page by its path."""
    models = models_reference.PAGE
    return {
        **{tool.TARGET: tool.render() for tool in SINGLE_PAGES},
        models: models_reference.page(models.read_text(encoding="utf-8")),
        **options_reference.pages(),
        **modules_reference.pages(),
    }


def stale_pages(pages: dict[Path, str]) -> list[Path]:
    """Return the pages that no generator writes any more."""
    return [path for folder in FOLDERS for path in sorted(folder.glob("*.md")) if path not in pages]


if __name__ == "__main__":
    written = reference_pages()
    for page in stale_pages(written):
        page.unlink()
    for page, text in written.items():
        page.parent.mkdir(exist_ok=True)
        page.write_text(text, encoding="utf-8")
