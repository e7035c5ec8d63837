"""``ckptcore diff``: how two checkpoints differ."""

from __future__ import annotations

import json
from typing import cast

import click

from ckptcore.cli.amounts import count, size
from ckptcore.cli.command import checkpoint_command
from ckptcore.cli.console import print_document, print_line, printable
from ckptcore.cli.documents import DiffDocument, DifferenceDocument
from ckptcore.cli.elements import Tolerance
from ckptcore.cli.exits import ExitCode
from ckptcore.cli.progress import byte_progress
from ckptcore.model import JSON

__all__ = ["command"]

_MARKS = {"only_in_a": ("-", "red"), "only_in_b": ("+", "green")}


@checkpoint_command("diff")
@click.argument("a")
@click.argument("b")
@click.option("--atol", type=click.FloatRange(min=0), default=0.0, help="Elements up to this far apart are equal.")
@click.option("--rtol", type=click.FloatRange(min=0), default=0.0, help="... and this share of the element in B.")
@click.option("--no-values", is_flag=True, help="Compare structure, dtypes and shapes only: no array is read.")
def command(as_json: bool, a: str, b: str, atol: float, rtol: float, no_values: bool) -> ExitCode:
    """Compare two checkpoints: structure, dtypes, shapes, and values with the largest absolute error.

    They may have different layouts and come from different frameworks. Without --atol and --rtol, elements are equal if
    their bits are. Some 64 MiB of each are in memory at a time. The exit code is 1 if they differ.
    """
    import ckptcore
    from ckptcore.cli.comparison import Comparison, Side

    comparison = Comparison(
        Side(a, ckptcore.metadata(a).tree), Side(b, ckptcore.metadata(b).tree), Tolerance(atol, rtol)
    )
    differences = list(comparison.of_trees(with_dtypes=no_values))
    if not no_values:
        with byte_progress("comparing") as progress:
            differences.extend(comparison.of_elements(progress))
    document: DiffDocument = {
        "schema": "ckptcore.diff/1",
        "a": a,
        "b": b,
        "same": not differences,
        "leaves_compared": comparison.leaves,
        "nbytes_compared": 0 if no_values else comparison.nbytes,
        "differences": differences,
    }
    if as_json:
        print_document(document)
    else:
        _print(document)
    return ExitCode.FOUND if differences else ExitCode.OK


def _print(document: DiffDocument) -> None:
    for difference in document["differences"]:
        mark, style = _MARKS.get(difference["kind"], ("~", "yellow"))
        print_line((f"{mark} {printable(difference['path'])}", style), "  ", printable(_explained(difference)))
    compared = (
        f"{count(document['leaves_compared'], 'leaf', 'leaves')}, {size(document['nbytes_compared'])} of elements"
    )
    if document["same"]:
        print_line(("the same", "bold green"), f": {compared} compared")
    else:
        print_line((count(len(document["differences"]), "difference"), "bold red"), f": {compared} compared")


def _explained(difference: DifferenceDocument) -> str:
    kind = difference["kind"]
    if kind == "only_in_a":
        return f"only in A: {difference['a']}"
    if kind == "only_in_b":
        return f"only in B: {difference['b']}"
    text = "" if difference["a"] is None else f"{kind}: {_short(difference['a'])} -> {_short(difference['b'])}"
    if difference.get("differing"):
        text += (
            f"{'; ' if text else ''}{difference['differing']:,} of {count(difference['elements'], 'element')} differ"
        )
    largest = difference.get("max_absolute_error")
    if largest is not None and difference.get("differing", 1):
        text += f", max abs error {float(cast(float, largest)):.6g}"
    return text


def _short(value: JSON) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:79] + "…"
