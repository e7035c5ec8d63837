"""Differences between an abstract tree and the stored one: adjusts arrays, or lists all differences in an error."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, get_args

import numpy as np

from ckptcore.context import Context
from ckptcore.derivations import Stored, accepts_kind_of, cast, cut, narrow, pad, reshape, truncate
from ckptcore.derivations.dtypes import float_values, has_all_values_of, is_narrowing, is_truncating
from ckptcore.errors import TreeMismatchError
from ckptcore.matching.moves import Move
from ckptcore.matching.options import Casting, LeafChange, Matching, ShapeChange
from ckptcore.matching.quantized_names import find_quantized, find_scales
from ckptcore.model.arrays import ArraySpec, Box, name_of_dtype
from ckptcore.model.metadata import ArrayRecord, LeafRecord, TreeMetadata
from ckptcore.model.tree import Attribute, Key, Node, Skeleton, TreePath, format_path, leaf_count
from ckptcore.opening.checkpoint import Checkpoint
from ckptcore.opening.derived import derive
from ckptcore.protocols import DerivedArray
from ckptcore.tree.suggestions import NameSuggestions

_SHOWN: Final = 30
"""Limit of differences in the text of an error. `TreeMismatchError.differences` has all."""

_PARTS: Final = 3
"""Limit of parts in the text of an error that would keep their present values."""

_NAMES: Final = 5
"""Limit of transforms, and of names in a selection, in the text of an error."""

_LONGEST: Final = 600
"""Limit of a line, in characters."""

_OPTIMIZERS: Final = (".nnx.training.optimizer.Optimizer", ".nnx.training.optimizer.ModelAndOptimizer")
"""The ends of the names of classes of Flax that have states of Optax as dicts, without their types."""

_SEQUENCES: Final = ("list", "tuple")

_ALLOW_MORE: Final = ("truncating", "narrowing", "placeholder")
"""Choices that also allow everything that the other choices of the same option allow."""

_CASTS: Final = get_args(Casting)
"""The choices for casts: each also allows the casts of the earlier ones."""

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

_PROPOSED_SHAPES: Final[tuple[frozenset[ShapeChange], ...]] = (frozenset(("reshape",)), frozenset(("truncate", "pad")))
"""Changes that may turn one shape into another, in the order in which they are proposed."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """An option of `ckptcore.Matching` that allows a difference.

    Attributes:
        option: its name.
        choice: its value; several for `shapes`.
    """

    option: str
    choice: str | frozenset[str]


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference.

    Attributes:
        sort: the kind of difference: missing, unexpected, key, sequence, kind, shape, dtype or value.
        line: a message with the path, the requested and the stored form.
        allowed_by: the option that allows it; None if no option does.
        renamed: the arguments of a ``Rename`` that resolves it, if any.
    """

    sort: str
    line: str
    allowed_by: Remedy | None = None
    renamed: tuple[str, str] | None = None


def mismatch(
    display: str,
    differences: Sequence[Difference],
    tree: TreeMetadata,
    kept: Sequence[str],
    lost: Sequence[str] = (),
    elsewhere: Sequence[str] = (),
    misshapen: Sequence[str] = (),
) -> TreeMismatchError:
    """Return the error for differences. Its message shows some of each sort; its attribute `differences` has all.

    Args:
        display: the location.
        differences: the differences, at least one.
        tree: the stored tree.
        kept: the names of the requested parts that are not stored; the whole tree if no leaf of it is.
        lost: the names of the parts of which a load must not keep everything; see `match_leaves`.
        elsewhere: the names of such parts that are stored under another path.
        misshapen: the names, for selections, of stored leaves that have another shape than those of objects.
    """
    by_sort: dict[str, list[Difference]] = {}
    for difference in differences:
        by_sort.setdefault(difference.sort, []).append(difference)
    shown: list[str] = []
    for sort, count in _shares({sort: len(found) for sort, found in by_sort.items()}).items():
        found = by_sort[sort]
        shown.extend([f"\n  {_shorten(difference.line)}" for difference in found[:count]])
        if len(found) > count:
            shown.append(f"\n  and {len(found) - count} more: {sort}")
    counted = dequantizing = ""
    if len(differences) > _SHOWN:
        counts = ", ".join([f"{len(found)} {sort}" for sort, found in by_sort.items()])
        counted = f" ({len(differences)} differences: {counts})"
    if (quantized := find_quantized(tree)) is not None:
        dequantizing = (
            f". Weights are quantised ({quantized}): to load them as numbers, pass "
            "transforms=[DequantizeAsConfigured()] or [Dequantize(...)] of ckptcore.transforms"
        )
    return TreeMismatchError(
        f"{display} does not match the requested tree{counted}:{''.join(shown)}\n"
        "Change the requested tree to match the stored one (metadata(location).abstract), or use PLACEHOLDER for parts "
        f"that are not to be loaded{dequantizing}{_ways_on(differences, by_sort, kept, lost, elsewhere, misshapen)}",
        [difference.line for difference in differences],
    )


def _ways_on(
    differences: Sequence[Difference],
    sorts: Collection[str],
    kept: Sequence[str],
    lost: Sequence[str],
    elsewhere: Sequence[str],
    misshapen: Sequence[str],
) -> str:
    """Return the transforms and the options that resolve differences, with what the options lose."""
    ways: list[str] = []
    if misshapen:
        names = ", ".join(map(repr, misshapen[:_NAMES]))
        others = f" (and {len(misshapen) - _NAMES} more)" if len(misshapen) > _NAMES else ""
        ways.append(
            "To load an object without what has another shape there, so that it keeps its present values, pass "
            f"select=~ckptcore.select.names({names}){others}"
        )
    moved = [found for found in differences if found.renamed is not None]
    if moved:
        names = ", ".join([f"Rename{found.renamed}" for found in moved[:_NAMES]])
        others = f", and a Rename for each of {len(moved) - _NAMES} more" if len(moved) > _NAMES else ""
        keys = ' and matching=Matching(keys="text")' if any(found.allowed_by is not None for found in moved) else ""
        ways.append(f"Load what moved with transforms=[{names}] of ckptcore.transforms{others}{keys}")
        if elsewhere:
            names = f"{', '.join(elsewhere[:_PARTS])}{_more(elsewhere)}"
            ways.append(f"To keep the present values of {names} instead, put PLACEHOLDER in its place")
    if lost:
        way = "if only the names differ, pass transforms=[Rename(stored, requested)] of ckptcore.transforms"
        if format_path(()) not in lost:
            names = f"{', '.join(lost[:_PARTS])}{_more(lost)}"
            ways.append(
                f"No leaf of {names} is stored: {way}; to keep its present values, put PLACEHOLDER in its place"
            )
        elif "missing" in sorts:
            ways.append(
                f"No requested leaf is stored: load another checkpoint{f', or, {way}' * ('unexpected' in sorts)}"
            )
    elif any(found.allowed_by is not None and found.renamed is None for found in differences):
        remedies = [found.allowed_by for found in differences if found.allowed_by is not None]
        losses = [text for choice, text in _LOSSES.items() if any(choice in _words(found) for found in remedies)]
        way = f"To allow intended differences, pass matching=Matching({_options(remedies)})"
        if losses:
            way += f": {', '.join(losses)}"
        if kept:
            way += f"\nWith it, {', '.join(kept[:_PARTS])}{_more(kept)} would start again"
        ways.append(way)
        if not moved and {"missing", "unexpected"} <= set(sorts):
            ways.append(
                "Load leaves that only have other names with transforms=[Rename(stored, requested)] of "
                "ckptcore.transforms instead"
            )
    return "".join([f". {way}" for way in ways])


def _more(parts: Sequence[str]) -> str:
    return f" and {len(parts) - _PARTS} more" if len(parts) > _PARTS else ""


def _options(remedies: Sequence[Remedy]) -> str:
    """Return the options that allow all differences, as Python code."""
    by_option: dict[str, list[str | frozenset[str]]] = {}
    for remedy in remedies:
        by_option.setdefault(remedy.option, []).append(remedy.choice)
    return ", ".join([f"{option}={_choice(choices)}" for option, choices in by_option.items()])


def _choice(choices: Sequence[str | frozenset[str]]) -> str:
    """Return the value that includes several choices, as Python code."""
    words = {word for choice in choices for word in _split(choice)}
    if not isinstance(choices[0], str):
        return "{" + ", ".join([f'"{word}"' for word in sorted(words)]) + "}"
    return f'"{next((word for word in _ALLOW_MORE if word in words), choices[0])}"'


def _words(remedy: Remedy) -> Collection[str]:
    return _split(remedy.choice)


def _split(choice: str | frozenset[str]) -> Collection[str]:
    return (choice,) if isinstance(choice, str) else choice


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


def key_differences(pairs: Sequence[tuple[str, str]]) -> Iterator[Difference]:
    """Yield the differences for requested and stored leaves whose keys have the same text.

    Args:
        pairs: the requested path and the stored one.
    """
    for requested, stored in pairs:
        line = f"key: {requested} is requested, {stored} is stored; their keys have the same text"
        yield Difference("key", line, Remedy("keys", "text"))


def moved_parts(moves: Sequence[Move]) -> Iterator[Difference]:
    """Yield the differences for parts that are stored under another path."""
    for move in moves:
        requested, stored = move.shown
        count = len(move.pairs)
        leaves = "" if move.is_leaf else f", with {count} {'leaf' if count == 1 else 'leaves'} of the same names"
        line = f"moved: {requested} is requested, {stored} is stored{leaves}"
        yield Difference("moved", line, Remedy("keys", "text") if move.has_index else None, move.names)


def structure_differences(
    requested: Collection[TreePath], stored: Collection[TreePath]
) -> Mapping[TreePath, Difference]:
    """Find leaves of one tree where the other one has a container. No option allows them, because that would lose it.

    Args:
        requested: the paths of requested leaves that are not stored.
        stored: the paths of stored leaves that are not requested.

    Returns:
        The difference by each of these paths. Paths of one container have one difference.
    """
    found: dict[TreePath, Difference] = {}
    lines: dict[TreePath, Difference] = {}
    for leaves, others, sorts in (
        (requested, stored, ("a leaf", "a container")),
        (stored, requested, ("a container", "a leaf")),
    ):
        known = set(leaves)
        for path in others:
            for length in range(1, len(path)):
                if (top := path[:length]) in known:
                    line = f"{format_path(top)}: kind: {sorts[0]} is requested, {sorts[1]} is stored"
                    found[path] = found[top] = lines.setdefault(top, Difference("kind", line))
    return found


def state_differences(
    requested: Skeleton, stored: Skeleton, absent: Collection[TreePath], unexpected: Collection[TreePath]
) -> Mapping[TreePath, Difference]:
    """Find states of another class, such as of another optimizer of the same library. No option allows them.

    Args:
        requested, stored: the containers.
        absent: the paths of requested leaves that are not stored, without attributes.
        unexpected: the paths of stored leaves that are not requested, without attributes.

    Returns:
        The difference by the path of each state with such leaves.
    """
    differing = {path[:length] for path in (*absent, *unexpected) for length in range(len(path))}
    found: dict[TreePath, Difference] = {}

    def visit(one: Skeleton, other: Skeleton, path: TreePath, shown: TreePath, inside: bool = False) -> None:
        if path not in differing or not isinstance(one, Node) or not isinstance(other, Node):
            return
        if _are_other_states(one, other):
            kinds = [str(node.type).rpartition(".")[2] for node in (one, other)]
            line = f"{format_path(shown)}: kind: a {kinds[0]} is requested, a {kinds[1]} is stored"
            found[path] = Difference("kind", line)
            return
        if one.type == other.type and str(one.type).endswith(_OPTIMIZERS):
            inside = True
        elif inside and (fields := _other_fields(one, other)) is not None:
            line = f"{format_path(shown)}: kind: a state with {fields[0]} is requested, one with {fields[1]} is stored"
            found[path] = Difference("kind", line)
            return
        # Below the fields of a state are the names of parameters.
        inside = inside and not (one.type is None and any(isinstance(key, str) for key in one.keys))
        children = {_plain(key): child for key, child in zip(other.keys, other.children, strict=True)}
        for key, child in zip(one.keys, one.children, strict=True):
            if _plain(key) in children:
                visit(child, children[_plain(key)], (*path, _plain(key)), (*shown, key), inside)

    visit(requested, stored, (), ())
    return found


def _are_other_states(one: Node, other: Node) -> bool:
    """Return True for states with leaves of two classes of one library, by the names of the classes.

    A program may rename its own classes.
    """
    names = one.type, other.type
    if None in names or not leaf_count(one) or not leaf_count(other):
        return False
    parts = [str(name).split(".") for name in names]
    is_state = all(len(part) > 1 and part[-1].endswith("State") for part in parts)
    return is_state and parts[0][0] == parts[1][0] != "__main__" and parts[0][-1] != parts[1][-1]


def _other_fields(one: Node, other: Node) -> tuple[str, str] | None:
    """Return the fields of two states without types if each lacks a field of the other one; None otherwise."""
    if one.type is not None or other.type is not None or not leaf_count(one) or not leaf_count(other):
        return None
    fields = [set(map(_plain, node.keys)) for node in (one, other)]
    if fields[0] <= fields[1] or fields[1] <= fields[0]:
        return None
    requested, stored = (", ".join(sorted(map(str, keys))) for keys in fields)
    return requested, stored


def missing_leaves(names: Sequence[str], unexpected: Sequence[str]) -> Iterator[Difference]:
    """Yield the differences for leaves that are not stored. Suggests unexpected leaves with similar names."""
    stored = NameSuggestions(unexpected)
    for name in names:
        near = stored.nearest(name)
        hint = "" if near is None else f"; did you mean {near}?"
        yield Difference("missing", f"missing: {name} is not stored{hint}", Remedy("missing", "keep"))


def unexpected_leaves(names: Sequence[str]) -> Iterator[Difference]:
    """Yield the differences for stored leaves that are not requested."""
    for name in names:
        line = f"unexpected: {name} is stored and not requested"
        yield Difference("unexpected", line, Remedy("unexpected", "ignore"))


def lost_scales(
    tree: TreeMetadata, changes: Mapping[int, LeafChange], loaded: Collection[int | None]
) -> Iterator[Difference]:
    """Yield the differences for quantised arrays that would be cast to wrong numbers, because no scales are requested.

    Args:
        tree: the stored tree.
        changes: by number of the stored leaf, the changes of arrays.
        loaded: the numbers of the stored leaves that are requested.
    """
    for number, scales in find_scales(tree):
        change = changes.get(number)
        if change is not None and change.cast != "error" and scales not in loaded:
            path, additional = (format_path(tree.paths[one]) for one in (number, scales))
            reason = f"{change.stored} is quantised: a cast would ignore its scales, {additional}"
            yield Difference("dtype", f"{path}: dtype: {reason}")


def container_differences(requested: Skeleton, stored: Skeleton) -> list[Difference]:
    """Find differences between lists and tuples, and between empty dicts and empty sequences, in either direction.

    Keys are matched as in `match_leaves`. Containers with children are compared by their leaves.
    """
    found: list[Difference] = []
    _compare(requested, stored, (), found)
    return found


def _compare(requested: Skeleton, stored: Skeleton, path: TreePath, found: list[Difference]) -> None:
    if not isinstance(requested, Node) or not isinstance(stored, Node):
        return
    # An object matches a dict or a list, because it becomes one if it is loaded without its class.
    empty = not requested.keys and not stored.keys and "object" not in (requested.kind, stored.kind)
    if {requested.kind, stored.kind} == {"list", "tuple"}:
        line = f"{format_path(path)}: sequence: a {requested.kind} is requested, a {stored.kind} is stored"
        found.append(Difference("sequence", line, Remedy("sequences", "either")))
    elif empty and (requested.kind in _SEQUENCES) != (stored.kind in _SEQUENCES):
        line = f"{format_path(path)}: kind: an empty {requested.kind} is requested, an empty {stored.kind} is stored"
        found.append(Difference("kind", line))
    if not any(isinstance(child, Node) for child in requested.children):
        return
    exact = dict(zip(stored.keys, stored.children, strict=True))
    loose = {_plain(key): child for key, child in exact.items()}
    for key, child in zip(requested.keys, requested.children, strict=True):
        other = exact.get(key, loose.get(_plain(key)))
        if other is not None:
            _compare(child, other, (*path, key), found)


def _plain(key: Key) -> Key:
    return key.name if isinstance(key, Attribute) else key


def adjust(path: str, requested: ArraySpec, stored: ArraySpec, matching: Matching) -> LeafChange | list[Difference]:
    """Find the change from a stored array to the requested one. Returns all differences if there is none.

    Args:
        path: the path of the array, for messages.
        requested, stored: different specs of plain arrays.
        matching: the allowed differences.
    """
    both = f"{requested} is requested, {stored} is stored"
    refused: list[Difference] = []
    shapes = _shape_changes(requested.shape, stored.shape, matching)
    if shapes is None:
        remedy = _remedy(requested.shape, stored.shape, matching)
        refused.append(Difference("shape", f"{path}: shape: {both}", remedy))
    casting = _casting(requested.dtype, stored.dtype)
    if casting is None:
        refused.append(Difference("dtype", f"{path}: dtype: {both}; no cast from {stored.dtype} to {requested.dtype}"))
    elif _CASTS.index(casting) > _CASTS.index(matching.cast):
        why = "casts are not allowed by default"
        if casting == "truncating" and matching.cast != "error":
            why = f"{requested.dtype} has no fractions"
        elif matching.cast == "safe":
            why = f"{requested.dtype} cannot represent every value of {stored.dtype}"
        refused.append(Difference("dtype", f"{path}: dtype: {both}; {why}", Remedy("cast", casting)))
    if refused or shapes is None or casting is None:
        return refused
    change = LeafChange(stored, requested, casting, shapes, matching.pad_value if "pad" in shapes else None)
    try:
        made = _make(Stored(stored, 0), change)
    except ValueError as error:  # the dtype cannot represent the pad value
        return [Difference("shape", f"{path}: shape: {both}; {error}")]
    return replace(change, loaded=made.spec)


def _remedy(requested: tuple[int, ...], stored: tuple[int, ...], matching: Matching) -> Remedy | None:
    """Return the option that allows the change of a shape and keeps elements; None if no option does."""
    if (0 in requested) != (0 in stored):
        return None
    for shapes in _PROPOSED_SHAPES:
        changes = _shape_changes(requested, stored, replace(matching, shapes=shapes))
        if changes is not None:
            return Remedy("shapes", frozenset(changes))
    return None


def _shape_changes(
    requested: tuple[int, ...], stored: tuple[int, ...], matching: Matching
) -> frozenset[ShapeChange] | None:
    """Return the changes from a stored to a requested shape; None if they are not allowed."""
    needed: set[ShapeChange] = set()
    if requested == stored:
        return frozenset()
    if "reshape" in matching.shapes and ArraySpec(requested, "bool").size == ArraySpec(stored, "bool").size:
        return frozenset(("reshape",))
    if len(requested) != len(stored):
        return None
    for new, old in zip(requested, stored, strict=True):
        if new != old:
            needed.add("truncate" if new < old else "pad")
    return frozenset(needed) if needed <= set(matching.shapes) else None


def _casting(requested: str, stored: str) -> Casting | None:
    """Return the cast from a stored to a requested dtype; None if there is none."""
    if requested == stored:
        return "error"
    if has_all_values_of(requested, stored):
        return "safe"
    if is_truncating(requested, stored):
        return "truncating"
    return "narrowing" if is_narrowing(requested, stored) else None


def _make(stored: DerivedArray, change: LeafChange) -> DerivedArray:
    """Derive the requested array.

    Raises:
        ValueError: its dtype cannot represent the pad value.
    """
    made, requested = stored, change.loaded
    if "reshape" in change.shapes:
        made = reshape(made, requested.shape)
    if "truncate" in change.shapes:
        made = cut(made, Box.whole(tuple(map(min, requested.shape, made.spec.shape))))
    if change.cast != "error":
        made = {"safe": cast, "narrowing": narrow, "truncating": truncate}[change.cast](made, requested.dtype)
    if change.pad_value is not None:
        before = (0,) * len(requested.shape)
        after = [new - old for new, old in zip(requested.shape, made.spec.shape, strict=True)]
        _check_pad_value(requested.dtype, change.pad_value)
        made = pad(made, before, after, change.pad_value)
    return made


def _check_pad_value(dtype: str, value: bool | complex) -> None:
    """Check that a dtype can represent a value; dtypes of floats may round it.

    Raises:
        ValueError
    """
    given = np.asarray(value)
    name = name_of_dtype(given.dtype)
    if not accepts_kind_of(dtype, name) and not dtype == name == "bool":
        raise ValueError(f"{dtype} cannot represent pad_value={value!r}")
    if float_values(dtype) is not None and dtype != name:
        one = narrow(Stored(ArraySpec((), name), 0), dtype)
        one.make(Box((), ()), [given], np.empty((), ArraySpec((), dtype).numpy_dtype))


def adjusted(opened: Checkpoint, changes: Mapping[int, LeafChange], context: Context) -> Checkpoint:
    """Return a derived checkpoint with adjusted arrays.

    Tied leaves stay tied if they have the same change.

    Args:
        opened: the checkpoint.
        changes: by leaf number, the change of its array.
        context: limits memory.
    """
    tree = opened.tree
    # Arrays of transforms are adjusted in the same step, so that both are computed in the same pieces.
    below = opened.derived if opened.derived is not None and not opened.derived.is_builtin else None
    leaves: list[LeafRecord] = list(tree.leaves)
    derivations: dict[int, DerivedArray] = {}
    aliases: dict[int, int] = {}
    first: dict[tuple[int, LeafChange | None], int] = {}
    described: dict[int, tuple[int, str]] = {}
    for number, record in enumerate(tree.leaves):
        if not isinstance(record, ArrayRecord):
            continue
        original = tree.aliases.get(number, number)
        change = changes.get(number)
        if change is not None:
            leaves[number] = record._replace(spec=change.loaded, cuts=None)
        if (same := first.setdefault((original, change), number)) != number:
            aliases[number] = same
            continue
        described[number] = original, "" if change is None else str(change)
        before = Stored(record.spec, original) if below is None else below.derivations[original]
        derivations[number] = before if change is None else _make(before, change)
    source, *additional = (opened,) if below is None else below.sources
    kept = {number: number for number, record in enumerate(leaves) if not isinstance(record, ArrayRecord)}
    return derive(
        source,
        replace(tree, leaves=tuple(leaves), aliases=aliases),
        derivations,
        values=kept if below is None else below.values,
        additional=additional,
        most_bytes=context.memory.load_bytes,
        description="" if below is None else below.description,
        changes=described,
    )
