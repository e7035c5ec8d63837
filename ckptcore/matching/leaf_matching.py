"""Matching: the stored leaf for each leaf of an abstract tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from ckptcore.builtin.host_leaves import PLAIN_ARRAY_KINDS, PLAIN_KINDS, VALUE_KINDS, HostValueHandler
from ckptcore.errors import CorruptCheckpointError, TreeMismatchError, UnsupportedLeafError
from ckptcore.matching.number_forms import (
    FloatOfInt,
    NumberOfArray,
    are_interchangeable,
    array_of_number,
    is_scalar,
    number_difference,
    sort_of_elements,
    with_casts_of_numbers,
)
from ckptcore.matching.options import EXACT, LeafChange, Matching
from ckptcore.model.arrays import HostArray
from ckptcore.model.columns import COLUMN_KINDS
from ckptcore.model.metadata import (
    PLAIN_ARRAY,
    ArrayRecord,
    LeafRecord,
    TreeMetadata,
    ValueRecord,
    unreadable_error,
)
from ckptcore.model.tree import LEAF, Attribute, Node, Skeleton, TreePath, format_path, is_name
from ckptcore.protocols import LeafHandler
from ckptcore.tree.flattening import Flat
from ckptcore.tree.shapes import outer_objects, outer_parts

if TYPE_CHECKING:
    from ckptcore.matching.differences import Difference
    from ckptcore.matching.moves import Move

_SEQUENCES: Final = {"list", "tuple"}
"""The kinds of columns of which either may be requested."""

_VALUES: Final = HostValueHandler()


@dataclass(frozen=True, slots=True)
class Matched:
    """The stored leaf for each leaf of an abstract tree.

    Attributes:
        numbers: by leaf, the number of the stored leaf; None for a placeholder, for a value that is kept, and for a
            requested None that is not stored.
        handlers: by leaf, the handler that builds it; None for a placeholder.
        defaulted: positions, in the abstract tree, of leaves that are not stored, and are allowed to be missing.
        ignored: numbers of stored leaves that are not requested, which `matching` or a selection allows.
        changes: by number of a stored array, its change to the requested shape and dtype.
        arrays: by position of a leaf, the array that was built from a stored Python number.
        skeleton, leaves: the containers and the leaves of the abstract tree.
        filled: for a target that is filled in place, True for each leaf that needs no replacement; None for a new
            value.
        first: positions of the leaves of objects that are restored before anything else is changed; None if there are
            no such objects.
        sparse: a message for each object of which less than half of the leaves are stored.
        kept: by position of a leaf that a selection leaves out of an object, the object's own value.
        untouched: paths of the objects of which a selection loads nothing.
    """

    numbers: Sequence[int | None]
    handlers: Sequence[LeafHandler | None]
    defaulted: Sequence[int] = ()
    ignored: Sequence[int] = ()
    changes: Mapping[int, LeafChange] = field(default_factory=dict)
    arrays: Mapping[int, HostArray] = field(default_factory=dict)
    skeleton: Skeleton = LEAF
    leaves: Sequence[object] = ()
    filled: list[bool] | None = None
    first: frozenset[int] | None = None
    sparse: Sequence[str] = ()
    kept: Mapping[int, object] = field(default_factory=dict)
    untouched: frozenset[TreePath] = frozenset()


def match_leaves(
    flat: Flat,
    tree: TreeMetadata,
    display: str,
    *,
    by_name: bool,
    matching: Matching = EXACT,
    rank_and_size: tuple[int, int] = (0, 1),
    chosen: frozenset[int] | None = None,
    in_place: bool = False,
) -> Matched:
    """Find the stored leaf for each leaf of an abstract tree.

    Equal keys match. Otherwise an attribute also matches a str key with its name, because an object that is loaded
    without its type is a dict. Stored leaves that only some of the saving processes had need not be requested. A
    requested None need not be stored, and a stored None need not be requested, unless values are strict: for JAX, None
    is a container without leaves.

    Other software may not store exact keys and types, so its checkpoints have additional rules, as has
    ``Matching(keys="text")``:

    - Keys with the same text match, if there is no better match and no two leaves have the same text: Orbax stores keys
      of dicts and names of attributes as text, ``{1: ...}`` as ``{"1": ...}``.
    - A leaf matches the stored name that joins its keys by dots, if the stored tree is a flat dict of such names.
    - A stored None matches a container without leaves: Orbax stores empty named tuples (``optax.EmptyState``) as None.
    - A number matches an array without axes, and vice versa, if no precision is lost (see `number_difference`): Orbax
      stores both as arrays.
    - Lists match tuples, and vice versa: Orbax stores both alike.

    Args:
        flat: the abstract tree.
        tree: the stored tree.
        display: the location, for errors.
        by_name: True if other software wrote the checkpoint, or keys are matched by their text.
        matching: the allowed differences.
        rank_and_size: the rank of this process and the size of the job. Handlers use them to check if a leaf has a
            value to keep.
        chosen: the numbers of the stored leaves to load; None: all. Other leaves are not differences; if they are
            requested, they become placeholders.
        in_place: True if the leaves are filled. One that is not stored, and has the memory of another leaf, is filled
            with that leaf: safetensors files of other software have only one of the names of a tied weight.

    Raises:
        TreeMismatchError: lists every difference that is not allowed. Also if no requested leaf is stored, whatever is
            allowed, no leaf of an object that is stored with other names, or none of a part that is stored under
            another path.
        CorruptCheckpointError: the data of a requested leaf are missing or damaged.
        UnsupportedLeafError: a leaf of the abstract tree cannot be described; names the leaf.
    """
    paths = list(flat.paths())
    is_same = flat.skeleton == tree.skeleton and None not in flat.handlers
    found = list(range(len(paths))) if is_same else _find(paths, tree, _FOREIGN_FORMS if by_name else _FORMS)
    handlers = list(flat.handlers)
    if chosen is not None:
        handlers = [
            None if number is not None and number not in chosen else handler
            for number, handler in zip(found, handlers, strict=True)
        ]
    compared = _Comparison(tree, paths, flat.leaves, handlers, found, by_name, by_name or matching.values == "stored")
    absent = compared.absent()
    if absent and in_place:
        absent = compared.without_tied(absent)
    skipped = [path for path, handler in zip(paths, flat.handlers, strict=True) if handler is None]
    unexpected = compared.unexpected(skipped, flat.skeleton)
    unchosen: Sequence[int] = ()
    if chosen is not None:
        requested = {number for number in found if number is not None}
        unchosen = [number for number in range(len(tree.leaves)) if number not in chosen and number not in requested]
        unexpected = [number for number in unexpected if number in chosen]
    changes: dict[int, LeafChange] = {}
    differences = compared.of_leaves(matching, changes)
    selects_leaves = chosen is not None and any(number < len(tree.leaves) for number in chosen)
    lost = compared.unmatched(flat, absent, unexpected) if absent or selects_leaves else []
    if differences or changes or absent or unexpected or lost or not (is_same or by_name):
        from ckptcore.matching import differences as of_trees  # only if the trees differ

        before: list[Difference] = []
        elsewhere: list[TreePath] = []
        if absent and unexpected and (lost or (matching.missing, matching.unexpected) != ("keep", "ignore")):
            related = compared.take_related(absent, unexpected)
            before.extend(related)
            lost_before = [path for path in lost if path]
            if () in lost and any(found.sort in ("moved", "key") for found in related):
                lost = []
            elif lost:
                lost = [path for path in compared.unmatched(flat, absent, unexpected) if path in lost]
            elsewhere = [path for path in lost_before if path not in lost]
        elif absent and unexpected:
            moved, elsewhere = compared.of_moved_parts(flat, absent, unexpected)
            before.extend(moved)
            if not moved:  # too many for the names of transforms
                lost, elsewhere = elsewhere, []
        if absent or unexpected:
            before.extend(compared.take_other_states(flat.skeleton, absent, unexpected))
        if matching.missing == "error" or lost:
            names = [format_path(tree.paths[number]) for number in unexpected]
            before.extend(of_trees.missing_leaves([format_path(paths[position]) for position in absent], names))
        elif matching.missing == "keep":
            before.extend(compared.of_valueless(absent, rank_and_size))
        if matching.unexpected == "error" or lost:
            before.extend(of_trees.unexpected_leaves([format_path(tree.paths[number]) for number in unexpected]))
        if not is_same and not by_name:
            allowed = "sequence" if matching.sequences == "either" else None
            of_containers = of_trees.container_differences(flat.skeleton, tree.skeleton)
            before.extend([one for one in of_containers if one.sort != allowed])
        differences = [*before, *differences]
        if changes:
            differences.extend(of_trees.lost_scales(tree, changes, set(found)))
        if lost and not differences:
            differences = [of_trees.Difference("missing", "missing: no selected leaf is requested")]
        if differences:
            parts = compared.kept_parts(absent)
            of_lost, of_elsewhere = (list(map(format_path, paths)) for paths in (lost, elsewhere))
            sizes = compared.misshapen_in_objects(flat) if in_place and chosen is None else []
            raise of_trees.mismatch(display, differences, tree, parts, of_lost, of_elsewhere, sizes)
    if matching.missing == "placeholder":
        for position in absent:
            handlers[position] = None
    numbers = [None if handler is None else number for number, handler in zip(found, handlers, strict=True)]
    loaded = {number for number in found if number is not None}
    unrequested = [number for number in tree.held_by if number not in loaded]
    ignored = sorted({*unexpected, *unrequested, *unchosen})
    sparse = compared.sparse(flat, absent, unexpected) if absent and chosen is None else ()
    return Matched(
        numbers, handlers, absent, ignored, changes, compared.arrays, flat.skeleton, flat.leaves, sparse=sparse
    )


def _find(paths: Sequence[TreePath], tree: TreeMetadata, forms: Sequence[_Forms]) -> list[int | None]:
    """Return the number of the stored leaf for each path; None if there is none."""
    stored = {path: number for number, path in enumerate(tree.paths)}
    found = [stored.get(path) for path in paths]
    missing = [position for position, number in enumerate(found) if number is None]
    for of_requested, of_stored in forms:
        if missing:
            _match_loosely(paths, found, missing, stored, of_requested, of_stored)
            missing = [position for position in missing if found[position] is None]
    return found


def _match_loosely(
    paths: Sequence[TreePath],
    found: list[int | None],
    missing: Sequence[int],
    stored: dict[TreePath, int],
    of_requested: Callable[[TreePath], TreePath],
    of_stored: Callable[[TreePath], TreePath],
) -> None:
    """Find missing leaves by a form of their paths. A form that several leaves share matches nothing."""
    taken = {number for number in found if number is not None}
    forms = [of_stored(path) for path in stored]
    requested = [of_requested(paths[position]) for position in missing]
    times_stored, times_requested = Counter(forms), Counter(requested)
    free = {
        form: number
        for form, number in zip(forms, stored.values(), strict=True)
        if number not in taken and times_stored[form] == 1
    }
    for position, form in zip(missing, requested, strict=True):
        if times_requested[form] == 1:
            found[position] = free.get(form)


def _is_skipped(path: TreePath, skips: set[TreePath], dotted: tuple[str, ...]) -> bool:
    """Return True if a stored leaf is at the path of a placeholder, or below it."""
    if any(path[:length] in skips for length in range(len(path) + 1)):
        return True
    return bool(dotted) and len(path) == 1 and isinstance(path[0], str) and path[0].startswith(dotted)


def _plain(path: TreePath) -> TreePath:
    return tuple([key.name if isinstance(key, Attribute) else key for key in path])


def _text(path: TreePath) -> TreePath:
    return tuple(map(str, path))


def _dotted(path: TreePath) -> TreePath:
    return (".".join(map(str, path)),)


_Forms: TypeAlias = tuple[Callable[[TreePath], TreePath], Callable[[TreePath], TreePath]]
"""Functions that convert a requested and a stored path to comparable forms: paths match if their forms are equal."""

_FORMS: Final[Sequence[_Forms]] = ((_plain, _plain),)

_FOREIGN_FORMS: Final[Sequence[_Forms]] = ((_plain, _plain), (_text, _text), (_dotted, _text))
"""Forms for checkpoints of other software, tried in order."""


def _leafless(skeleton: Skeleton) -> set[TreePath]:
    """Return the paths, as text, of all containers without leaves."""
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


class _Related(NamedTuple):
    """Missing and unexpected leaves that belong together.

    Attributes:
        named: the requested and the stored path of leaves whose keys have the same text.
        of_structure: by path, the differences of leaves where the other tree has a container.
        requested, stored: the paths of the other requested and stored leaves.
        moves: parts of these that have another path.
    """

    named: Sequence[tuple[str, str]]
    of_structure: Mapping[TreePath, Difference]
    requested: Mapping[int, TreePath]
    stored: Mapping[int, TreePath]
    moves: Sequence[Move]


@dataclass(frozen=True, slots=True)
class _Comparison:
    """An abstract tree and the stored one, after matching by path.

    Attributes:
        tree, by_name: as for `match_leaves`.
        is_none_absent: True if None is equal to a leaf that does not exist.
        paths, leaves, handlers: of the abstract tree. If a number is requested and an array is stored, `of_leaves`
            replaces the handler.
        found: by leaf, the number of the stored leaf, or None.
        arrays: by position of a leaf, the array that `of_leaves` built from a stored Python number.
        misshapen: positions of leaves of which `of_leaves` found that another shape is stored.
    """

    tree: TreeMetadata
    paths: Sequence[TreePath]
    leaves: Sequence[object]
    handlers: list[LeafHandler | None]
    found: Sequence[int | None]
    by_name: bool
    is_none_absent: bool
    arrays: dict[int, HostArray] = field(default_factory=dict)
    misshapen: list[int] = field(default_factory=list)

    def _described(self, handler: LeafHandler, position: int) -> LeafRecord:
        """Describe a leaf of the abstract tree.

        Raises:
            UnsupportedLeafError: names the leaf.
        """
        try:
            return handler.describe(self.leaves[position])
        except UnsupportedLeafError as error:
            raise UnsupportedLeafError(f"{format_path(self.paths[position])}: {error}") from error

    def absent(self) -> list[int]:
        """Return the positions of requested leaves that are not stored."""
        return [
            position
            for position, (number, handler) in enumerate(zip(self.found, self.handlers, strict=True))
            if number is None
            and handler is not None
            and not (self.is_none_absent and _is_none(self._described(handler, position)))
        ]

    def without_tied(self, absent: Sequence[int]) -> list[int]:
        """Drop the positions of leaves that have the memory of a stored leaf."""
        memory: dict[int, tuple[object, ...]] = {}
        for position, handler in enumerate(self.handlers):
            parts = None if handler is None else handler.memory_to_fill(self.leaves[position])
            if parts and all(part.extent for part in parts):
                memory[position] = tuple(parts)
        filled = {memory[position] for position in memory if self.found[position] is not None}
        return [position for position in absent if position not in memory or memory[position] not in filled]

    def unexpected(self, skipped: Sequence[TreePath], skeleton: Skeleton) -> list[int]:
        """Return the numbers of stored leaves that are neither requested nor skipped.

        Other software may store an array under several names: all of them are requested if one is.
        """
        tree, by_name = self.tree, self.by_name
        loaded = {number for number in self.found if number is not None}
        if len(loaded) == len(tree.leaves):
            return []
        form = _text if by_name else _plain
        skips = {form(prefix) for prefix in skipped}
        dotted = tuple([".".join(map(str, prefix)) + "." for prefix in skipped]) if by_name else ()
        leafless = _leafless(skeleton) if by_name else set[TreePath]()
        arrays = {tree.aliases.get(number, number) for number in loaded} if by_name else set[int]()
        return [
            number
            for number, path in enumerate(tree.paths)
            if number not in loaded
            and tree.aliases.get(number, number) not in arrays
            and number not in tree.held_by
            and not _is_skipped(form(path), skips, dotted)
            and not (_is_none(tree.leaves[number]) and (self.is_none_absent or _text(path) in leafless))
        ]

    def take_related(self, absent: list[int], unexpected: list[int]) -> list[Difference]:
        """Return the differences of missing and unexpected leaves that belong together, and remove both from the lists.

        Their keys have the same text, or one of the trees has a leaf where the other one has a container, or a part has
        another path.
        """
        from ckptcore.matching.differences import key_differences, moved_parts  # only if the trees differ

        related = self._related(absent, unexpected)
        moved = [{pair[side] for move in related.moves for pair in move.pairs} for side in (0, 1)]
        absent[:] = [position for position in related.requested if position not in moved[0]]
        unexpected[:] = [number for number in related.stored if number not in moved[1]]
        return [
            *key_differences(related.named),
            *dict.fromkeys(related.of_structure.values()),
            *moved_parts(related.moves),
        ]

    def _related(self, absent: Sequence[int], unexpected: Sequence[int], any_number: bool = False) -> _Related:
        from ckptcore.matching.differences import structure_differences  # only if the trees differ
        from ckptcore.matching.moves import find_moves

        requested = {position: self.paths[position] for position in absent}
        stored = {number: self.tree.paths[number] for number in unexpected}
        if not self.by_name:
            found: list[int | None] = [None] * len(absent)
            for forms in _FOREIGN_FORMS:
                missing = [place for place, number in enumerate(found) if number is None]
                free = {path: number for number, path in stored.items()}
                _match_loosely(list(requested.values()), found, missing, free, *forms)
            pairs = [(position, number) for position, number in zip(absent, found, strict=True) if number is not None]
        else:
            pairs = []
        named = [(format_path(requested.pop(position)), format_path(stored.pop(number))) for position, number in pairs]
        of_structure = structure_differences(list(map(_plain, requested.values())), list(map(_plain, stored.values())))
        requested = {position: path for position, path in requested.items() if _plain(path) not in of_structure}
        stored = {number: path for number, path in stored.items() if _plain(path) not in of_structure}
        others = [path for number, path in enumerate(self.tree.paths) if number not in stored]
        if self.by_name and all(len(path) == 1 for path in self.tree.paths):  # names that join the keys by dots
            requested = {position: _dotted(path) for position, path in requested.items()}
        moves = find_moves(requested, stored, others, self._fits, any_number=any_number)
        return _Related(named, of_structure, requested, stored, moves)

    def of_moved_parts(
        self, flat: Flat, absent: Sequence[int], unexpected: Sequence[int]
    ) -> tuple[list[Difference], list[TreePath]]:
        """Return the differences and the paths of parts that are not loaded at all, but are stored under another path.

        These are objects, and plain containers directly below the root or with most leaves of the container around
        them. A new part of a network of arrays is neither.
        """
        from ckptcore.matching.differences import moved_parts  # only if the trees differ
        from ckptcore.matching.moves import in_order

        missing, sizes = set(absent), dict[TreePath, int]()
        lost: dict[TreePath, list[int]] = {}
        for part in outer_parts(flat.shape):
            counted = self._counted(part.leaves)
            sizes[part.path] = len(counted)
            is_large = part.is_object or len(part.path) == 1 or 2 * len(counted) > sizes[part.path[:-1]]
            if part.path and is_large and len(counted) > 1 and missing.issuperset(counted):
                lost[part.path] = counted
        if not lost:
            return [], []
        moves = self._related(absent, unexpected, any_number=True).moves
        moved = {position for move in moves for position, _ in move.pairs}
        found = {path: counted for path, counted in lost.items() if moved.issuperset(counted)}
        positions = {position for counted in found.values() for position in counted}
        chosen = [move for move in moves if any(position in positions for position, _ in move.pairs)]
        outermost = [path for path in found if not any(path[:length] in found for length in range(len(path)))]
        return list(moved_parts(in_order(chosen))), outermost

    def take_other_states(self, skeleton: Skeleton, absent: list[int], unexpected: list[int]) -> Sequence[Difference]:
        """Return the differences of states of another class of a library, and remove their leaves from the lists.

        To keep what is missing would mix two states: the mean of one optimizer with the variance of another.
        """
        from ckptcore.matching.differences import state_differences  # only if the trees differ

        found = state_differences(
            skeleton,
            self.tree.skeleton,
            [_plain(self.paths[position]) for position in absent],
            [_plain(self.tree.paths[number]) for number in unexpected],
        )

        def is_taken(path: TreePath) -> bool:
            return any(path[:length] in found for length in range(len(path)))

        absent[:] = [position for position in absent if not is_taken(_plain(self.paths[position]))]
        unexpected[:] = [number for number in unexpected if not is_taken(_plain(self.tree.paths[number]))]
        return list(found.values())

    def _fits(self, position: int, number: int) -> bool:
        """Return True if a stored leaf is an array of the requested shape, or if one of the two is no array."""
        handler, stored = self.handlers[position], self.tree.leaves[number]
        assert handler is not None  # only requested leaves are absent
        requested = self._described(handler, position)
        if not isinstance(requested, ArrayRecord) or not isinstance(stored, ArrayRecord):
            return True
        return requested.spec.shape == stored.spec.shape

    def _counted(self, positions: Sequence[int]) -> list[int]:
        """Drop the positions of placeholders, and of None that is not stored."""
        found: list[int] = []
        for position in positions:
            handler = self.handlers[position]
            is_stored = self.found[position] is not None
            if handler is not None and (is_stored or not _is_none(self._described(handler, position))):
                found.append(position)
        return found

    def kept_parts(self, absent: Sequence[int]) -> Sequence[str]:
        """Return the names of the parts that would keep their present values. None and placeholders are no parts."""
        from ckptcore.matching.moves import whole_parts  # only if the trees differ

        missing = set(absent)
        counted = self._counted(range(len(self.paths)))
        chosen = [place for place, position in enumerate(counted) if position in missing]
        return list(map(format_path, whole_parts([self.paths[position] for position in counted], chosen)))

    def unmatched(self, flat: Flat, absent: Sequence[int], unexpected: Sequence[int]) -> list[TreePath]:
        """Return the paths of objects of which no leaf is stored, but others are in their place.

        If no requested leaf is loaded at all, return the root.
        """
        missing = set(absent)
        pairs = list(zip(self.found, self.handlers, strict=True))
        if not any(number is not None and handler is not None for number, handler in pairs):
            skipped = zip(self.found, flat.handlers, strict=True)
            return [()] if missing or any(number is not None and handler for number, handler in skipped) else []
        prefixes = self._prefixes(unexpected)
        found: list[TreePath] = []
        for path, _, leaves in outer_objects(flat.shape):
            counted = self._counted(leaves)
            if counted and missing.issuperset(counted) and _text(path) in prefixes:
                found.append(path)
        return found

    def _prefixes(self, numbers: Sequence[int]) -> set[TreePath]:
        """Return the paths, as text, of stored leaves and of the containers around them."""
        paths = (_text(self.tree.paths[number]) for number in numbers)
        return {path[:length] for path in paths for length in range(len(path) + 1)}

    def sparse(self, flat: Flat, absent: Sequence[int], unexpected: Sequence[int]) -> Sequence[str]:
        """Return a message for each object of which less than half of the leaves are stored.

        Also for each plain container of which none is stored, but others are in its place.
        """
        missing, found = set(absent), list[str]()
        prefixes, empty = self._prefixes(unexpected), set[TreePath]()
        for part in outer_parts(flat.shape):
            counted = self._counted(part.leaves)
            stored = len(counted) - len(missing.intersection(counted))
            is_empty = bool(counted) and not stored and _text(part.path) in prefixes
            if (part.is_object and 2 * stored < len(counted)) or (is_empty and not part.is_object):
                if any(part.path[:length] in empty for length in range(len(part.path))):
                    continue
                empty.add(part.path)
                found.append(
                    f"only {stored} of the {len(counted)} leaves of {format_path(part.path)}, a "
                    f"{type(part.like).__qualname__}, are stored; a LoadReport lists the others"
                )
        return found

    def misshapen_in_objects(self, flat: Flat) -> list[str]:
        """Return the names for a selection of stored leaves that have another shape than those of objects."""
        inside = {position for _, _, leaves in outer_objects(flat.shape) for position in leaves}
        numbers = [self.found[position] for position in self.misshapen if position in inside]
        return ["/".join(map(str, self.tree.paths[number])) for number in numbers if number is not None]

    def of_valueless(self, absent: Sequence[int], rank_and_size: tuple[int, int]) -> list[Difference]:
        """Return the differences for missing leaves that have no value to keep."""
        from ckptcore.matching.differences import Difference, Remedy  # only if the trees differ

        found = []
        for position in absent:
            handler, leaf = self.handlers[position], self.leaves[position]
            assert handler is not None  # only requested leaves are absent
            if isinstance(self._described(handler, position), ValueRecord):
                continue
            try:
                handler.shards(leaf, *rank_and_size)  # raises for a leaf without elements
            except UnsupportedLeafError as error:
                name = format_path(self.paths[position])
                line = f"missing: {name} is not stored, and the abstract leaf has no value to keep: {error}"
                found.append(Difference("missing", line, Remedy("missing", "placeholder")))
        return found

    def of_leaves(self, matching: Matching, changes: dict[int, LeafChange]) -> list[Difference]:
        """Return the differences of leaves that are stored in another form. Adds allowed changes to `changes`."""
        found: list[Difference] = []
        for position, number in enumerate(self.found):
            handler = self.handlers[position]
            if number is None or handler is None:
                continue
            record = self.tree.leaves[number]
            requested = self._described(handler, position)
            if requested is record:
                continue
            if isinstance(damage := unreadable_error(record), CorruptCheckpointError):
                raise CorruptCheckpointError(f"{format_path(self.paths[position])} cannot be loaded: {damage}")
            if isinstance(requested, ArrayRecord) and isinstance(record, ArrayRecord) and _are_plain(requested, record):
                if requested.spec != record.spec:
                    from ckptcore.matching.differences import adjust  # only if the trees differ

                    allowed = with_casts_of_numbers(matching, requested, record)
                    change = adjust(format_path(self.paths[position]), requested.spec, record.spec, allowed)
                    if isinstance(change, LeafChange):
                        changes[number] = change
                    else:
                        found.extend(change)
                        if any(one.sort == "shape" for one in change):
                            self.misshapen.append(position)
                continue
            can_change = self.by_name or matching.values == "stored"
            if _is_of_form(requested, record):
                reason = self._form_difference(position, handler, record)
            elif can_change and are_interchangeable(requested, record):
                reason = number_difference(requested, record)
                if reason is None:
                    self._convert(position, handler, requested, record)
            elif {requested.kind, record.kind} == _SEQUENCES and isinstance(record, ValueRecord):
                same = self.by_name or matching.sequences == "either"
                reason = None if same else f"sequence: a {requested.kind} is requested, a {record.kind} is stored"
            else:
                special = self._special_difference(position, handler, requested, record)
                reason = special or _difference(requested, record)
            if reason is None and isinstance(record, ValueRecord) and record.kind in COLUMN_KINDS.values():
                reason = _column_difference(self.leaves[position], record, matching)
            is_sequence = reason is not None and reason.startswith("sequence")
            are_values = (
                reason is not None
                and reason.startswith(("kind", "value"))
                and _is_plain(record)
                and self._is_value(position)
            )
            if are_values and matching.values == "stored":
                self._take_stored(position, handler, requested, record)
            elif reason is not None:
                from ckptcore.matching.differences import Difference, Remedy

                sort = reason.partition(":")[0]
                remedy = Remedy("sequences", "either") if is_sequence else None
                remedy = Remedy("values", "stored") if are_values else remedy
                found.append(Difference(sort, f"{format_path(self.paths[position])}: {reason}", remedy))
        return found

    def _form_difference(self, position: int, handler: LeafHandler, record: LeafRecord) -> str | None:
        """Return why a stored value cannot become one of the requested type, found by making it now."""
        try:
            handler.build(self.leaves[position], record, ())
        except TreeMismatchError as error:
            return error.differences[0]
        return None

    def _special_difference(
        self, position: int, handler: LeafHandler, requested: LeafRecord, stored: LeafRecord
    ) -> str | None:
        """Return why the handler of a special kind of array, such as random keys, refuses a stored array."""
        if not isinstance(stored, ArrayRecord) or requested.kind in (*PLAIN_ARRAY_KINDS, "str", "bytes"):
            return None
        try:
            handler.wanted(self.leaves[position], stored)
        except UnsupportedLeafError as error:
            return f"kind: {error}"
        return None

    def _convert(self, position: int, handler: LeafHandler, requested: LeafRecord, stored: LeafRecord) -> None:
        """Prepare the conversion of a stored array to a number, or of a stored number to an array."""
        if isinstance(requested, ValueRecord):
            self.handlers[position] = NumberOfArray(handler, requested.kind)
        elif isinstance(stored, ValueRecord) and (array := array_of_number(stored, requested.spec)) is not None:
            self.arrays[position] = array

    def _is_value(self, position: int) -> bool:
        """Return True if a plain value is requested: not an array, nor an object that is stored like one."""
        return type(self.leaves[position]) in VALUE_KINDS or isinstance(self.leaves[position], list | tuple | dict)

    def _take_stored(self, position: int, handler: LeafHandler, requested: LeafRecord, stored: LeafRecord) -> None:
        """Load a plain value in its stored form; a number as a number, also if it is stored as an array."""
        if not isinstance(stored, ArrayRecord):
            is_wider = isinstance(requested, ValueRecord) and (requested.kind, stored.kind) == ("float", "int")
            self.handlers[position] = FloatOfInt() if is_wider else _VALUES
        elif (sort := sort_of_elements(stored.spec)) is not None and isinstance(requested, ValueRecord):
            self.handlers[position] = NumberOfArray(handler, sort)


def _column_difference(requested: object, stored: ValueRecord, matching: Matching) -> str | None:
    """Return why a stored column cannot replace a requested list, tuple or dict; None if it can."""
    if matching.values == "stored" and not (isinstance(requested, dict) and any(map(is_name, requested))):
        return None  # the column need not be decoded
    found: Any = _VALUES.build(None, stored, ())
    if matching.values == "error" and not _has_types_of(requested, found):
        return f"kind: a {stored.kind} of other values is requested than is stored"
    lost = [key for key in requested if is_name(key) and key not in found] if isinstance(requested, dict) else []
    return f"missing: {lost[0]!r} is not stored" if lost else None


def _has_types_of(one: object, other: object) -> bool:
    """Return True if two values have the same structure, and plain values of the same types."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_has_types_of(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_has_types_of, one, other))
    return type(one) is type(other)


def _is_plain(record: LeafRecord) -> bool:
    """Return True for a plain value that is loaded in its stored form. Arrays for text were requested as arrays."""
    if isinstance(record, ArrayRecord):
        return is_scalar(record) and sort_of_elements(record.spec) is not None
    return record.kind in PLAIN_KINDS


def _are_plain(requested: ArrayRecord, stored: ArrayRecord) -> bool:
    """Return True if two arrays have no meaning beyond their elements, so that they can be adjusted."""
    return requested.kind in PLAIN_ARRAY_KINDS and stored.kind in PLAIN_ARRAY_KINDS


def _is_of_form(requested: LeafRecord, stored: LeafRecord) -> bool:
    """Return True if a stored value can be tried as one of a type with a plain form, such as a path, or the reverse.

    A plain form is requested where an object that loads itself, or a caller, does not know the type.
    """
    if not isinstance(requested, ValueRecord) or not isinstance(stored, ValueRecord) or unreadable_error(stored):
        return False
    if requested.kind not in PLAIN_KINDS:
        return stored.kind != "none"
    return stored.kind not in PLAIN_KINDS and requested.kind == VALUE_KINDS.get(type(stored.value))


def _is_none(record: LeafRecord) -> bool:
    return isinstance(record, ValueRecord) and record.kind == "none"


def _difference(requested: LeafRecord, stored: LeafRecord) -> str | None:
    if isinstance(requested, ArrayRecord) and isinstance(stored, ArrayRecord):
        if requested.spec == stored.spec:
            is_data = stored.kind == PLAIN_ARRAY and requested.kind not in ("str", "bytes")
            if is_data or requested.kind in (stored.kind, *PLAIN_ARRAY_KINDS):
                return None
            return f"kind: {requested.kind} is requested, {stored.kind} is stored"
        if requested.kind == stored.kind != PLAIN_ARRAY and requested.kind in ("str", "bytes"):
            return None  # text of any length
        if requested.spec.shape != stored.spec.shape:
            stored_kind = "" if stored.kind in PLAIN_ARRAY_KINDS else f", the data of a {stored.kind},"
            return f"shape: {requested.spec} is requested, {stored.spec}{stored_kind} is stored"
        wanted, found = (f"{record.spec} ({record.kind})" for record in (requested, stored))
        return f"dtype: {wanted} is requested, {found} is stored; arrays of these kinds are not cast"
    if (error := unreadable_error(stored)) is not None:
        return f"kind: the stored leaf cannot be loaded: {str(error).removeprefix('it was saved as ')}"
    requested_kind, stored_kind = (
        record.kind
        if not isinstance(record, ArrayRecord) or record.kind in ("str", "bytes")
        else f"array {record.spec}"
        for record in (requested, stored)
    )
    if requested_kind == stored_kind:
        return None
    return f"kind: {requested_kind} is requested, {stored_kind} is stored"
