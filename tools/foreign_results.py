"""Results of the tests of replaced libraries, and their tables in the design note."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final, TypeAlias

NOTE: Final = Path(__file__).parent.parent / "docs" / "design" / "replaced-libraries.md"
RESULTS: Final = NOTE.with_suffix(".json")

_NAMES: Final = {"orbax": "Orbax", "safetensors": "safetensors", "torch": "torch"}
_TABLE: Final = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of the table -->)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class FileResult:
    """The outcome of a test file.

    Attributes:
        sha256: the hash of the file.
        tests: number of tests that are not skipped.
        alone: how many pass with the library.
        replaced: how many of these pass with the replacement.
        reaching: how many tests call ckptcore through the replacement.
        calls: the number of these calls.
        failed: for each test that passes only with the library, by its name: the first line of the error with the
            replacement.
    """

    sha256: str
    tests: int
    alone: int
    replaced: int
    reaching: int
    calls: int
    failed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LibraryResults:
    """The results of a library.

    Attributes:
        version: the installed version.
        files: by path in the archive.
    """

    version: str
    files: Mapping[str, FileResult]


Results: TypeAlias = Mapping[str, LibraryResults]
"""The results by library."""


def read_results(path: Path = RESULTS) -> Results:
    """Return the stored results."""
    if not path.exists():
        return {}
    return {
        library: LibraryResults(stored["version"], {name: FileResult(**file) for name, file in stored["files"].items()})
        for library, stored in json.loads(path.read_text(encoding="utf-8")).items()
    }


def write_results(results: Results, path: Path = RESULTS) -> None:
    """Store results."""
    document = {library: asdict(results[library]) for library in sorted(results)}
    path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def fill_tables(note: str, results: Results) -> str:
    """Return the text of the note with a table at each of its marks. A library without results gets no table."""

    def filled(mark: re.Match[str]) -> str:
        table = f"{_table(mark[2], results[mark[2]])}\n" if mark[2] in results else ""
        return f"{mark[1]}\n{table}{mark[3]}"

    return _TABLE.sub(filled, note)


def _table(library: str, results: LibraryResults) -> str:
    name = _NAMES[library]
    root = _common_directory(results.files)
    short = {path.removeprefix(f"{root}/"): result for path, result in sorted(results.files.items())}
    lines = [
        f"With {name} {results.version}:",
        "",
        f"| file in `{root}` | tests | with {name} | with the replacement | tests that call ckptcore | calls |",
        "|---|---|---|---|---|---|",
    ]
    tested = {path: result for path, result in short.items() if result.calls and result.alone}
    for path, result in tested.items():
        lines.append(
            f"| `{path}` | {result.tests} | {result.alone} | {result.replaced} | {result.reaching} | {result.calls} |",
        )
    total = [
        sum(getattr(result, name) for result in tested.values()) for name in ("tests", "alone", "replaced", "reaching")
    ]
    lines.append(f"| all | {' | '.join(map(str, total))} | {sum(result.calls for result in tested.values())} |")
    for said, left in (
        (
            "These files do not call ckptcore through the replacement, so that they prove nothing",
            {path: result for path, result in short.items() if not result.calls and result.alone},
        ),
        (
            f"No test of these files passes with {name} on a machine without accelerators",
            {path: result for path, result in short.items() if not result.alone},
        ),
    ):
        if left:
            lines += ["", f"{said}:", "", *[f"- `{path}`, {_tests(result.tests)}" for path, result in left.items()]]
    return "\n".join(lines) + "\n"


def _tests(count: int) -> str:
    return "1 test" if count == 1 else f"{count} tests"


def _common_directory(files: Mapping[str, FileResult]) -> str:
    parents = [PurePosixPath(path).parent.parts for path in files]
    common = parents[0]
    for parts in parents[1:]:
        common = tuple([part for part, other in zip(common, parts, strict=False) if part == other])
    return "/".join(common)
