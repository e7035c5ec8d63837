"""``ckptcore diff``: compares two checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal

import click

from ckptcore.model import JSON, format_path
from ckptcore_tools.cli.command import ExitCode, checkpoint_command
from ckptcore_tools.cli.comparison import Difference, FilesComparison, Side, TreeComparison
from ckptcore_tools.cli.elements import Tolerance
from ckptcore_tools.cli.locations import describe_directories
from ckptcore_tools.cli.output import UNSET, byte_progress, print_document, print_line, printable
from ckptcore_tools.formatting import format_count, format_size

if TYPE_CHECKING:
    from ckptcore.results import CheckpointMetadata

__all__ = ["command"]

_MARKS: Final = {"only_in_a": ("-", "red"), "only_in_b": ("+", "green")}
_FILES: Final = "files"
"""The layout of files that a checkpointable wrote itself."""


@checkpoint_command("diff", "Compare two checkpoints.")
@click.argument("a")
@click.argument("b")
@click.option("--atol", type=click.FloatRange(min=0), default=0.0, help="Absolute tolerance of elements.")
@click.option("--rtol", type=click.FloatRange(min=0), default=0.0, help="Relative tolerance, of the element in B.")
@click.option("--no-values", is_flag=True, help="Compare structure, dtypes and shapes only. Read no arrays or files.")
def command(as_json: bool, a: str, b: str, atol: float, rtol: float, no_values: bool) -> ExitCode:
    """Compare checkpoints A and B: structure, dtypes, shapes, and values with the largest absolute error.

    The checkpoints may have different layouts and frameworks. Several checkpointables are compared by name, and their
    files byte by byte. Without --atol and --rtol, elements are equal if their bits are equal. About 64 MiB of each
    checkpoint are in memory at a time. If the checkpoints differ, the exit code is 1.
    """
    comparison = _CheckpointComparison(describe_directories(a), describe_directories(b), Tolerance(atol, rtol))
    differences = list(comparison.structure_differences(with_dtypes=no_values))
    if not no_values:
        with byte_progress("comparing") as progress:
            differences.extend(comparison.content_differences(progress))
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


class _CheckpointComparison:
    """Comparison of two checkpoints, each of one tree or of several checkpointables."""

    def __init__(
        self,
        a: Mapping[str, tuple[str, CheckpointMetadata]],
        b: Mapping[str, tuple[str, CheckpointMetadata]],
        tolerance: Tolerance,
    ) -> None:
        self._a = {directory: found for directory, (_, found) in a.items()}
        self._b = {directory: found for directory, (_, found) in b.items()}
        self._trees: dict[str, TreeComparison] = {}
        self._files: dict[str, FilesComparison] = {}
        for directory in a.keys() & b.keys():
            (location_a, found_a), (location_b, found_b) = a[directory], b[directory]
            if found_a.layout == found_b.layout == _FILES:
                self._files[directory] = FilesComparison(location_a, location_b)
            elif _FILES not in (found_a.layout, found_b.layout):
                sides = Side(location_a, found_a.tree), Side(location_b, found_b.tree)
                self._trees[directory] = TreeComparison(*sides, tolerance)

    @property
    def leaves(self) -> int:
        """Number of leaves that both have."""
        return sum(comparison.leaves for comparison in self._trees.values())

    @property
    def files(self) -> int:
        """Number of files that both have."""
        return sum(comparison.files for comparison in self._files.values())

    @property
    def nbytes(self) -> int:
        """Number of bytes of `a` that `content_differences` compares."""
        return sum(comparison.nbytes for _, comparison in self._comparisons())

    def structure_differences(self, *, with_dtypes: bool) -> Iterator[Difference]:
        """Yield the differences that can be found without reading arrays or files."""
        a, b = self._a, self._b
        if ("" in a) != ("" in b):
            yield _root_difference("structure", _kind_of_checkpoint(a), _kind_of_checkpoint(b))
            return
        for directory, found in a.items():
            if directory not in b:
                yield _in_checkpointable(directory, _root_difference("only_in_a", _kind(found), None))
            elif directory in self._trees:
                for difference in self._trees[directory].structure_differences(with_dtypes=with_dtypes):
                    yield _in_checkpointable(directory, difference)
            elif directory in self._files:
                for difference in self._files[directory].structure_differences():
                    yield _in_checkpointable(directory, difference)
            else:
                kinds = _kind(found), _kind(b[directory])
                yield _in_checkpointable(directory, _root_difference("structure", *kinds))
        for directory, found in b.items():
            if directory not in a:
                yield _in_checkpointable(directory, _root_difference("only_in_b", None, _kind(found)))

    def content_differences(self, progress: Callable[[int, int], None]) -> Iterator[Difference]:
        """Yield the differences between elements and between the bytes of files.

        Args:
            progress: called with compared bytes of `a` and total bytes.
        """
        before, total = 0, self.nbytes
        for directory, comparison in self._comparisons():

            def report(done: int, _: int, before: int = before) -> None:
                progress(before + done, total)

            for difference in comparison.content_differences(report):
                yield _in_checkpointable(directory, difference)
            before += comparison.nbytes

    def _comparisons(self) -> Iterator[tuple[str, TreeComparison | FilesComparison]]:
        for directory in self._a:
            if directory in self._trees:
                yield directory, self._trees[directory]
            elif directory in self._files:
                yield directory, self._files[directory]


def _kind_of_checkpoint(directories: Mapping[str, object]) -> str:
    return "one tree" if "" in directories else f"checkpointables {', '.join(directories)}"


def _kind(found: CheckpointMetadata) -> str:
    return "files" if found.layout == _FILES else "tree"


def _root_difference(kind: Literal["structure", "only_in_a", "only_in_b"], a: JSON, b: JSON) -> Difference:
    return Difference(format_path(()), (), kind, a, b)


def _in_checkpointable(directory: str, difference: Difference) -> Difference:
    return replace(difference, checkpointable=directory) if directory else difference


def _print(differences: Sequence[Difference], leaves: int, files: int, nbytes: int) -> None:
    for difference in differences:
        mark, style = _MARKS.get(difference.kind, ("~", "yellow"))
        print_line((f"{mark} {printable(_path_text(difference))}", style), "  ", printable(_explanation(difference)))
    compared = f"{format_count(leaves, 'leaf', 'leaves')}, {format_size(nbytes)} of elements"
    if files:
        compared = f"{format_count(leaves, 'leaf', 'leaves')}, {format_count(files, 'file')}, "
        compared += f"{format_size(nbytes)} of elements and files"
    if differences:
        print_line((format_count(len(differences), "difference"), "bold red"), f": {compared} compared")
    else:
        print_line(("the same", "bold green"), f": {compared} compared")


def _path_text(difference: Difference) -> str:
    if difference.checkpointable is UNSET:
        return difference.path
    # A difference of a whole checkpointable has no keys.
    return f"{difference.checkpointable}" + (f": {difference.path}" if difference.keys else "")


def _explanation(difference: Difference) -> str:
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
        text += f"{'; ' if text else ''}{differing:,} of {format_count(elements, unit)} differ"
    if largest is not UNSET and largest is not None and (differing is UNSET or differing):
        text += f", max abs error {largest:.6g}"
    return text


def _short(value: JSON) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:79] + "…"
