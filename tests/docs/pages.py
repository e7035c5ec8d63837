"""Pages of the documentation, and their code blocks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

from tests.architecture.sources import ROOT, project_files


@dataclass(frozen=True)
class CodeBlock:
    """A fenced block.

    Attributes:
        language: the first word after the fence, or the argument of a ``{code-block}`` directive.
        code: the text between the fences.
        line: the line of the page on which the code begins, from 1.
    """

    language: str
    code: str
    line: int


def documentation_pages() -> list[Path]:
    """Return every Markdown page of the repository, except pages of tests."""
    return [path for path in project_files(".md") if path.relative_to(ROOT).parts[0] != "tests"]


def code_blocks(text: str) -> list[CodeBlock]:
    """Return the fenced blocks of a page in order, also those in lists and quotes."""
    blocks = []
    for token in MarkdownIt("commonmark").parse(text):
        if token.type != "fence" or token.map is None:
            continue
        words = token.info.split()
        language = words[0] if words else ""
        if language == "{code-block}":
            language = words[1] if len(words) > 1 else ""
        blocks.append(CodeBlock(language, token.content, token.map[0] + 2))
    return blocks
