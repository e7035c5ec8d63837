"""``ckptcore diff``: compares two checkpoints."""

from __future__ import annotations

import json
from typing import Final

import click

from ckptcore.model import JSON
from ckptcore_tools.cli.command import ExitCode, checkpoint_command, command_context
from ckptcore_tools.cli.output import UNSET, byte_progress, print_document, print_line, printable
from ckptcore_tools.comparison import diff
from ckptcore_tools.differences import Difference, Differences
from ckptcore_tools.elements import WorstElement
from ckptcore_tools.formatting import format_count, format_size

_MARKS: Final = {"only_in_a": ("-", "red"), "only_in_b": ("+", "green")}


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
    with byte_progress("comparing") as progress:
        differences = diff(
            a, b, absolute=atol, relative=rtol, values=not no_values, progress=progress, context=command_context()
        )
    if as_json:
        print_document(
            "diff",
            a=a,
            b=b,
            same=not differences,
            leaves_compared=differences.leaves,
            nbytes_compared=differences.nbytes,
            files_compared=differences.files or UNSET,
            differences=[_document(difference) for difference in differences],
        )
    else:
        _print(differences)
    return ExitCode.FOUND if differences else ExitCode.OK


def _document(difference: Difference) -> dict[str, object]:
    document: dict[str, object] = {
        "path": difference.path,
        "keys": difference.keys,
        "kind": difference.kind,
        "a": difference.a,
        "b": difference.b,
        "checkpointable": difference.checkpointable or UNSET,
    }
    distance = difference.distance
    if distance is not None and difference.elements:
        document |= {"differing": distance.differing, "elements": difference.elements}
    if distance is not None and difference.kind != "bytes":
        worst = [_worst_document(element) for element in distance.worst]
        document |= {"max_absolute_error": distance.largest, "norm": distance.norm, "worst": worst or UNSET}
    return document


def _worst_document(worst: WorstElement) -> dict[str, object]:
    sides = {"a": worst.a, "b": worst.b}
    numbers = {name: str(side) if isinstance(side, complex) else side for name, side in sides.items()}
    return {"index": worst.position, **numbers, "error": worst.error}


def _print(differences: Differences) -> None:
    for difference in differences:
        mark, style = _MARKS.get(difference.kind, ("~", "yellow"))
        print_line((f"{mark} {printable(_path_text(difference))}", style), "  ", printable(_explanation(difference)))
    compared = f"{format_count(differences.leaves, 'leaf', 'leaves')}, {format_size(differences.nbytes)} of elements"
    if differences.files:
        compared = f"{format_count(differences.leaves, 'leaf', 'leaves')}, {format_count(differences.files, 'file')}, "
        compared += f"{format_size(differences.nbytes)} of elements and files"
    if differences:
        print_line((format_count(len(differences), "difference"), "bold red"), f": {compared} compared")
    else:
        print_line(("the same", "bold green"), f": {compared} compared")


def _path_text(difference: Difference) -> str:
    if not difference.checkpointable:
        return difference.path
    # A difference of a whole checkpointable has no keys.
    return difference.checkpointable + (f": {difference.path}" if difference.keys else "")


def _explanation(difference: Difference) -> str:
    kind = difference.kind
    if kind == "only_in_a":
        return f"only in A: {difference.a}"
    if kind == "only_in_b":
        return f"only in B: {difference.b}"
    text = "" if difference.a is None else f"{kind}: {_short(difference.a)} -> {_short(difference.b)}"
    if kind == "size":
        text += " bytes"
    distance = difference.distance
    if distance is None or not distance.differing:
        return text
    if difference.elements:
        unit = "byte" if kind == "bytes" else "element"
        text += f"{'; ' if text else ''}{distance.differing:,} of {format_count(difference.elements, unit)} differ"
    if distance.largest is not None:
        text += f", max abs error {distance.largest:.6g}"
    return text


def _short(value: JSON) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:79] + "…"
