"""Write the page of where runs live, from the tests with the mark ``lives``.

    python -m tools.places            write docs/reference/where-runs-live.md
    python -m tools.places --check    only compare it

A test adds a row by a mark with four literal texts: the file system or store, what was tried, what holds, and what is
weaker. In the second text, the version of ``constraints.txt`` is added to the name of a library:

    @pytest.mark.lives("S3", "moto", "everything", "nothing")

Tests are parsed and not imported.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from tools.brought import ROOT, files_with, literal_marks, pinned_versions, write_page

_PAGE: Final = ROOT / "docs/reference/where-runs-live.md"

_INTRODUCTION: Final = """\
# Where runs live

The file systems and stores that the tests save to, load from and run on. `python -m tools.places`
writes the table from the marks of the tests. A test is skipped with a message if the
rights or the kernel that it needs are missing.

The first save to a directory tests its file system: whether directories can be exchanged, and which
names it treats as equal. The first save to a bucket tests conditional puts. The results are kept for
the process. One line of the log says what is weaker.
[File systems](file-systems.md) has the details of each missing call, and
[Durability and integrity](../how-to/durability.md) says what a commit means.

| where | tried | what holds | what is weaker | test |
|---|---|---|---|---|
"""


class Row(NamedTuple):
    """A file system or a store."""

    place: str
    tried: str
    holds: str
    weaker: str
    test: str


def rows_of(file: str, source: str) -> Iterable[Row]:
    """Yield the rows of a file of tests.

    Raises:
        ValueError: an argument of a mark is not a literal, or there are not four.
    """
    for test, texts in literal_marks(file, source, "lives"):
        if len(texts) != 4 or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{test}: expected four texts, found {texts}")
        place, tried, holds, weaker = texts
        yield Row(place, tried, holds, weaker, test)


def written_page(rows: Iterable[Row], versions: Mapping[str, str]) -> str:
    """Return the page. `versions` has the versions of libraries by name, in lower case."""

    def with_version(match: re.Match[str]) -> str:
        version = versions.get(match[0].lower())
        return match[0] if version is None else f"{match[0]} {version}"

    lines = []
    for row in sorted(rows, key=lambda row: (row.place.lower(), row)):
        tried = re.sub(r"[\w-]+", with_version, row.tried)
        lines.append(f"| {row.place} | {tried} | {row.holds} | {row.weaker} | `{row.test}` |\n")
    return _INTRODUCTION + "".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Write or compare the page. Return 1 if it differs."""
    rows = [row for file in files_with("lives") for row in rows_of(file.name, file.read_text(encoding="utf-8"))]
    page = written_page(rows, pinned_versions((ROOT / "constraints.txt").read_text(encoding="utf-8")))
    return write_page(_PAGE, page, arguments, "tools.places")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
