"""Differences between an abstract tree and the stored tree, and the error that lists them with their remedies."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from ckptcore.errors import TreeMismatchError
from ckptcore.model.tree import format_path
from ckptcore.records import NamedTuple, dataclass

_SHOWN: Final = 30
"""Maximum number of differences in the text of an error. `TreeMismatchError.differences` has all."""

_PARTS: Final = 3
"""Maximum number of parts of a tree that the text of an error names."""

_NAMES: Final = 5
"""Maximum number of transforms, and of names in a selection, in the text of an error."""

_LONGEST: Final = 600
"""Maximum length of a line, in characters."""

_ALLOW_MORE: Final = ("truncating", "narrowing", "placeholder")
"""Choices that include weaker choices of the same option: "truncating" includes "narrowing", and both include "safe";
"placeholder" includes "keep". The first one that is needed is proposed."""

_LOSSES: Final = {
    "keep": "missing leaves keep their present values",
    "placeholder": "missing leaves become PLACEHOLDER",
    "ignore": "unexpected leaves are not loaded",
    "narrowing": "numbers are rounded",
    "truncating": "fractions are dropped",
    "truncate": "elements outside of the requested shape are not loaded",
    "pad": "elements that are not stored become pad_value",
}
"""By choice, the loss that a message states."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """An option of `ckptcore.Matching` that allows a difference.

    Attributes:
        option: its name.
        choices: its value; one or several for `shapes`.
    """

    option: str
    choices: Sequence[str]


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference.

    Attributes:
        sort: the kind of difference: missing, unexpected, moved, key, sequence, kind, shape, dtype or value.
        line: a message with the path, the requested and the stored form.
        allowed_by: the option that allows it; None if no option does.
        renamed: the arguments of a ``Rename`` that resolves it, if any.
    """

    sort: str
    line: str
    allowed_by: Remedy | None = None
    renamed: tuple[str, str] | None = None


class PartNames(NamedTuple):
    """Names of parts for a message that explains how to load or keep them.

    Attributes:
        kept: the requested parts that are not stored; the whole tree if none of its leaves is stored.
        lost: the parts that must not keep all of their present values, because none of their leaves is stored; see
            `match_leaves`.
        elsewhere: the parts that would not be loaded, but are stored under another path.
        misshapen: names of the stored leaves that a selection can leave out, because their shapes differ from those of
            requested objects.
        quantized: a description of one quantised array, if any is stored.
    """

    kept: Sequence[str]
    lost: Sequence[str]
    elsewhere: Sequence[str]
    misshapen: Sequence[str]
    quantized: str | None


def mismatch(display: str, differences: Sequence[Difference], parts: PartNames) -> TreeMismatchError:
    """Return the error for one or more differences of a checkpoint.

    The message shows some differences of each sort; the attribute `differences` has all of them.
    """
    by_sort: dict[str, list[Difference]] = {}
    for difference in differences:
        by_sort.setdefault(difference.sort, []).append(difference)
    shown: list[str] = []
    for sort, count in _shares({sort: len(of_sort) for sort, of_sort in by_sort.items()}).items():
        of_sort = by_sort[sort]
        shown.extend([f"\n  {_shorten(difference.line)}" for difference in of_sort[:count]])
        if len(of_sort) > count:
            shown.append(f"\n  and {len(of_sort) - count} more: {sort}")
    counted = ""
    if len(differences) > _SHOWN:
        counts = ", ".join([f"{len(of_sort)} {sort}" for sort, of_sort in by_sort.items()])
        counted = f" ({len(differences)} differences: {counts})"
    return TreeMismatchError(
        f"{display} does not match the requested tree{counted}:{''.join(shown)}\n"
        "Change the requested tree to match the stored one (metadata(location).abstract), or use PLACEHOLDER for parts "
        f"that are not to be loaded{_ways_on(differences, by_sort, parts)}",
        [difference.line for difference in differences],
    )


def _ways_on(differences: Sequence[Difference], sorts: Collection[str], parts: PartNames) -> str:
    """Return the transforms and the options that resolve differences, and state which data the options lose."""
    kept, lost, elsewhere, misshapen, quantized = parts
    ways: list[str] = []
    if quantized is not None:
        ways.append(
            f"Weights are quantised ({quantized}): to load them as numbers, pass "
            "transforms=[DequantizeAsConfigured()] or [Dequantize(...)] of ckptcore.transforms"
        )
    if misshapen:
        names = ", ".join(map(repr, misshapen[:_NAMES]))
        others = f" (and {len(misshapen) - _NAMES} more)" if len(misshapen) > _NAMES else ""
        ways.append(
            "To load an object without what has another shape there, so that it keeps its present values, pass "
            f"select=~ckptcore.select.names({names}){others}"
        )
    moved = [difference for difference in differences if difference.renamed is not None]
    if moved:
        names = ", ".join([f"Rename{difference.renamed}" for difference in moved[:_NAMES]])
        others = f", and a Rename for each of {len(moved) - _NAMES} more" if len(moved) > _NAMES else ""
        keys = ' and matching=Matching(keys="text")' if any(move.allowed_by is not None for move in moved) else ""
        ways.append(f"Load what moved with transforms=[{names}] of ckptcore.transforms{others}{keys}")
        if elsewhere:
            ways.append(f"To keep the present values of {_some(elsewhere)} instead, put PLACEHOLDER in its place")
    if lost:
        way = "if only the names differ, pass transforms=[Rename(stored, requested)] of ckptcore.transforms"
        if format_path(()) not in lost:
            ways.append(
                f"No leaf of {_some(lost)} is stored: {way}; to keep its present values, put PLACEHOLDER in its place"
            )
        elif "missing" in sorts:
            ways.append(
                f"No requested leaf is stored: load another checkpoint{f', or, {way}' * ('unexpected' in sorts)}"
            )
    elif any(difference.allowed_by is not None and difference.renamed is None for difference in differences):
        remedies = [difference.allowed_by for difference in differences if difference.allowed_by is not None]
        losses = [loss for choice, loss in _LOSSES.items() if any(choice in remedy.choices for remedy in remedies)]
        way = f"To allow intended differences, pass matching=Matching({_options(remedies)})"
        if losses:
            way += f": {', '.join(losses)}"
        if kept:
            way += f"\nWith it, {_some(kept)} would start again"
        ways.append(way)
        if not moved and {"missing", "unexpected"} <= set(sorts):
            ways.append(
                "Load leaves that only have other names with transforms=[Rename(stored, requested)] of "
                "ckptcore.transforms instead"
            )
    return "".join([f". {way}" for way in ways])


def _some(parts: Sequence[str]) -> str:
    return ", ".join(parts[:_PARTS]) + (f" and {len(parts) - _PARTS} more" if len(parts) > _PARTS else "")


def _options(remedies: Sequence[Remedy]) -> str:
    """Return the options that allow all differences, as Python code."""
    by_option: dict[str, list[str]] = {}
    for remedy in remedies:
        by_option.setdefault(remedy.option, []).extend(remedy.choices)
    return ", ".join([f"{option}={_value(option, choices)}" for option, choices in by_option.items()])


def _value(option: str, choices: Sequence[str]) -> str:
    """Return the value of an option that includes several choices, as Python code."""
    if option == "shapes":
        return "{" + ", ".join([f'"{choice}"' for choice in sorted(set(choices))]) + "}"
    return f'"{next((choice for choice in _ALLOW_MORE if choice in choices), choices[0])}"'


def _shorten(line: str) -> str:
    """Shorten a line: names may be hostile, and have any length."""
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST // 2]} ... {line[-_LONGEST // 2 :]}"


def _shares(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the number of differences of each sort to show, about equal for all sorts."""
    shares = dict.fromkeys(counts, 0)
    left = _SHOWN
    while left and (open_sorts := [sort for sort, count in counts.items() if shares[sort] < count]):
        for sort in open_sorts:
            added = min(counts[sort] - shares[sort], max(1, left // len(open_sorts)), left)
            shares[sort] += added
            left -= added
    return shares
