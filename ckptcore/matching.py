"""What an abstract tree asks for, matched with what is stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from ckptcore.errors import TreeMismatchError
from ckptcore.flattening import Flat
from ckptcore.model.metadata import PLAIN_ARRAY, ArrayRecord, LeafRecord, TreeMetadata, ValueRecord
from ckptcore.model.tree import Attribute, Node, Skeleton, TreePath, format_path
from ckptcore.scalars import are_interchangeable, difference_of

__all__ = ["match_leaves"]

_SHOWN: Final = 30
"""How many differences an error's text lists; its attribute has all."""


def match_leaves(flat: Flat, tree: TreeMetadata, display: str, *, by_name: bool) -> list[int | None]:
    """For each leaf of an abstract tree the number of the stored leaf; None where it is not to be loaded.

    Keys match as they are. Where nothing matches so, an attribute also matches a str key of its name, because an object
    that is loaded without its type is a dict.

    What not every process had that saved need not be asked for.

    What other software wrote may lack what tells keys and empty things apart, so there:

    - Any key matches one of the same text: Orbax stores the keys of dicts and the names of attributes as text, so that
      ``{1: ...}`` is stored as ``{"1": ...}``. Only where nothing else matches, and no two leaves have the text in common.
    - Any leaf matches one whose name is its keys joined by dots, where the stored tree is a flat dict of such names.
    - A stored None is not unexpected where the abstract tree has a container without leaves: Orbax stores an empty named tuple
      (``optax.EmptyState``) as None.
    - None may be asked for where nothing is stored.
    - A number may be asked for where an array without axes is stored, and such an array where a number is: Orbax stores both
      as arrays. Only if nothing is lost, see `ckptcore.scalars`.

    Args:
        flat: the abstract tree.
        tree: the stored one.
        display: the location, for errors.
        by_name: whether other software wrote what is stored.

    Returns:
        The numbers; None where a placeholder stands, and where None is asked for and nothing is stored.

    Raises:
        TreeMismatchError: lists every difference.
    """
    paths = list(flat.paths())
    if flat.skeleton == tree.skeleton and None not in flat.handlers:
        found: list[int | None] = list(range(len(paths)))
        skipped: list[TreePath] = []
    else:
        stored = {path: number for number, path in enumerate(tree.paths)}
        found = [stored.get(path) for path in paths]
        missing = [position for position, number in enumerate(found) if number is None]
        for of_asked, of_stored in _FORMS_OF_OTHERS if by_name else _FORMS:
            if missing:
                _match_loosely(paths, found, missing, stored, of_asked, of_stored)
                missing = [position for position in missing if found[position] is None]
        skipped = [path for path, handler in zip(paths, flat.handlers, strict=True) if handler is None]
    differences = _differences(flat, tree, paths, found, skipped, by_name)
    if differences:
        shown = "".join(f"\n  {line}" for line in differences[:_SHOWN])
        more = f"\n  and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        raise TreeMismatchError(
            f"{display} does not hold what the abstract tree asks for:{shown}{more}\n"
            "Make the abstract tree like the stored one (metadata(location).abstract is it), or put PLACEHOLDER where a "
            "part is not to be loaded",
            differences,
        )
    return [None if handler is None else number for number, handler in zip(found, flat.handlers, strict=True)]


def _match_loosely(
    paths: Sequence[TreePath],
    found: list[int | None],
    missing: Sequence[int],
    stored: dict[TreePath, int],
    of_asked: Callable[[TreePath], TreePath],
    of_stored: Callable[[TreePath], TreePath],
) -> None:
    """Find leaves that are missing by forms of their paths. Two that differ only in what a form lacks match nothing."""
    taken = {number for number in found if number is not None}
    forms = [of_stored(path) for path in stored]
    asked = [of_asked(paths[position]) for position in missing]
    times_stored, times_asked = Counter(forms), Counter(asked)
    free = {
        form: number
        for form, number in zip(forms, stored.values(), strict=True)
        if number not in taken and times_stored[form] == 1
    }
    for position, form in zip(missing, asked, strict=True):
        if times_asked[form] == 1:
            found[position] = free.get(form)


def _is_skipped(path: TreePath, skips: set[TreePath], dotted: tuple[str, ...]) -> bool:
    """Whether a stored leaf is where, or below where, a placeholder stands."""
    if any(path[:length] in skips for length in range(len(path) + 1)):
        return True
    return bool(dotted) and len(path) == 1 and isinstance(path[0], str) and path[0].startswith(dotted)


def _plain(path: TreePath) -> TreePath:
    return tuple([key.name if isinstance(key, Attribute) else key for key in path])


def _text(path: TreePath) -> TreePath:
    return tuple(map(str, path))


def _dotted(path: TreePath) -> TreePath:
    return (".".join(map(str, path)),)


_FORMS: Final = ((_plain, _plain),)
"""How paths that do not match as they are may match: the form of an asked path, and that of a stored one."""

_FORMS_OF_OTHERS: Final = ((_plain, _plain), (_text, _text), (_dotted, _text))
"""The same where other software wrote what is stored; one after the other."""


def _leafless(skeleton: Skeleton) -> set[TreePath]:
    """The paths, as text, of all containers that have no leaves."""
    found: set[TreePath] = set()
    _add_leafless(skeleton, (), found)
    return found


def _add_leafless(node: Skeleton, path: TreePath, found: set[TreePath]) -> bool:
    if not isinstance(node, Node):
        return False
    empty = [
        _add_leafless(child, (*path, str(key)), found) for key, child in zip(node.keys, node.children, strict=True)
    ]
    if all(empty):
        found.add(path)
        return True
    return False


def _differences(
    flat: Flat,
    tree: TreeMetadata,
    paths: Sequence[TreePath],
    found: Sequence[int | None],
    skipped: Sequence[TreePath],
    by_name: bool,
) -> list[str]:
    differences: list[str] = []
    absent = [
        position
        for position, (number, handler) in enumerate(zip(found, flat.handlers, strict=True))
        if number is None
        and handler is not None
        and not (by_name and _is_none(handler.describe(flat.leaves[position])))
    ]
    loaded = {number for number in found if number is not None}
    unexpected: list[TreePath] = []
    if len(loaded) < len(tree.leaves):
        form = _text if by_name else _plain
        skips = {form(prefix) for prefix in skipped}
        dotted = tuple([".".join(map(str, prefix)) + "." for prefix in skipped]) if by_name else ()
        leafless = _leafless(flat.skeleton) if by_name else set[TreePath]()
        unexpected = [
            path
            for number, path in enumerate(tree.paths)
            if number not in loaded
            and number not in tree.held_by
            and not _is_skipped(form(path), skips, dotted)
            and not (_is_none(tree.leaves[number]) and _text(path) in leafless)
        ]
    names = [format_path(path) for path in unexpected]
    if absent:
        import difflib  # only where something is wrong
    for position in absent:
        name = format_path(paths[position])
        near = difflib.get_close_matches(name, names, 1) if len(names) <= 2000 and len(absent) <= 200 else []
        differences.append(f"missing: {name} is not stored" + (f"; did you mean {near[0]}?" if near else ""))
    differences.extend(f"unexpected: {name} is stored and not asked for" for name in names)
    for position, number in enumerate(found):
        handler = flat.handlers[position]
        if number is None or handler is None:
            continue
        record = tree.leaves[number]
        asked = handler.describe(flat.leaves[position])
        if asked is record:
            continue
        as_other = by_name and are_interchangeable(asked, record)
        reason = difference_of(asked, record) if as_other else _difference(asked, record)
        if reason is not None:
            differences.append(f"{format_path(paths[position])}: {reason}")
    return differences


def _is_none(record: LeafRecord) -> bool:
    return isinstance(record, ValueRecord) and record.kind == "none"


def _difference(asked: LeafRecord, stored: LeafRecord) -> str | None:
    if isinstance(asked, ArrayRecord) and isinstance(stored, ArrayRecord):
        if asked.spec == stored.spec:
            if asked.kind in (stored.kind, PLAIN_ARRAY, "numpy.scalar"):
                return None
            return f"kind: a {asked.kind} is asked for, a {stored.kind} is stored"
        if asked.kind == stored.kind != PLAIN_ARRAY and asked.kind in ("str", "bytes"):
            return None  # text of any length
        if asked.spec.shape != stored.spec.shape:
            return f"shape: {asked.spec} is asked for, {stored.spec} is stored"
        return f"dtype: {asked.spec} is asked for, {stored.spec} is stored; nothing is cast unless asked"
    asked_kind, stored_kind = (
        record.kind
        if not isinstance(record, ArrayRecord) or record.kind in ("str", "bytes")
        else f"array {record.spec}"
        for record in (asked, stored)
    )
    if asked_kind == stored_kind:
        return None
    return f"kind: {asked_kind} is asked for, {stored_kind} is stored"
