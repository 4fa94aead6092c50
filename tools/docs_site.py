"""Build the documentation site: `python -m tools.docs_site build`, or `serve`, which follows changes.

The builder reads a copy of the pages, because in docs/ links must work in the repository itself:

- a link to a page of the site leads there, whichever folder of the repository that page comes from;
- another link into the repository leads to its address if there is one (--repository, else git's remote `origin`),
  else only its text stays;
- each page has its first sentence as its description, and its source for the edit link;
- llms.txt lists all pages with their descriptions.

Needs requirements/docs.txt alone.
"""

import argparse
import posixpath
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from podscale.version import VERSION
from tools.markdown_links import Link, find_links

ROOT = Path(__file__).resolve().parents[1]
BUILD_FOLDER = ROOT / "build" / "docs-site"
SITE = ROOT / "site"
BRANCH = "main"
POLL_SECONDS = 1.0
GENERATED = re.compile(r"Generated\s+from\s.{0,200}?`tools/", re.DOTALL)
"""Text of the pages that a tool writes; they have no edit link."""
WITHOUT_CONTENTS = ("reference/presets.md",)
"""Pages whose table is their list of contents, and needs the width."""
TEXT_COLUMNS = ("content", "meaning", "purpose", "subject", "what it does", "what it is")
_TABLE = re.compile(r"^(\|[^\n]*\|)\n\|[-|: ]+\|\n(?:\|[^\n]*(?:\n|\Z))*", re.MULTILINE)
_TITLE = re.compile(r"^# +(.+?) *#*$", re.MULTILINE)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`\[*(])")
_FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_NOT_PROSE = ("#", "|", "<", "```", "![", "---", "Command:")
_LINK_WITH_TEXT = re.compile(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^()]*(?:\([^()]*\))?[^()]*\)")


class _ConfigLoader(yaml.SafeLoader):
    """Loader of mkdocs.yml; values that are Python objects become None."""


_ConfigLoader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


@dataclass(frozen=True)
class NavEntry:
    """Page of the navigation; `path` is that on the site, `section` the titles above it."""

    path: str
    title: str | None
    section: tuple[str, ...]


@dataclass(frozen=True)
class Site:
    """Pages of a site and their places.

    Args:
        root: Top of the repository, with mkdocs.yml and docs/.
        repository: Address of the repository; "" if there is none.
    """

    root: Path = ROOT
    repository: str = ""

    @cached_property
    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = yaml.load((self.root / "mkdocs.yml").read_text(encoding="utf-8"), _ConfigLoader)
        return config

    @cached_property
    def nav(self) -> list[NavEntry]:
        return list(_nav_entries(self.config["nav"]))

    @cached_property
    def files(self) -> dict[str, str]:
        """Source of each file on the site by its path there; both relative, with forward slashes."""
        docs = self.root / "docs"
        files = {path.relative_to(docs).as_posix(): path for path in sorted(docs.rglob("*")) if path.is_file()}
        files |= {entry.path: self.root / entry.path for entry in self.nav if entry.path not in files}
        for path in [path for path in files.values() if path.suffix == ".md" and path.exists()]:
            files |= {picture: self.root / picture for picture in self._pictures(path)}
        return {name: path.relative_to(self.root).as_posix() for name, path in files.items()}

    @cached_property
    def place_of(self) -> dict[str, str]:
        """Path on the site of each source; the home page stands for README.md."""
        return {"README.md": "index.md", **{source: place for place, source in self.files.items()}}

    def missing_pages(self) -> list[str]:
        """Return the entries of the navigation that no file backs."""
        return [entry.path for entry in self.nav if not (self.root / self.files[entry.path]).exists()]

    def pages_outside_nav(self) -> list[str]:
        return sorted({name for name in self.files if name.endswith(".md")} - {entry.path for entry in self.nav})

    def _pictures(self, page: Path) -> Iterator[str]:
        """Yield the pictures outside docs/ to which a page links; the site then needs them too."""
        for link in find_links(page.read_text(encoding="utf-8")):
            target = self._target(link, page)
            if link.is_relative and target.endswith((".svg", ".png")) and not target.startswith("docs/"):
                yield target

    def _target(self, link: Link, page: Path) -> str:
        """Return the target of a link, relative to the top of the repository."""
        folder = page.parent.relative_to(self.root).as_posix()
        return posixpath.normpath(posixpath.join(folder, link.path))

    def page(self, place: str) -> str:
        """Return the text of a page on the site, with its front matter."""
        source = self.root / self.files[place]
        text = source.read_text(encoding="utf-8")
        description = describe(text)
        meta: dict[str, Any] = {"description": description} if description else {}
        if place in WITHOUT_CONTENTS:
            meta["hide"] = ["toc"]
        if not GENERATED.search(text):
            meta["source"] = self.files[place]
        body = stack_tables(self.rewrite(text, source, place))
        return f"---\n{yaml.safe_dump(meta, width=1000, allow_unicode=True)}---\n\n{body}"

    def rewrite(self, text: str, source: Path, place: str) -> str:
        """Return the text of a page with the links that it needs at its place on the site."""
        for link in reversed(find_links(text)):
            if not link.is_relative or not link.path:
                continue
            target = self._target(link, source)
            found = self.place_of.get(target) or self.place_of.get(f"{target}/README.md")
            anchor = f"#{link.anchor}" if link.anchor and target != "README.md" else ""
            if found is not None:
                new = posixpath.relpath(found, posixpath.dirname(place) or ".") + anchor
            elif self.repository:
                kind = "tree" if (self.root / target).is_dir() else "blob"
                new = f"{self.repository}/{kind}/{BRANCH}/{target}{anchor}"
            else:
                text = _without_link(text, link)
                continue
            text = text[: link.start] + new + text[link.start + len(link.target) :]
        return text

    def llms_txt(self) -> str:
        """Return the list of pages with descriptions, a section for each part of the navigation."""
        lines = [f"# {self.config['site_name']}", "", f"> {self.config['site_description']}"]
        section: tuple[str, ...] | None = None
        for entry in self.nav:
            if entry.section[:1] != section:
                section = entry.section[:1]
                lines += ["", *(f"## {title}" for title in section), *([""] if section else [])]
            text = (self.root / self.files[entry.path]).read_text(encoding="utf-8")
            description = describe(text)
            link = f"- [{entry.title or title_of(text)}]({address_of(entry.path)})"
            lines.append(f"{link}: {description}" if description else link)
        return "\n".join(lines) + "\n"

    def settings(self) -> dict[str, Any]:
        """Return the configuration of the copy, which inherits mkdocs.yml."""
        return {
            "INHERIT": str(self.root / "mkdocs.yml"),
            "docs_dir": "docs",
            "site_dir": "site",
            "theme": {"custom_dir": str(self.root / self.config["theme"]["custom_dir"])},
            "extra": {"podscale_version": VERSION},
            **({"repo_url": self.repository} if self.repository else {}),
        }

    def stage(self, folder: Path) -> None:
        """Write what the builder reads into `folder`; files that are up to date stay as they are."""
        wanted = {
            **{folder / "docs" / place: self._content(place) for place in self.files},
            folder / "docs" / "llms.txt": self.llms_txt().encode(),
            folder / "mkdocs.yml": yaml.safe_dump(self.settings()).encode(),
        }
        for path in [path for path in (folder / "docs").rglob("*") if path.is_file() and path not in wanted]:
            path.unlink()
        for path, content in wanted.items():
            if not path.exists() or path.read_bytes() != content:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)

    def _content(self, place: str) -> bytes:
        return self.page(place).encode() if place.endswith(".md") else (self.root / self.files[place]).read_bytes()


def build(site: Site, folder: Path, *, strict: bool = True) -> Path:
    """Build a site in `folder` and return the folder of its pages; exits with the builder's output if that fails."""
    if missing := site.missing_pages():
        sys.exit(f"mkdocs.yml: the navigation names pages that do not exist (got {', '.join(missing)})")
    shutil.rmtree(folder, ignore_errors=True)
    site.stage(folder)
    command = [sys.executable, "-m", "zensical", "build", "--clean", "-f", str(folder / "mkdocs.yml")]
    done = subprocess.run([*command, *(["--strict"] if strict else [])], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}\nthe site was not built")
    pages = folder / "site"
    for entry in site.nav:
        if entry.path.startswith("runbooks/Podscale"):
            _redirect(pages / entry.path, f"../{Path(entry.path).stem}/")
    return pages


def _redirect(path: Path, target: str) -> None:
    """Make `path`, the address that an alert names in the repository, lead to the page on the site."""
    path.mkdir(parents=True)
    page = f'<!doctype html><title>Redirect</title><meta http-equiv="refresh" content="0; url={target}">'
    (path / "index.html").write_text(f'{page}<a href="{target}">{target}</a>\n', encoding="utf-8")


def describe(text: str) -> str:
    """Return the first sentence of a page below its title, as plain text."""
    body = _FENCE.sub("\n", text[match.end() :] if (match := _TITLE.search(text)) else text)
    paragraphs = (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", body))
    first = next((one for one in paragraphs if one and not one.startswith(_NOT_PROSE)), "")
    text = _LINK_WITH_TEXT.sub(lambda link: "" if link[0].startswith("!") else link[1], first)
    sentence = _SENTENCE_END.split(text)[0]
    return sentence.replace("**", "").replace("`", "").strip().removesuffix(":")


def stack_tables(text: str) -> str:
    """Mark tables whose last column is a text, which phones show with the cells of a row below each other."""

    def mark(match: re.Match[str]) -> str:
        cells = [cell.strip() for cell in match[1].strip("|").split("|")]
        if cells[-1] not in TEXT_COLUMNS or len(cells) < 2:
            return match[0]
        return f'<div class="stacked columns-{len(cells)}" markdown>\n\n{match[0]}\n</div>\n'

    return _TABLE.sub(mark, text)


def title_of(text: str) -> str:
    match = _TITLE.search(text)
    assert match is not None, "a page begins with a title"
    return match[1].replace("`", "")


def address_of(path: str) -> str:
    """Return the address of a page relative to the site's."""
    page = PurePosixPath(path)
    folder = page.parent if page.name in ("index.md", "README.md") else page.with_suffix("")
    return "./" if str(folder) == "." else f"{folder}/"


def find_repository(root: Path = ROOT) -> str:
    """Return the web address of git's remote `origin`; "" if there is none."""
    command = ["git", "remote", "get-url", "origin"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    match = re.fullmatch(r"(?:https://|ssh://git@|git@)(?:[^@/]+@)?([\w.-]+)[:/](.+?)(?:\.git)?/?", done.stdout.strip())
    return f"https://{match[1]}/{match[2]}" if match and done.returncode == 0 else ""


def _nav_entries(items: list[Any], section: tuple[str, ...] = ()) -> Iterator[NavEntry]:
    for item in items:
        for title, value in item.items() if isinstance(item, dict) else [(None, item)]:
            if isinstance(value, list):
                yield from _nav_entries(value, (*section, str(title)))
            else:
                yield NavEntry(value, title, section)


def _without_link(text: str, link: Link) -> str:
    """Return the text with the words of a link in its place."""
    match = next((one for one in _LINK_WITH_TEXT.finditer(text) if one.start() < link.start < one.end()), None)
    assert match is not None, f"line {link.line}: only inline links can leave the site (got {link.target})"
    return text[: match.start()] + match[1] + text[match.end() :]


def serve(site: Site, folder: Path) -> None:
    """Show the site until Ctrl-C, and copy changed pages for the builder, which then reloads them."""
    shutil.rmtree(folder, ignore_errors=True)
    site.stage(folder)
    command = [sys.executable, "-m", "zensical", "serve", "-f", str(folder / "mkdocs.yml")]
    with subprocess.Popen(command, cwd=folder) as server:
        try:
            while server.poll() is None:
                time.sleep(POLL_SECONDS)
                current = Site(site.root, site.repository)
                with suppress(OSError, yaml.YAMLError):  # a file in the middle of a change
                    if not current.missing_pages():
                        current.stage(folder)
        except KeyboardInterrupt:
            server.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description="Build or show the documentation site.")
    parser.add_argument("command", choices=("build", "serve"))
    parser.add_argument("--repository", help="address of the repository (default: that of git's remote origin)")
    options = parser.parse_args()
    repository = find_repository() if options.repository is None else options.repository.rstrip("/")
    site = Site(ROOT, repository)
    if options.command == "serve":
        serve(site, BUILD_FOLDER)
        return
    pages = build(site, BUILD_FOLDER)
    shutil.rmtree(SITE, ignore_errors=True)
    pages.replace(SITE)
    size = sum(path.stat().st_size for path in SITE.rglob("*") if path.is_file())
    print(f"{SITE.relative_to(ROOT)}/index.html: {len(site.nav)} pages, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
