"""The documentation site builds strictly, has every page, and loads nothing from another host (tools/docs_site.py)."""

import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from podscale.version import VERSION
from tests.support.browser import Browser, browser, browser_or_skip
from tools.docs_site import (
    Site,
    address_of,
    build,
    describe,
    find_repository,
    stack_tables,
)

REPOSITORY = "https://git.example.com/podscale"
needs_builder = pytest.mark.skipif(
    find_spec("zensical") is None, reason="needs the site's builder: make .venv/.docs (requirements/docs.txt)"
)
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}
FOLLOWED_LINKS = {"canonical", "next", "prev", "edit", "alternate"}
"""Kinds of <link> that a browser does not load."""


class Assets(HTMLParser):
    """Addresses that a page loads, and those that it links to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.linked: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        address = values.get(LOADED.get(tag, ""))
        if tag == "a" and (target := values.get("href")):
            self.linked.append(target)
        elif address and not (tag == "link" and FOLLOWED_LINKS & set((values.get("rel") or "").split())):
            self.loaded.append(address)


@pytest.fixture(scope="module")
def site_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(Site(repository=REPOSITORY), tmp_path_factory.mktemp("site") / "build")


@pytest.fixture(scope="module")
def pages(site_folder: Path) -> dict[Path, Assets]:
    """Pages of the site by their path."""
    return {path: Assets(path.read_text(encoding="utf-8")) for path in sorted(site_folder.rglob("*.html"))}


def test_every_page_is_in_the_navigation() -> None:
    site = Site()
    assert site.pages_outside_nav() == []
    assert site.missing_pages() == []
    paths = [entry.path for entry in site.nav]
    assert len(paths) == len(set(paths))


@needs_builder
def test_the_site_has_every_page_and_the_version(site_folder: Path) -> None:
    for entry in Site().nav:
        assert (site_folder / address_of(entry.path) / "index.html").exists(), entry.path
    for name in ("index.html", "404.html"):
        assert f"Podscale {VERSION}" in (site_folder / name).read_text(encoding="utf-8")
    assert (site_folder / "llms.txt").read_text(encoding="utf-8") == Site(repository=REPOSITORY).llms_txt()
    runbook = (site_folder / "runbooks" / "PodscaleStraggler.md" / "index.html").read_text(encoding="utf-8")
    assert "url=../PodscaleStraggler/" in runbook
    assert (site_folder / "runbooks" / "PodscaleStraggler" / "index.html").exists()


@needs_builder
def test_pages_load_nothing_from_another_host(site_folder: Path, pages: dict[Path, Assets]) -> None:
    """The scripts know addresses of other hosts for functions that are off; a browser showed that none is asked."""
    assert any(page.loaded for page in pages.values())
    assert not {address for page in pages.values() for address in page.loaded if urlsplit(address).netloc}
    styles = [path.read_text(encoding="utf-8") for path in site_folder.rglob("*.css")]
    assert styles
    assert not [url for text in styles for url in re.findall(r"url\(['\"]?(?:https?:)?//[^)]*", text)]
    # With it, the theme's script asks api.github.com for the stars of a repository.
    assert not [path for path in site_folder.rglob("*.html") if 'data-md-component="source"' in path.read_text()]


@needs_builder
def test_links_of_the_site_lead_to_pages(site_folder: Path, pages: dict[Path, Assets]) -> None:
    files = {str(path) for path in site_folder.rglob("*") if path.is_file()}
    lost, seen = set(), 0
    for path, page in pages.items():
        for link in set(page.linked):
            parts = urlsplit(link)
            if parts.scheme or not parts.path:
                continue
            base, seen = site_folder if parts.path.startswith("/") else path.parent, seen + 1
            target = os.path.normpath(f"{base}/{parts.path.lstrip('/')}")
            if target not in files and f"{target}/index.html" not in files:
                lost.add((str(path.relative_to(site_folder)), link))
    assert seen > len(pages)
    assert not lost


@needs_builder
def test_pages_can_be_edited_unless_a_tool_writes_them(site_folder: Path) -> None:
    def edit_link(page: str) -> list[str]:
        text = (site_folder / page / "index.html").read_text(encoding="utf-8")
        return re.findall(r'href="([^"]*)"[^>]*rel="edit"', text)

    assert edit_link("how-to/gke") == [f"{REPOSITORY}/edit/main/docs/how-to/gke.md"]
    assert edit_link("charts/podscale") == [f"{REPOSITORY}/edit/main/charts/podscale/README.md"]
    assert edit_link("reference/options") == []


class QuietHandler(SimpleHTTPRequestHandler):
    """Handler without a log."""

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def served(site_folder: Path) -> Iterator[str]:
    """The address at which the site is served."""
    handler = partial(QuietHandler, directory=str(site_folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def tab() -> Iterator[Browser]:
    program = browser_or_skip()
    with browser(program) as found:
        yield found


def requested(tab: Browser) -> list[str]:
    """Return the addresses that the page asked for, except `data:` and `blob:`."""
    return [address for address in tab.requests() if not address.startswith("blob:")]


def wait_for(tab: Browser, script: str, value: object) -> bool:
    """True as soon as an expression has a value in the page."""
    deadline = time.monotonic() + 20
    while tab.evaluate(script) != value:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@needs_builder
@pytest.mark.parametrize(
    ("width", "dark"),
    [
        (1280, False),
        (390, True),
        pytest.param(1280, True, marks=pytest.mark.slow),
        pytest.param(390, False, marks=pytest.mark.slow),
    ],
)
def test_a_browser_asks_no_other_host_and_no_page_is_wider_than_the_screen(
    tab: Browser, served: str, width: int, dark: bool
) -> None:
    tab.open("about:blank")
    tab.call("Storage.clearDataForOrigin", origin=served, storageTypes="all")  # the scheme that was shown last
    for page in ("/", "/reference/metrics/", "/reference/options/train/", "/how-to/gke/", "/404.html"):
        tab.open(served + page, width=width, dark=dark)
        assert wait_for(tab, "document.body.dataset.mdColorScheme", "slate" if dark else "default"), page
        background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", background)[:3])) < 3 * 128) == dark
        time.sleep(0.3)  # what scripts ask for after the page is drawn
        addresses = requested(tab)
        assert addresses
        assert [address for address in addresses if not address.startswith(f"{served}/")] == []
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, page


@needs_builder
def test_the_search_finds_an_option_without_a_network(tab: Browser, served: str) -> None:
    tab.open(f"{served}/reference/cli/")
    time.sleep(0.5)
    key = {"type": "keyDown", "key": "/", "text": "/", "code": "Slash", "windowsVirtualKeyCode": 191}
    tab.call("Input.dispatchKeyEvent", **key)
    time.sleep(0.5)
    tab.call("Input.insertText", text="steps_per_call")
    results = "[...document.querySelectorAll('*')].flatMap(one => [...one.shadowRoot?.querySelectorAll('a') ?? []])"
    assert wait_for(tab, f"{results}.some(one => one.href.includes('/reference/options/train/'))", True)
    assert [address for address in requested(tab) if not address.startswith(f"{served}/")] == []


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A repository of three pages, one of them outside docs/."""
    for name, text in {
        "mkdocs.yml": "site_name: S\nsite_description: D.\ntheme: {name: material, custom_dir: theme}\n"
        "nav: [{Home: index.md}, {Guides: [how-to/a.md]}, {Results: [bench/r.md]}]\n",
        "docs/index.md": "# Start\n\nA page with `code` and a [link](how-to/a.md#part). More.\n",
        "docs/how-to/a.md": "# Guide\n\nWhat to do.\n\n[results](../../bench/r.md#x), [code](../../src/a.py), "
        "[folder](../../src), [home](../index.md), [site](https://example.com)\n\n`[no](../../src/a.py)`\n",
        "bench/r.md": "# Results\n\n| a |\n|---|\n| 1 |\n\nFigures.\n\n![plot](r.svg) [g](../docs/how-to/a.md)\n",
        "bench/r.svg": "<svg/>",
        "src/a.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_links_are_those_of_the_site(small: Path) -> None:
    page = Site(small, REPOSITORY).page("how-to/a.md")
    assert "[results](../bench/r.md#x)" in page
    assert f"[code]({REPOSITORY}/blob/main/src/a.py)" in page
    assert f"[folder]({REPOSITORY}/tree/main/src)" in page
    assert "[home](../index.md), [site](https://example.com)" in page
    assert "`[no](../../src/a.py)`" in page
    assert "source: docs/how-to/a.md" in page
    without = Site(small).page("how-to/a.md")
    assert "[results](../bench/r.md#x), code, folder, [home](../index.md)" in without
    results = Site(small).page("bench/r.md")
    assert "[g](../how-to/a.md)" in results
    assert "![plot](r.svg)" in results
    assert Site(small).files["bench/r.svg"] == "bench/r.svg"


def test_pages_outside_the_navigation_and_missing_ones_are_found(small: Path) -> None:
    (small / "docs" / "lost.md").write_text("# Lost\n")
    assert Site(small).pages_outside_nav() == ["lost.md"]
    (small / "bench" / "r.md").unlink()
    assert Site(small).missing_pages() == ["bench/r.md"]
    with pytest.raises(SystemExit, match=r"\(got bench/r\.md\)"):
        build(Site(small), small / "out")


def test_llms_txt_lists_pages_with_their_first_sentence(small: Path) -> None:
    assert Site(small).llms_txt() == (
        "# S\n\n> D.\n\n- [Home](./): A page with code and a link.\n\n## Guides\n\n- [Guide](how-to/a/): What to do.\n"
        "\n## Results\n\n- [Results](bench/r/): Figures.\n"
    )


def test_generated_pages_have_no_source(small: Path) -> None:
    (small / "docs" / "index.md").write_text("# T\n\nAll of it. Generated from `a/b.py` by\n`tools/x.py`; a test.\n")
    assert "source:" not in Site(small).page("index.md")


def test_descriptions_are_plain_sentences() -> None:
    assert (
        describe("# T\n\n```\ncode. More\n```\n\n**Bold** and [a `b`](c.md): it is. Next.\n") == "Bold and a b: it is."
    )
    assert describe("# T\n\n| a |\n|---|\n") == ""


def test_tables_of_texts_are_marked() -> None:
    table = "| option | meaning |\n|---|---|\n| `a` | text |\n"
    assert stack_tables(f"before\n\n{table}\nafter\n") == (
        f'before\n\n<div class="stacked columns-2" markdown>\n\n{table}\n</div>\n\nafter\n'
    )
    numbers = table.replace("meaning", "top-1")
    assert stack_tables(numbers) == numbers


@pytest.mark.parametrize(
    "remote",
    [
        "https://git.example.com/a/podscale.git",
        "git@git.example.com:a/podscale.git",
        "ssh://git@git.example.com/a/podscale",
    ],
)
def test_the_repository_is_that_of_origin(tmp_path: Path, remote: str) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert find_repository(tmp_path) == ""
    subprocess.run(["git", "-C", str(tmp_path), "remote", "add", "origin", remote], check=True)
    assert find_repository(tmp_path) == "https://git.example.com/a/podscale"
