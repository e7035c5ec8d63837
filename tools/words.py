"""Find words and names that the project replaced: ``python -m tools.words [PATH ...]``, part of ``make check``.

In Python files it reads comments, docstrings and other strings, and the names of modules, classes and functions; in
tests only comments, docstrings and names of modules, because their strings are data. In Markdown it reads the text
outside of code. `docs/reference/glossary.md` has the words to use.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

_PATHS: Final = (
    "ckptcore", "plugins", "tests", "tools", "benchmarks", "examples", "conftest.py", "docs",
    "README.md", "PACKAGE.md", "CONTRIBUTING.md", "CHANGELOG.md",
)  # fmt: skip
"""Files and directories that are checked by default."""

_SKIPPED: Final = {"build", "_build"}
"""Directories that are not checked."""

_PHRASES: Final = {
    r"beside": "name the relation: in the same directory, in addition to, next to, sibling",
    r"(?:it|they|that|which|files?|bytes|data|arrays?|objects?|chunks?) (?:stands?|lies?)": "is, are",
    r"(?:lie|lies|stand|stands) in": "is in, are in",
    r"nobody": "no process, no reader, or an active sentence",
    r"(?:is|are|was|were|be|been) (?:told|heard of|heard|looked at)": "name who reports what",
    r"(?:go|goes|went|gone) on with": "resume, continue",
    r"(?:is|are|was|were) there by now": "exists",
    r"in vain": "needlessly, without success",
    r"rehears\w+": "dry run",
    r"dead saves?|saves? that died": "failed save",
    r"errands?": "task",
    r"anew": "again",
    r"made of what": "computed from",
    r"what (?:is|was) there": "the existing",
}
"""Phrases by regular expression, and what to write instead. Matched as whole words, in any case."""

_NAMES: Final = {
    "Described": "CommitInfo",
    "Unit": "LeafRead",
    "Opened": "Checkpoint",
    "Holding": "CapturedState",
    "Sightings": "LeaseObserver",
    "Occupant": "ExistingTarget",
    "occupants": "target",
    "HoldsOfSteps": "StepLocks",
    "holds": "locks",
    "errands": "parallel",
    "Crew": "WorkerPool",
    "Taker": "Destination",
    "TileRead": "ChunkRead",
    "Trailer": "InlineChecksum",
    "MarkedObject": "BlockCache",
    "KeptObject": "BlockCache",
    "LastBlock": "BlockCache",
    "NearObject": "BlockCache",
    "rehearsals": "dry_run",
    "imagined": "SimulatedJob",
    "telling": "wire",
    "emptiness": "SizeOnlySnapshot",
    "Tries": "ConsistentRead",
    "while_unchanged": "retry_if_replaced",
    "Looks": "EmulatedConditionalPuts",
    "made": "elementwise, or a noun for the result",
    "placed": "views",
    "narrowed": "cast",
    "Draft": "TreeRewriter",
    "cells": "box_partition",
    "unions": "tree_merge",
    "sharing": "replica_split",
    "near_names": "suggestions",
    "amounts": "sizes",
    "About": "CheckpointInfo",
    "MarksCheckpoints": "write_metadata_files",
    "Moment": "SaveContext",
    "Cleaner": "DeletionQueue",
    "utils": "a noun for what is in it",
    "common": "a noun for what is in it",
    "helpers": "a noun for what is in it",
    "misc": "a noun for what is in it",
}
"""Names of modules, classes and functions, without leading underscores, and better ones."""

_OPENINGS: Final = ("How", "Let", "Say", "That", "What", "Where", "Whether")
"""Words that must not begin a docstring."""

EXCEPTIONS: Final[dict[str, str]] = {}
"""Accepted findings: the reason by ``file: text``. At most 20."""

_PHRASE: Final = {re.compile(rf"\b(?:{phrase})\b", re.IGNORECASE): better for phrase, better in _PHRASES.items()}

_ANY_PHRASE: Final = re.compile(rf"\b(?:{'|'.join(_PHRASES)})\b", re.IGNORECASE)


class Finding(NamedTuple):
    """A place to reword.

    Attributes:
        path: the file.
        line: its line, from 1.
        text: the word or name.
        better: what to write instead.
    """

    path: Path
    line: int
    text: str
    better: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text!r}: write {self.better}"


def check_python(path: Path, source: str) -> Iterator[Finding]:
    """Check the comments, strings and defined names of a Python file."""
    if path.stem in _NAMES:
        yield Finding(path, 1, path.stem, _NAMES[path.stem])
    is_test = "tests" in path.parts
    docstrings: set[tuple[int, int]] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not is_test:
            name = node.name.lstrip("_")
            if name in _NAMES:
                yield Finding(path, node.lineno, node.name, _NAMES[name])
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.add((node.lineno, node.col_offset))
            first = node.value.value.split(maxsplit=1)[:1]
            if first and first[0] in _OPENINGS:
                yield Finding(path, node.lineno, first[0], "a verb or a noun first")
    if not _ANY_PHRASE.search(source):
        return  # most files: to tokenize all takes longer than the rest
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_data = is_test and token.start not in docstrings
        if token.type == tokenize.COMMENT or (token.type in (tokenize.STRING, _FSTRING_MIDDLE) and not is_data):
            yield from _check_text(path, token.start[0], token.string)


def check_markdown(path: Path, source: str) -> Iterator[Finding]:
    """Check the text of a page outside of blocks of code."""
    is_code = False
    lines: list[str] = []
    for line in source.splitlines():
        if line.lstrip().startswith(("```", "~~~")):
            is_code = not is_code
        lines.append("" if is_code else re.sub(r"`[^`]*`", "", line))
    yield from _check_text(path, 1, "\n".join(lines))


_FSTRING_MIDDLE: Final = getattr(tokenize, "FSTRING_MIDDLE", -1)
"""Literal text of an f-string: a token from Python 3.12 on; before, the f-string is one STRING."""


def _check_text(path: Path, line: int, text: str) -> Iterator[Finding]:
    for phrase, better in _PHRASE.items():
        for match in phrase.finditer(text):
            yield Finding(path, line + text.count("\n", 0, match.start()), match[0], better)


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            for file in sorted([*path.rglob("*.py"), *path.rglob("*.md")]):
                skipped = any(part in _SKIPPED or part.startswith(".") for part in file.parts)
                if not skipped and file != Path("tools/words.py"):
                    yield file
        else:
            yield path


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the findings; return 1 if there are any."""
    given = sys.argv[1:] if arguments is None else arguments
    count = 0
    for path in _files(map(Path, given or _PATHS)):
        source = path.read_text(encoding="utf-8")
        for finding in (check_python if path.suffix == ".py" else check_markdown)(path, source):
            if f"{path}: {finding.text}" not in EXCEPTIONS:
                count += 1
                print(finding)
    if count:
        print(f"{count} words to replace; see docs/reference/glossary.md", file=sys.stderr)
    return int(bool(count))


if __name__ == "__main__":
    raise SystemExit(main())
