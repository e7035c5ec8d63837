"""What an abstract tree asks for, matched with what is stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from ckptcore.errors import UnsupportedLeafError
from ckptcore.loading.load_requests import EXACT, Matching
from ckptcore.model.metadata import PLAIN_ARRAY, ArrayRecord, LeafRecord, TreeMetadata, ValueRecord
from ckptcore.model.tree import LEAF, Attribute, Node, Skeleton, TreePath, format_path
from ckptcore.protocols import LeafHandler
from ckptcore.tree.flattening import Flat
from ckptcore.tree.scalars import are_interchangeable, difference_of

if TYPE_CHECKING:
    from ckptcore.loading.adjustments import Adjustment
    from ckptcore.loading.differences import Difference

__all__ = ["Matched", "match_leaves"]


@dataclass(frozen=True, slots=True)
class Matched:
    """Which stored leaf each leaf of an abstract tree is.

    Attributes:
        numbers: for each, that of the stored leaf; None where nothing is loaded: a placeholder stands, the value there is kept, or
            None is asked for and nothing is stored.
        handlers: who builds each; None where a placeholder stands, or comes.
        defaulted: the positions of leaves that are not stored, and may be missing.
        ignored: the numbers of stored leaves that are not asked for, and may be there.
        adjustments: by number of a stored array, how it becomes what is asked for.
        skeleton, leaves: the containers and the leaves of the abstract tree.
        filled: for a target that is filled in place, True for each leaf that stays as it is; None for a new value.
    """

    numbers: Sequence[int | None]
    handlers: Sequence[LeafHandler | None]
    defaulted: Sequence[int] = ()
    ignored: Sequence[int] = ()
    adjustments: Mapping[int, Adjustment] = field(default_factory=dict)
    skeleton: Skeleton = LEAF
    leaves: Sequence[object] = ()
    filled: list[bool] | None = None


def match_leaves(
    flat: Flat,
    tree: TreeMetadata,
    display: str,
    *,
    by_name: bool,
    matching: Matching = EXACT,
    place: tuple[int, int] = (0, 1),
    chosen: frozenset[int] | None = None,
) -> Matched:
    """Find the stored leaf for each leaf of an abstract tree.

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
      as arrays. Only if nothing is lost, see `ckptcore.tree.scalars`.
    - A list may be asked for where a tuple is stored, and the other way round: Orbax stores both as one.

    Args:
        flat: the abstract tree.
        tree: the stored one.
        display: the location, for errors.
        by_name: whether other software wrote what is stored.
        matching: which differences are allowed.
        chosen: the numbers of the stored leaves that are loaded; None: all. The others are no difference, asked for or not, and where
            they are asked for a placeholder comes.
        place: the rank of this process and the size of the job, to ask handlers whether a leaf has a value that can be kept.

    Raises:
        TreeMismatchError: lists every difference that is not allowed.
    """
    paths = list(flat.paths())
    differences: list[Difference] = []
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
        if not by_name:
            from ckptcore.loading.differences import container_differences  # only where trees differ

            allowed = "sequence" if matching.sequences == "either" else None
            found_of_containers = container_differences(flat.skeleton, tree.skeleton)
            differences = [difference for difference in found_of_containers if difference.sort != allowed]
    if chosen is not None:
        left_out = [number is not None and number not in chosen for number in found]
        flat = replace(
            flat, handlers=[None if out else handler for out, handler in zip(left_out, flat.handlers, strict=True)]
        )
    comparison = _Comparison(flat, tree, paths, found, by_name)
    absent, unexpected = comparison.absent(), comparison.unexpected(skipped)
    unchosen: Sequence[int] = ()
    if chosen is not None:
        asked = {number for number in found if number is not None}
        unchosen = [number for number in range(len(tree.leaves)) if number not in chosen and number not in asked]
        unexpected = [number for number in unexpected if number in chosen]
    if unexpected and matching.unexpected == "error":
        differences[:0] = comparison.of_unexpected(unexpected)
    if absent and matching.missing == "error":
        differences[:0] = comparison.of_absent(absent, unexpected)
    elif absent and matching.missing == "keep":
        differences[:0] = comparison.of_valueless(absent, place)
    adjustments: dict[int, Adjustment] = {}
    differences.extend(comparison.of_leaves(matching, adjustments))
    if adjustments:
        differences.extend(comparison.of_quantized(adjustments))
    if differences:
        from ckptcore.loading.differences import mismatch

        raise mismatch(display, differences, tree)
    handlers = list(flat.handlers)
    if matching.missing == "placeholder":
        for position in absent:
            handlers[position] = None
    numbers = [None if handler is None else number for number, handler in zip(found, handlers, strict=True)]
    loaded = {number for number in found if number is not None}
    unasked = [number for number in tree.held_by if number not in loaded]
    ignored = sorted({*unexpected, *unasked, *unchosen})
    return Matched(numbers, handlers, absent, ignored, adjustments, flat.skeleton, flat.leaves)


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


@dataclass(frozen=True, slots=True)
class _Comparison:
    """What is asked for beside what is stored, matched by now.

    Attributes:
        flat, tree, by_name: as for `match_leaves`.
        paths: of what is asked for.
        found: for each the number of the stored leaf, or None.
    """

    flat: Flat
    tree: TreeMetadata
    paths: Sequence[TreePath]
    found: Sequence[int | None]
    by_name: bool

    def _described(self, handler: LeafHandler, position: int) -> LeafRecord:
        """Describe a leaf of the abstract tree.

        Raises:
            UnsupportedLeafError: names the leaf.
        """
        try:
            return handler.describe(self.flat.leaves[position])
        except UnsupportedLeafError as error:
            raise UnsupportedLeafError(f"{format_path(self.paths[position])}: {error}") from error

    def absent(self) -> list[int]:
        """The positions of leaves that are asked for and not stored."""
        return [
            position
            for position, (number, handler) in enumerate(zip(self.found, self.flat.handlers, strict=True))
            if number is None
            and handler is not None
            and not (self.by_name and _is_none(self._described(handler, position)))
        ]

    def unexpected(self, skipped: Sequence[TreePath]) -> list[int]:
        """The numbers of leaves that are stored, and neither asked for nor skipped."""
        tree, by_name = self.tree, self.by_name
        loaded = {number for number in self.found if number is not None}
        if len(loaded) == len(tree.leaves):
            return []
        form = _text if by_name else _plain
        skips = {form(prefix) for prefix in skipped}
        dotted = tuple([".".join(map(str, prefix)) + "." for prefix in skipped]) if by_name else ()
        leafless = _leafless(self.flat.skeleton) if by_name else set[TreePath]()
        return [
            number
            for number, path in enumerate(tree.paths)
            if number not in loaded
            and number not in tree.held_by
            and not _is_skipped(form(path), skips, dotted)
            and not (_is_none(tree.leaves[number]) and _text(path) in leafless)
        ]

    def of_unexpected(self, unexpected: Sequence[int]) -> list[Difference]:
        """What is told of stored leaves that are not asked for."""
        from ckptcore.loading.differences import Difference, Remedy

        return [
            Difference(
                "unexpected",
                f"unexpected: {format_path(self.tree.paths[number])} is stored and not asked for",
                Remedy("unexpected", "ignore"),
            )
            for number in unexpected
        ]

    def of_absent(self, absent: Sequence[int], unexpected: Sequence[int]) -> list[Difference]:
        """What is told of leaves that are not stored, with those that are stored, not asked for and may have been meant."""
        from ckptcore.loading.differences import Difference, Remedy
        from ckptcore.tree.suggestions import NearNames

        there = NearNames([format_path(self.tree.paths[number]) for number in unexpected])
        told = []
        for position in absent:
            name = format_path(self.paths[position])
            near = there.nearest(name)
            hint = "" if near is None else f"; did you mean {near}?"
            told.append(Difference("missing", f"missing: {name} is not stored{hint}", Remedy("missing", "keep")))
        return told

    def of_valueless(self, absent: Sequence[int], place: tuple[int, int]) -> list[Difference]:
        """What is told of those leaves among the missing that have no value to keep."""
        from ckptcore.loading.differences import Difference, Remedy

        told = []
        for position in absent:
            handler, leaf = self.flat.handlers[position], self.flat.leaves[position]
            assert handler is not None  # only what is asked for is absent
            if isinstance(self._described(handler, position), ValueRecord):
                continue
            try:
                handler.shards(leaf, *place)  # refuses what has no elements
            except UnsupportedLeafError as error:
                name = format_path(self.paths[position])
                line = f"missing: {name} is not stored, and the abstract leaf has no value to keep: {error}"
                told.append(Difference("missing", line, Remedy("missing", "placeholder")))
        return told

    def of_leaves(self, matching: Matching, adjustments: dict[int, Adjustment]) -> list[Difference]:
        """What is told of leaves that are there and otherwise; of arrays that may be adjusted it is added how."""
        told: list[Difference] = []
        for position, number in enumerate(self.found):
            handler = self.flat.handlers[position]
            if number is None or handler is None:
                continue
            record = self.tree.leaves[number]
            asked = self._described(handler, position)
            if asked is record:
                continue
            if isinstance(asked, ArrayRecord) and isinstance(record, ArrayRecord) and _are_plain(asked, record):
                if asked.spec != record.spec:
                    told.extend(self._of_array(position, number, asked, record, matching, adjustments))
                continue
            as_other = self.by_name and are_interchangeable(asked, record)
            reason = difference_of(asked, record) if as_other else _difference(asked, record)
            if reason is not None:
                from ckptcore.loading.differences import Difference

                sort = reason.partition(":")[0]
                told.append(Difference(sort, f"{format_path(self.paths[position])}: {reason}"))
        return told

    def _of_array(
        self,
        position: int,
        number: int,
        asked: ArrayRecord,
        stored: ArrayRecord,
        matching: Matching,
        adjustments: dict[int, Adjustment],
    ) -> Sequence[Difference]:
        """What is told of an array of another shape or dtype."""
        from ckptcore.loading.adjustments import Adjustment, adjust  # only where something differs
        from ckptcore.loading.differences import Difference

        found = adjust(asked.spec, stored.spec, matching)
        if isinstance(found, Adjustment):
            adjustments[number] = found
            return ()
        path = format_path(self.paths[position])
        return [Difference(refused.sort, f"{path}: {refused.reason}", refused.allowed_by) for refused in found]

    def of_quantized(self, adjustments: Mapping[int, Adjustment]) -> Sequence[Difference]:
        """What is told of quantised arrays that would be cast, and nobody asks for the scales without which they mean nothing."""
        from ckptcore.loading.differences import Difference
        from ckptcore.loading.quantized_names import scales_beside  # only where something differs

        loaded = set(self.found)
        told = []
        for number, scales in scales_beside(self.tree):
            found = adjustments.get(number)
            if found is not None and found.change.cast != "error" and scales not in loaded:
                path, beside = (format_path(self.tree.paths[one]) for one in (number, scales))
                reason = f"{found.change.stored} is quantised: a cast would leave out its scales, {beside}"
                told.append(Difference("dtype", f"{path}: dtype: {reason}"))
        return told


def _are_plain(asked: ArrayRecord, stored: ArrayRecord) -> bool:
    """Whether two arrays mean nothing beyond their elements, so that these may be changed."""
    return asked.kind in _PLAIN_KINDS and stored.kind in _PLAIN_KINDS


_PLAIN_KINDS: Final = (PLAIN_ARRAY, "numpy.scalar")
"""The kinds of arrays that are adjusted."""


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
