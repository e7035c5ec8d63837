"""Matching: the stored leaf for each leaf of an abstract tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ckptcore.builtin.host_leaves import PLAIN_ARRAY_KINDS, VALUE_KINDS, HostValueHandler
from ckptcore.errors import CorruptCheckpointError, TreeMismatchError, UnsupportedLeafError
from ckptcore.matching import forms
from ckptcore.matching.options import EXACT, LeafChange, Matched, Matching
from ckptcore.model.arrays import HostArray, sort_of_numbers
from ckptcore.model.columns import COLUMN_KINDS
from ckptcore.model.metadata import ArrayRecord, LeafRecord, TreeMetadata, ValueRecord, unreadable_error
from ckptcore.model.tree import Node, Skeleton, TreePath, format_path
from ckptcore.protocols import LeafHandler
from ckptcore.tree.flattening import Flat

if TYPE_CHECKING:
    from ckptcore.matching.differences import Difference

_SEQUENCES: Final = {"list", "tuple"}
"""The kinds of columns of sequences. `Matching.sequences` decides whether the two kinds match."""

_VALUES: Final = HostValueHandler()


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
    without its type is a dict. A request may omit stored leaves that only some of the saving processes had. A requested
    None need not be stored, and a stored None need not be requested, because for JAX, None is a container without
    leaves. With ``Matching(values="error")``, both are required, unless the additional rules below apply.

    Other software may not store exact keys and types. For its checkpoints, and with ``Matching(keys="text")``,
    additional rules apply:

    - Keys with the same text match, if there is no better match and no two leaves have the same text: Orbax stores keys
      of dicts and names of attributes as text, ``{1: ...}`` as ``{"1": ...}``.
    - A leaf matches the stored name that joins its keys by dots, if the stored tree is a flat dict of such names.
    - A stored None matches a container without leaves: Orbax stores empty named tuples (``optax.EmptyState``) as None.
    - A number matches an array without axes, and vice versa, if no precision is lost (see `number_difference`): Orbax
      stores both as arrays. ``Matching(values="stored")``, the default, allows this for all checkpoints.
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
        in_place: True if the leaves are filled in place. A leaf that is not stored, but shares the memory of a stored
            leaf, is then filled with that leaf: safetensors files of other software have a tied weight under only one
            of its names.

    Raises:
        TreeMismatchError: lists every difference that is not allowed. Regardless of `matching`, also raised in three
            cases: no requested leaf is stored; no leaf of an object is stored, but other leaves below its path are; or
            all leaves of a part are stored under another path only.
        CorruptCheckpointError: the data of a requested leaf are missing or damaged.
        UnsupportedLeafError: a leaf of the abstract tree cannot be described; names the leaf.
    """
    paths = list(flat.paths())
    is_same = flat.skeleton == tree.skeleton and None not in flat.handlers
    path_forms = forms.FOREIGN_PATH_FORMS if by_name else forms.PATH_FORMS
    numbers: list[int | None] = list(range(len(paths)))
    if not is_same:
        numbers = forms.find_paths(paths, {path: number for number, path in enumerate(tree.paths)}, path_forms)
    handlers = list(flat.handlers)
    if chosen is not None:
        handlers = [
            None if number is not None and number not in chosen else handler
            for number, handler in zip(numbers, handlers, strict=True)
        ]
    compared = Comparison(flat, tree, matching, by_name, chosen, is_same, paths, numbers, handlers)
    compared.find_unmatched()
    differences = compared.of_leaves()
    sparse: Sequence[str] = ()
    if differences or compared.differs:
        from ckptcore.matching import parts  # only if the trees differ

        if compared.absent and in_place:
            parts.drop_tied(compared)
        parts.expect_allowed(compared, differences, display, rank_and_size, in_place=in_place)
        # With placeholders, the caller expects parts without values: a warning would only repeat the request.
        if compared.absent and chosen is None and matching.missing != "placeholder":
            sparse = parts.sparse_parts(compared)
    if matching.missing == "placeholder":
        for position in compared.absent:
            handlers[position] = None
    loaded = {number for number in numbers if number is not None}
    unrequested = [number for number in tree.held_by if number not in loaded]
    unchosen = set[int]() if chosen is None else set(range(len(tree.leaves))) - chosen - loaded
    return Matched(
        [None if handler is None else number for number, handler in zip(numbers, handlers, strict=True)],
        handlers,
        compared.absent,
        sorted({*compared.unexpected, *unrequested, *unchosen}),
        compared.changes,
        compared.arrays,
        flat.skeleton,
        flat.leaves,
        sparse=sparse,
    )


def _is_skipped(path: TreePath, skips: set[TreePath], dotted: tuple[str, ...]) -> bool:
    """Return True if a stored leaf is at the path of a placeholder, or below it."""
    if path in skips or forms.is_below(path, skips):
        return True
    return bool(dotted) and len(path) == 1 and isinstance(path[0], str) and path[0].startswith(dotted)


def _leafless(node: Skeleton, path: TreePath, paths: set[TreePath]) -> bool:
    """Add the paths, as text, of all containers without leaves. Return True if the node is such a container."""
    if not isinstance(node, Node):
        return False
    empty = [_leafless(child, (*path, str(key)), paths) for key, child in zip(node.keys, node.children, strict=True)]
    if all(empty):
        paths.add(path)
    return all(empty)


@dataclass(slots=True)
class Comparison:
    """An abstract tree and the stored tree, after matching by path.

    Attributes:
        flat, tree, matching, by_name, chosen: as for `match_leaves`.
        is_same: True if both trees have the same containers, and no placeholder is requested.
        paths: by leaf of the abstract tree, its path.
        numbers: by leaf, the number of the stored leaf, or None.
        handlers: by leaf, its handler; None for a placeholder. If a number is requested and an array is stored,
            `of_leaves` replaces the handler.
        absent: positions of requested leaves that are not stored.
        unexpected: numbers of stored leaves that are not requested.
        changes: by number of a stored array, the change that `of_leaves` found to be allowed.
        arrays: by position of a leaf, the array that `of_leaves` built from a stored Python number.
        misshapen: positions of leaves that are stored with another shape. `of_leaves` adds them.
    """

    flat: Flat
    tree: TreeMetadata
    matching: Matching
    by_name: bool
    chosen: frozenset[int] | None
    is_same: bool
    paths: Sequence[TreePath]
    numbers: Sequence[int | None]
    handlers: list[LeafHandler | None]
    absent: list[int] = field(default_factory=list)
    unexpected: list[int] = field(default_factory=list)
    changes: dict[int, LeafChange] = field(default_factory=dict)
    arrays: dict[int, HostArray] = field(default_factory=dict)
    misshapen: list[int] = field(default_factory=list)

    @property
    def loads_any(self) -> bool:
        """True if a stored leaf is loaded."""
        pairs = zip(self.numbers, self.handlers, strict=True)
        return any(number is not None and handler is not None for number, handler in pairs)

    @property
    def selects_leaves(self) -> bool:
        """True if a selection has stored leaves, and not only containers without leaves."""
        return self.chosen is not None and any(number < len(self.tree.leaves) for number in self.chosen)

    @property
    def differs(self) -> bool:
        """True if the trees have, or may have, differences that `of_leaves` did not return."""
        is_equal = (self.is_same or self.by_name) and not (self.absent or self.unexpected or self.changes)
        return not is_equal or (self.selects_leaves and not self.loads_any)

    @property
    def _is_loose(self) -> bool:
        """True if None matches a missing leaf, and a number matches an array without axes."""
        return self.by_name or self.matching.values == "stored"

    def described(self, position: int) -> LeafRecord:
        """Describe a leaf of the abstract tree that is not a placeholder.

        Raises:
            UnsupportedLeafError: names the leaf.
        """
        handler = self.handlers[position]
        assert handler is not None
        try:
            return handler.describe(self.flat.leaves[position])
        except UnsupportedLeafError as error:
            raise UnsupportedLeafError(f"{format_path(self.paths[position])}: {error}") from error

    def find_unmatched(self) -> None:
        """Find the requested leaves that are not stored, and the stored leaves that are neither requested nor skipped.

        Other software may store an array under several names. If one name is requested, all names count as requested.
        """
        for position, (number, handler) in enumerate(zip(self.numbers, self.handlers, strict=True)):
            if number is not None or handler is None:
                continue
            if not (self._is_loose and forms.is_none(self.described(position))):
                self.absent.append(position)
        tree, by_name = self.tree, self.by_name
        loaded = {number for number in self.numbers if number is not None}
        if len(loaded) == len(tree.leaves):
            return
        form = forms.text_path if by_name else forms.plain_path
        skipped = [path for path, handler in zip(self.paths, self.flat.handlers, strict=True) if handler is None]
        skips = {form(prefix) for prefix in skipped}
        dotted: tuple[str, ...] = ()
        leafless, arrays = set[TreePath](), set[int]()
        if by_name:
            dotted = tuple([".".join(map(str, prefix)) + "." for prefix in skipped])
            _leafless(self.flat.skeleton, (), leafless)
            arrays = {tree.aliases.get(number, number) for number in loaded}
        self.unexpected = [
            number
            for number, path in enumerate(tree.paths)
            if number not in loaded
            and (self.chosen is None or number in self.chosen)
            and tree.aliases.get(number, number) not in arrays
            and number not in tree.held_by
            and not _is_skipped(form(path), skips, dotted)
            and not (forms.is_none(tree.leaves[number]) and (self._is_loose or forms.text_path(path) in leafless))
        ]

    def of_leaves(self) -> list[Difference]:
        """Return the differences of leaves that are stored in another form. Adds allowed changes to `changes`."""
        differences: list[Difference] = []
        for position, number in enumerate(self.numbers):
            handler = self.handlers[position]
            if number is None or handler is None:
                continue
            stored = self.tree.leaves[number]
            requested = self.described(position)
            if requested is stored:
                continue
            if (
                isinstance(requested, ArrayRecord)
                and isinstance(stored, ArrayRecord)
                and forms.are_plain(requested, stored)
            ):
                if requested.spec != stored.spec:
                    differences.extend(self._adjust(position, number, requested, stored))
                continue
            if isinstance(damage := unreadable_error(stored), CorruptCheckpointError):
                raise CorruptCheckpointError(f"{format_path(self.paths[position])} cannot be loaded: {damage}")
            reason = self._other_form(position, handler, requested, stored)
            if reason is None:
                continue
            sort = reason.partition(":")[0]
            is_value = sort in ("kind", "value") and forms.is_plain_value(stored) and self._is_value(position)
            if is_value and self.matching.values == "stored":
                self._take_stored(position, handler, requested, stored)
                continue
            from ckptcore.matching.differences import Difference, Remedy  # only if the trees differ

            remedy = Remedy("values", ["stored"]) if is_value else None
            remedy = Remedy("sequences", ["either"]) if sort == "sequence" else remedy
            differences.append(Difference(sort, f"{format_path(self.paths[position])}: {reason}", remedy))
        return differences

    def _adjust(self, position: int, number: int, requested: ArrayRecord, stored: ArrayRecord) -> Sequence[Difference]:
        """Add the change of an array to `changes`, or return the differences if the change is not allowed."""
        from ckptcore.matching.adjustments import adjust  # only if the trees differ

        allowed = forms.with_casts_of_numbers(self.matching, requested, stored)
        change = adjust(format_path(self.paths[position]), requested.spec, stored.spec, allowed)
        if isinstance(change, LeafChange):
            self.changes[number] = change
            return ()
        if any(difference.sort == "shape" for difference in change):
            self.misshapen.append(position)
        return change

    def _other_form(self, position: int, handler: LeafHandler, requested: LeafRecord, stored: LeafRecord) -> str | None:
        """Return why a stored leaf does not have the requested form and cannot be converted to it; None if it can."""
        leaf = self.flat.leaves[position]
        if forms.is_of_form(requested, stored):
            reason = _build_difference(leaf, handler, stored)
        elif self._is_loose and forms.are_interchangeable(requested, stored):
            reason = forms.number_difference(requested, stored)
            if reason is None and isinstance(requested, ValueRecord):
                self.handlers[position] = forms.NumberOfArray(handler, requested.kind)
            elif reason is None and isinstance(requested, ArrayRecord) and isinstance(stored, ValueRecord):
                array = forms.array_of_number(stored, requested.spec)
                assert array is not None  # there is no difference
                self.arrays[position] = array
        elif {requested.kind, stored.kind} == _SEQUENCES and isinstance(stored, ValueRecord):
            same = self.by_name or self.matching.sequences == "either"
            reason = None if same else f"sequence: a {requested.kind} is requested, a {stored.kind} is stored"
        else:
            reason = _special_difference(leaf, handler, requested, stored)
            reason = reason or forms.kind_difference(requested, stored)
        if reason is None and isinstance(stored, ValueRecord) and stored.kind in COLUMN_KINDS.values():
            return forms.column_difference(leaf, stored, self.matching)
        return reason

    def _is_value(self, position: int) -> bool:
        """Return True if a plain Python value is requested, not an array or an object that is stored as a value."""
        leaf = self.flat.leaves[position]
        return type(leaf) in VALUE_KINDS or isinstance(leaf, list | tuple | dict)

    def _take_stored(self, position: int, handler: LeafHandler, requested: LeafRecord, stored: LeafRecord) -> None:
        """Choose a handler that loads a plain value in its stored form. An array without axes becomes a number.

        If a float is requested, a stored int becomes the equal float, if there is one.
        """
        if not isinstance(stored, ArrayRecord):
            is_wider = isinstance(requested, ValueRecord) and (requested.kind, stored.kind) == ("float", "int")
            self.handlers[position] = forms.FloatOfInt() if is_wider else _VALUES
        elif (sort := sort_of_numbers(stored.spec.dtype)) is not None and isinstance(requested, ValueRecord):
            self.handlers[position] = forms.NumberOfArray(handler, sort)


def _build_difference(leaf: object, handler: LeafHandler, stored: LeafRecord) -> str | None:
    """Try to build the requested type from a stored value. Return the reason if this fails; None if it succeeds."""
    try:
        handler.build(leaf, stored, ())
    except TreeMismatchError as error:
        return error.differences[0]
    return None


def _special_difference(leaf: object, handler: LeafHandler, requested: LeafRecord, stored: LeafRecord) -> str | None:
    """Return why the handler of a special kind of array, such as random keys, refuses a stored array."""
    if not isinstance(stored, ArrayRecord) or requested.kind in (*PLAIN_ARRAY_KINDS, "str", "bytes"):
        return None
    try:
        handler.wanted(leaf, stored)
    except UnsupportedLeafError as error:
        return f"kind: {error}"
    return None
