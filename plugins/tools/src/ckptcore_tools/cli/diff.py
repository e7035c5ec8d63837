"""``ckptcore diff``: how two checkpoints differ."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal

import click

from ckptcore.model import JSON, format_path
from ckptcore_tools.amounts import count, size
from ckptcore_tools.cli.command import ExitCode, checkpoint_command
from ckptcore_tools.cli.comparison import Comparison, Difference, FilesComparison, Side
from ckptcore_tools.cli.elements import Tolerance
from ckptcore_tools.cli.locations import describe_directories
from ckptcore_tools.cli.output import UNSET, byte_progress, print_document, print_line, printable

if TYPE_CHECKING:
    from ckptcore.results import CheckpointMetadata

__all__ = ["command"]

_MARKS: Final = {"only_in_a": ("-", "red"), "only_in_b": ("+", "green")}
_FILES: Final = "files"
"""The layout of what objects wrote themselves."""


@checkpoint_command("diff")
@click.argument("a")
@click.argument("b")
@click.option("--atol", type=click.FloatRange(min=0), default=0.0, help="Elements up to this far apart are equal.")
@click.option("--rtol", type=click.FloatRange(min=0), default=0.0, help="... and this share of the element in B.")
@click.option("--no-values", is_flag=True, help="Compare structure, dtypes and shapes only: no array or file is read.")
def command(as_json: bool, a: str, b: str, atol: float, rtol: float, no_values: bool) -> ExitCode:
    """Compare two checkpoints: structure, dtypes, shapes, and values with the largest absolute error.

    They may have different layouts and come from different frameworks. Several checkpointables are compared by their
    names, files that objects wrote byte by byte. Without --atol and --rtol, elements are equal if their bits are. Some
    64 MiB of each are in memory at a time. The exit code is 1 if they differ.
    """
    comparison = _Whole(describe_directories(a), describe_directories(b), Tolerance(atol, rtol))
    differences = list(comparison.of_structure(with_dtypes=no_values))
    if not no_values:
        with byte_progress("comparing") as progress:
            differences.extend(comparison.of_contents(progress))
    nbytes = 0 if no_values else comparison.nbytes
    if as_json:
        print_document(
            "diff",
            a=a,
            b=b,
            same=not differences,
            leaves_compared=comparison.leaves,
            nbytes_compared=nbytes,
            files_compared=comparison.files or UNSET,
            differences=differences,
        )
    else:
        _print(differences, comparison.leaves, comparison.files, nbytes)
    return ExitCode.FOUND if differences else ExitCode.OK


class _Whole:
    """Two checkpoints, each one tree or several checkpointables, compared part by part."""

    def __init__(
        self,
        a: Mapping[str, tuple[str, CheckpointMetadata]],
        b: Mapping[str, tuple[str, CheckpointMetadata]],
        tolerance: Tolerance,
    ) -> None:
        self._a = {directory: found for directory, (_, found) in a.items()}
        self._b = {directory: found for directory, (_, found) in b.items()}
        self._trees: dict[str, Comparison] = {}
        self._files: dict[str, FilesComparison] = {}
        for directory in a.keys() & b.keys():
            (place_a, found_a), (place_b, found_b) = a[directory], b[directory]
            if found_a.layout == found_b.layout == _FILES:
                self._files[directory] = FilesComparison(place_a, place_b)
            elif _FILES not in (found_a.layout, found_b.layout):
                sides = Side(place_a, found_a.tree), Side(place_b, found_b.tree)
                self._trees[directory] = Comparison(*sides, tolerance)

    @property
    def leaves(self) -> int:
        """How many leaves both have."""
        return sum(comparison.leaves for comparison in self._trees.values())

    @property
    def files(self) -> int:
        """How many files both have."""
        return sum(comparison.files for comparison in self._files.values())

    @property
    def nbytes(self) -> int:
        """How many bytes of `a` `of_contents` compares."""
        return sum(comparison.nbytes for _, comparison in self._parts())

    def of_structure(self, *, with_dtypes: bool) -> Iterator[Difference]:
        """Every difference that shows without reading an array or a file."""
        a, b = self._a, self._b
        if ("" in a) != ("" in b):
            yield _of_root("structure", _sort(a), _sort(b))
            return
        for directory, found in a.items():
            if directory not in b:
                yield _in(directory, _of_root("only_in_a", _kind(found), None))
            elif directory in self._trees:
                for difference in self._trees[directory].of_trees(with_dtypes=with_dtypes):
                    yield _in(directory, difference)
            elif directory in self._files:
                for difference in self._files[directory].of_names():
                    yield _in(directory, difference)
            else:
                yield _in(directory, _of_root("structure", _kind(found), _kind(b[directory])))
        for directory, found in b.items():
            if directory not in a:
                yield _in(directory, _of_root("only_in_b", None, _kind(found)))

    def of_contents(self, progress: Callable[[int, int], None]) -> Iterator[Difference]:
        """Every difference between elements and between files.

        Args:
            progress: called with bytes of `a` compared and bytes in all.
        """
        before, total = 0, self.nbytes
        for directory, comparison in self._parts():

            def moved(done: int, _: int, before: int = before) -> None:
                progress(before + done, total)

            for difference in comparison.of_contents(moved):
                yield _in(directory, difference)
            before += comparison.nbytes

    def _parts(self) -> Iterator[tuple[str, Comparison | FilesComparison]]:
        for directory in self._a:
            if directory in self._trees:
                yield directory, self._trees[directory]
            elif directory in self._files:
                yield directory, self._files[directory]


def _sort(found: Mapping[str, object]) -> str:
    return "one tree" if "" in found else f"checkpointables {', '.join(found)}"


def _kind(found: CheckpointMetadata) -> str:
    return "files" if found.layout == _FILES else "tree"


def _of_root(kind: Literal["structure", "only_in_a", "only_in_b"], a: JSON, b: JSON) -> Difference:
    return Difference(format_path(()), (), kind, a, b)


def _in(directory: str, difference: Difference) -> Difference:
    return replace(difference, checkpointable=directory) if directory else difference


def _print(differences: Sequence[Difference], leaves: int, files: int, nbytes: int) -> None:
    for difference in differences:
        mark, style = _MARKS.get(difference.kind, ("~", "yellow"))
        print_line((f"{mark} {printable(_where(difference))}", style), "  ", printable(_explained(difference)))
    compared = f"{count(leaves, 'leaf', 'leaves')}, {size(nbytes)} of elements"
    if files:
        compared = f"{count(leaves, 'leaf', 'leaves')}, {count(files, 'file')}, {size(nbytes)} of elements and files"
    if differences:
        print_line((count(len(differences), "difference"), "bold red"), f": {compared} compared")
    else:
        print_line(("the same", "bold green"), f": {compared} compared")


def _where(difference: Difference) -> str:
    if difference.checkpointable is UNSET:
        return difference.path
    # What is missing as a whole, or of another sort, is named by its name alone.
    return f"{difference.checkpointable}" + (f": {difference.path}" if difference.keys else "")


def _explained(difference: Difference) -> str:
    kind = difference.kind
    if kind == "only_in_a":
        return f"only in A: {difference.a}"
    if kind == "only_in_b":
        return f"only in B: {difference.b}"
    text = "" if difference.a is None else f"{kind}: {_short(difference.a)} -> {_short(difference.b)}"
    if kind == "size":
        text += " bytes"
    differing, elements, largest = difference.differing, difference.elements, difference.max_absolute_error
    if differing is not UNSET and elements is not UNSET and differing:
        unit = "byte" if kind == "bytes" else "element"
        text += f"{'; ' if text else ''}{differing:,} of {count(elements, unit)} differ"
    if largest is not UNSET and largest is not None and (differing is UNSET or differing):
        text += f", max abs error {largest:.6g}"
    return text


def _short(value: JSON) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:79] + "…"
