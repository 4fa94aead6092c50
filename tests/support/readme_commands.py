"""Blocks of cluster commands in README.md and manifests/README.md, for the cluster suite and for checks without one."""

from dataclasses import dataclass

from tests.support.tutorials import FENCE, ROOT


@dataclass(frozen=True)
class Commands:
    """The first fenced block of a page that starts with a word."""

    page: str
    first_word: str

    def read(self) -> str:
        text = (ROOT / self.page).read_text(encoding="utf-8")
        return next(block for kind, block in FENCE.findall(text) if not kind and block.startswith(self.first_word))


README_COMMANDS = Commands("README.md", "helm install")
MANIFESTS_COMMANDS = Commands("manifests/README.md", "sed ")
