"""Parts of an abstract tree that the stored tree lacks: moved, of another class, or not stored at all."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from ckptcore.errors import UnsupportedLeafError
from ckptcore.matching import forms
from ckptcore.matching.adjustments import find_quantized, lost_scales
from ckptcore.matching.differences import Difference, PartNames, Remedy, mismatch
from ckptcore.matching.forms import is_below, is_none, plain_key, plain_path, text_path
from ckptcore.matching.moves import Move, find_moves, in_order, whole_parts
from ckptcore.model.metadata import ArrayRecord, ValueRecord
from ckptcore.model.tree import Node, Skeleton, TreePath, format_path, leaf_count
from ckptcore.tree.shapes import outer_objects, outer_parts
from ckptcore.tree.suggestions import NameSuggestions

if TYPE_CHECKING:
    from ckptcore.matching.leaf_matching import Comparison

_OPTIMIZERS: Final = (".nnx.training.optimizer.Optimizer", ".nnx.training.optimizer.ModelAndOptimizer")
"""Suffixes of the names of Flax classes that have Optax states as dicts without types."""

_SEQUENCES: Final = ("list", "tuple")


def drop_tied(compared: Comparison) -> None:
    """Drop absent leaves that share the memory of a leaf that is stored."""
    memory: dict[int, tuple[object, ...]] = {}
    for position, handler in enumerate(compared.handlers):
        tied = None if handler is None else handler.memory_to_fill(compared.flat.leaves[position])
        if tied and all(part.extent for part in tied):
            memory[position] = tuple([part._replace(encoding="") for part in tied])
    filled = {memory[position] for position in memory if compared.numbers[position] is not None}
    compared.absent = [
        position for position in compared.absent if position not in memory or memory[position] not in filled
    ]


def expect_allowed(
    compared: Comparison,
    of_leaves: Sequence[Difference],
    display: str,
    rank_and_size: tuple[int, int],
    *,
    in_place: bool,
) -> None:
    """Check that all differences of two trees are allowed. See `match_leaves` for the arguments.

    Args:
        of_leaves: the differences of leaves that are stored in another form.

    Raises:
        TreeMismatchError: see `match_leaves`.
    """
    tree, matching = compared.tree, compared.matching
    unmatched = _Unmatched(compared)
    differences = unmatched.take_parts()
    lost = unmatched.lost
    names = [format_path(tree.paths[number]) for number in unmatched.unexpected]
    if matching.missing == "error" or lost:
        requested = [format_path(compared.paths[position]) for position in unmatched.absent]
        differences.extend(_missing_leaves(requested, names))
    elif matching.missing == "keep":
        differences.extend(_of_valueless(compared, unmatched.absent, rank_and_size))
    if matching.unexpected == "error" or lost:
        differences.extend(_unexpected_leaves(names))
    if not compared.is_same and not compared.by_name:
        allowed = "sequence" if matching.sequences == "either" else None
        of_containers = _container_differences(compared.flat.skeleton, tree.skeleton)
        differences.extend([difference for difference in of_containers if difference.sort != allowed])
    differences.extend(of_leaves)
    if compared.changes:
        differences.extend(lost_scales(tree, compared.changes, set(compared.numbers)))
    if lost and not differences:
        differences = [Difference("missing", "missing: no selected leaf is requested")]
    if differences:
        misshapen = _misshapen_in_objects(compared) if in_place and compared.chosen is None else []
        parts = PartNames(
            _kept_parts(compared, unmatched.absent),
            list(map(format_path, lost)),
            list(map(format_path, unmatched.elsewhere)),
            misshapen,
            find_quantized(tree),
        )
        raise mismatch(display, differences, parts)


class _Unmatched:
    """The leaves of a comparison that did not match, and the parts that they make up.

    Attributes:
        absent, unexpected: as for `Comparison`, without the leaves of parts with a difference of their own.
        lost: the paths of parts that must not keep all of their present values. See `_find_lost`.
        elsewhere: the paths of parts that would not be loaded, but are stored under another path.
    """

    def __init__(self, compared: Comparison) -> None:
        self._compared = compared
        self.absent = compared.absent
        self.unexpected = compared.unexpected
        self.lost = self._find_lost() if self.absent or compared.selects_leaves else []
        self.elsewhere: list[TreePath] = []

    def take_parts(self) -> list[Difference]:
        """Return the differences of whole parts, and remove their leaves from `absent` and `unexpected`.

        If the options keep missing leaves and ignore unexpected leaves, the leaves of moved parts stay in both, unless
        an object is lost.
        """
        differences: list[Difference] = []
        if self.absent and self.unexpected:
            matching = self._compared.matching
            if self.lost or (matching.missing, matching.unexpected) != ("keep", "ignore"):
                differences.extend(self._take_related())
            else:
                differences.extend(self._take_moved())
        if self.absent or self.unexpected:
            differences.extend(self._take_other_states())
        return differences

    def _find_lost(self) -> list[TreePath]:
        """Return the paths of objects without any stored leaf, if other leaves are stored below the same path.

        If no stored leaf is loaded at all, return only the empty path, or nothing if the request has only placeholders
        and None.
        """
        compared, missing = self._compared, set(self.absent)
        if not compared.loads_any:
            pairs = zip(compared.numbers, compared.flat.handlers, strict=True)
            is_skipped = any(number is not None and handler is not None for number, handler in pairs)
            return [()] if missing or is_skipped else []
        prefixes = _prefixes(compared, self.unexpected)
        return [
            path
            for path, _, leaves in outer_objects(compared.flat.shape)
            if (counted := _counted(compared, leaves)) and missing.issuperset(counted) and text_path(path) in prefixes
        ]

    def _take_related(self) -> list[Difference]:
        """Return the differences of missing and unexpected leaves that belong together, and remove their leaves.

        Leaves belong together if their keys have the same text, if one tree has a leaf where the other tree has a
        container, or if a part has another path.
        """
        requested, stored, differences = self._take_same()
        moves = self._moves(requested, stored)
        moved = [{pair[side] for move in moves for pair in move.pairs} for side in (0, 1)]
        self.absent = [position for position in requested if position not in moved[0]]
        self.unexpected = [number for number in stored if number not in moved[1]]
        differences.extend(_moved_parts(moves))
        # An object whose leaves moved is not lost: the error proposes the transform that loads it.
        before = self.lost
        if () in before and any(difference.sort in ("moved", "key") for difference in differences):
            self.lost = []
        elif before:
            self.lost = [path for path in self._find_lost() if path in before]
        self.elsewhere = [path for path in before if path and path not in self.lost]
        return differences

    def _take_moved(self) -> list[Difference]:
        """Return the differences of parts that are not loaded at all, but are stored under another path.

        Only considers objects, and plain containers that are at the top level or have most leaves of the container
        around them. Other containers may be new parts of a network.
        """
        compared, missing, sizes = self._compared, set(self.absent), dict[TreePath, int]()
        whole: dict[TreePath, list[int]] = {}
        for part in outer_parts(compared.flat.shape):
            counted = _counted(compared, part.leaves)
            sizes[part.path] = len(counted)
            is_large = part.is_object or len(part.path) == 1 or 2 * len(counted) > sizes[part.path[:-1]]
            if part.path and is_large and len(counted) > 1 and missing.issuperset(counted):
                whole[part.path] = counted
        if not whole:
            return []
        requested, stored, _ = self._take_same()
        moves = self._moves(requested, stored, any_number=True)
        moved = {position for move in moves for position, _ in move.pairs}
        whole = {path: counted for path, counted in whole.items() if moved.issuperset(counted)}
        positions = {position for counted in whole.values() for position in counted}
        chosen = [move for move in moves if any(position in positions for position, _ in move.pairs)]
        outermost = [path for path in whole if not is_below(path, whole)]
        differences = list(_moved_parts(in_order(chosen)))
        if differences:
            self.elsewhere = outermost
        else:  # too many moves to propose transforms, or no possible order of them
            self.lost = outermost
        return differences

    def _take_same(self) -> tuple[dict[int, TreePath], dict[int, TreePath], list[Difference]]:
        """Find missing and unexpected leaves whose keys have the same text, or where the other tree has a container.

        Returns:
            The paths of the remaining missing leaves, the paths of the remaining unexpected leaves, and the
            differences.
        """
        compared = self._compared
        requested = {position: compared.paths[position] for position in self.absent}
        stored = {number: compared.tree.paths[number] for number in self.unexpected}
        same_text: list[tuple[str, str]] = []
        if not compared.by_name:
            free = {path: number for number, path in stored.items()}
            numbers = forms.find_paths(list(requested.values()), free, forms.FOREIGN_PATH_FORMS)
            same_text = [
                (format_path(requested.pop(position)), format_path(stored.pop(number)))
                for position, number in zip(self.absent, numbers, strict=True)
                if number is not None
            ]
        of_structure = _structure_differences(
            list(map(plain_path, requested.values())), list(map(plain_path, stored.values()))
        )
        requested, stored = (
            {number: path for number, path in paths.items() if plain_path(path) not in of_structure}
            for paths in (requested, stored)
        )
        return requested, stored, [*_key_differences(same_text), *dict.fromkeys(of_structure.values())]

    def _moves(
        self, requested: Mapping[int, TreePath], stored: Mapping[int, TreePath], *, any_number: bool = False
    ) -> Sequence[Move]:
        """Find leaves that are stored under another path. See `find_moves`."""
        compared, tree = self._compared, self._compared.tree
        others = [path for number, path in enumerate(tree.paths) if number not in stored]
        if compared.by_name and all(len(path) == 1 for path in tree.paths):  # names that join the keys by dots
            requested = {position: forms.dotted_path(path) for position, path in requested.items()}

        def fits(position: int, number: int) -> bool:
            """Return True if a stored leaf is an array of the requested shape, or if one of the two is not an array."""
            records = compared.described(position), tree.leaves[number]
            return len({record.spec.shape for record in records if isinstance(record, ArrayRecord)}) < 2

        return find_moves(requested, stored, others, fits, any_number=any_number)

    def _take_other_states(self) -> Collection[Difference]:
        """Return a difference for each state whose stored class is a different class of the same library.

        Removes the leaves of these states from `absent` and `unexpected`.

        Keeping the missing leaves would mix two states: the mean of one optimizer with the variance of another.
        """
        compared = self._compared
        absent = {position: plain_path(compared.paths[position]) for position in self.absent}
        unexpected = {number: plain_path(compared.tree.paths[number]) for number in self.unexpected}
        states = _state_differences(
            compared.flat.skeleton, compared.tree.skeleton, absent.values(), unexpected.values()
        )

        self.absent = [position for position, path in absent.items() if not is_below(path, states)]
        self.unexpected = [number for number, path in unexpected.items() if not is_below(path, states)]
        return states.values()


def _counted(compared: Comparison, positions: Sequence[int]) -> list[int]:
    """Drop the positions of placeholders, and of each requested None that is not stored."""
    return [
        position
        for position in positions
        if compared.handlers[position] is not None
        and (compared.numbers[position] is not None or not is_none(compared.described(position)))
    ]


def _prefixes(compared: Comparison, numbers: Sequence[int]) -> set[TreePath]:
    """Return the paths, as text, of stored leaves and of the containers around them."""
    paths = (text_path(compared.tree.paths[number]) for number in numbers)
    return {path[:length] for path in paths for length in range(len(path) + 1)}


def _kept_parts(compared: Comparison, absent: Sequence[int]) -> Sequence[str]:
    """Return the names of the parts that would keep their present values. Ignores None and placeholders."""
    missing = set(absent)
    counted = _counted(compared, range(len(compared.paths)))
    chosen = [place for place, position in enumerate(counted) if position in missing]
    return list(map(format_path, whole_parts([compared.paths[position] for position in counted], chosen)))


def _misshapen_in_objects(compared: Comparison) -> list[str]:
    """Return names of stored leaves that differ in shape from leaves of objects. A selection can leave them out."""
    inside = {position for _, _, leaves in outer_objects(compared.flat.shape) for position in leaves}
    numbers = [compared.numbers[position] for position in compared.misshapen if position in inside]
    return ["/".join(map(str, compared.tree.paths[number])) for number in numbers if number is not None]


def _of_valueless(compared: Comparison, absent: Sequence[int], rank_and_size: tuple[int, int]) -> Iterator[Difference]:
    """Yield the differences for missing leaves that have no value to keep."""
    for position in absent:
        handler = compared.handlers[position]
        assert handler is not None  # only requested leaves are absent
        if isinstance(compared.described(position), ValueRecord):
            continue
        try:
            handler.shards(compared.flat.leaves[position], *rank_and_size)  # raises for a leaf without elements
        except UnsupportedLeafError as error:
            name = format_path(compared.paths[position])
            line = f"missing: {name} is not stored, and the abstract leaf has no value to keep: {error}"
            yield Difference("missing", line, Remedy("missing", ["placeholder"]))


def sparse_parts(compared: Comparison) -> Sequence[str]:
    """Return a message for each object with less than half of its leaves stored.

    Also returns a message for each plain container without any stored leaf, if other leaves are stored below its path.
    """
    missing, messages = set(compared.absent), list[str]()
    prefixes, empty = _prefixes(compared, compared.unexpected), set[TreePath]()
    for part in outer_parts(compared.flat.shape):
        counted = _counted(compared, part.leaves)
        stored = len(counted) - len(missing.intersection(counted))
        is_empty = bool(counted) and not stored and text_path(part.path) in prefixes
        if (part.is_object and 2 * stored < len(counted)) or (is_empty and not part.is_object):
            if is_below(part.path, empty):
                continue
            empty.add(part.path)
            messages.append(
                f"only {stored} of the {len(counted)} leaves of {format_path(part.path)}, a "
                f"{type(part.like).__qualname__}, are stored; a LoadReport lists the others"
            )
    return messages


def _key_differences(pairs: Sequence[tuple[str, str]]) -> Iterator[Difference]:
    """Yield the differences for requested and stored leaves whose keys have the same text.

    Args:
        pairs: the requested path and the stored path of each leaf.
    """
    for requested, stored in pairs:
        line = f"key: {requested} is requested, {stored} is stored; their keys have the same text"
        yield Difference("key", line, Remedy("keys", ["text"]))


def _moved_parts(moves: Sequence[Move]) -> Iterator[Difference]:
    """Yield the differences for parts that are stored under another path."""
    for move in moves:
        requested, stored = move.shown
        count = len(move.pairs)
        leaves = "" if move.is_leaf else f", with {count} {'leaf' if count == 1 else 'leaves'} of the same names"
        line = f"moved: {requested} is requested, {stored} is stored{leaves}"
        yield Difference("moved", line, Remedy("keys", ["text"]) if move.has_index else None, move.names)


def _missing_leaves(names: Sequence[str], unexpected: Sequence[str]) -> Iterator[Difference]:
    """Yield the differences for leaves that are not stored. Suggests unexpected leaves with similar names."""
    stored = NameSuggestions(unexpected)
    for name in names:
        near = stored.nearest(name)
        hint = "" if near is None else f"; did you mean {near}?"
        yield Difference("missing", f"missing: {name} is not stored{hint}", Remedy("missing", ["keep"]))


def _unexpected_leaves(names: Sequence[str]) -> Iterator[Difference]:
    """Yield the differences for stored leaves that are not requested."""
    for name in names:
        line = f"unexpected: {name} is stored and not requested"
        yield Difference("unexpected", line, Remedy("unexpected", ["ignore"]))


def _structure_differences(
    requested: Collection[TreePath], stored: Collection[TreePath]
) -> Mapping[TreePath, Difference]:
    """Find leaves of one tree where the other tree has a container. No option allows this, because data would be lost.

    Args:
        requested: the paths of requested leaves that are not stored.
        stored: the paths of stored leaves that are not requested.

    Returns:
        The differences by path. All paths in one container have the same difference.
    """
    differences: dict[TreePath, Difference] = {}
    for leaves, others, both in (
        (requested, stored, "a leaf is requested, a container is stored"),
        (stored, requested, "a container is requested, a leaf is stored"),
    ):
        known = set(leaves)
        for path in others:
            for length in range(1, len(path)):
                if (top := path[:length]) in known:
                    difference = Difference("kind", f"{format_path(top)}: kind: {both}")
                    differences[path] = differences[top] = difference
    return differences


def _common_nodes(requested: Skeleton, stored: Skeleton, path: TreePath = ()) -> Iterator[tuple[TreePath, Node, Node]]:
    """Yield containers with the same path in two trees, outer ones first. Keys match as in `match_leaves`."""
    if not isinstance(requested, Node) or not isinstance(stored, Node):
        return
    yield path, requested, stored
    if not any(isinstance(child, Node) for child in requested.children):
        return
    exact = dict(zip(stored.keys, stored.children, strict=True))
    loose = {plain_key(key): child for key, child in exact.items()}
    for key, child in zip(requested.keys, requested.children, strict=True):
        other = exact.get(key, loose.get(plain_key(key)))
        if other is not None:
            yield from _common_nodes(child, other, (*path, key))


def _state_differences(
    requested: Skeleton, stored: Skeleton, absent: Collection[TreePath], unexpected: Collection[TreePath]
) -> Mapping[TreePath, Difference]:
    """Find states of another class, such as of another optimizer of the same library. No option allows them.

    Args:
        requested, stored: the containers.
        absent: the paths of requested leaves that are not stored, without attributes.
        unexpected: the paths of stored leaves that are not requested, without attributes.

    Returns:
        By path, the difference of each state of another class.
    """
    differing = {path[:length] for path in (*absent, *unexpected) for length in range(len(path))}
    states: dict[TreePath, Difference] = {}
    in_optimizers: set[TreePath] = set()
    for shown, node, other in _common_nodes(requested, stored):
        path = plain_path(shown)
        if path not in differing or is_below(path, states):
            continue
        inside = path[:-1] in in_optimizers
        both = None
        if _are_other_states(node, other):
            names = [str(each.type).rpartition(".")[2] for each in (node, other)]
            both = f"a {names[0]} is requested, a {names[1]} is stored"
        elif node.type == other.type and str(node.type).endswith(_OPTIMIZERS):
            inside = True
        elif inside and (fields := _other_fields(node, other)) is not None:
            both = f"a state with {fields[0]} is requested, one with {fields[1]} is stored"
        if both is not None:
            states[path] = Difference("kind", f"{format_path(shown)}: kind: {both}")
        # Do not search below an untyped node with str keys: its keys are names of parameters, not fields of a state.
        elif inside and not (node.type is None and any(isinstance(key, str) for key in node.keys)):
            in_optimizers.add(path)
    return states


def _are_other_states(node: Node, other: Node) -> bool:
    """Return True for two states with leaves, if their types are, by their names, different classes of one library.

    Classes of ``__main__`` do not count, because a program may rename its own classes.
    """
    names = node.type, other.type
    if None in names or not leaf_count(node) or not leaf_count(other):
        return False
    parts = [str(name).split(".") for name in names]
    is_state = all(len(part) > 1 and part[-1].endswith("State") for part in parts)
    return is_state and parts[0][0] == parts[1][0] != "__main__" and parts[0][-1] != parts[1][-1]


def _other_fields(node: Node, other: Node) -> tuple[str, str] | None:
    """Return the fields of two states without types if each lacks a field of the other state; None otherwise."""
    if node.type is not None or other.type is not None or not leaf_count(node) or not leaf_count(other):
        return None
    fields = [set(map(plain_key, each.keys)) for each in (node, other)]
    if fields[0] <= fields[1] or fields[1] <= fields[0]:
        return None
    requested, stored = (", ".join(sorted(map(str, keys))) for keys in fields)
    return requested, stored


def _container_differences(requested: Skeleton, stored: Skeleton) -> Iterator[Difference]:
    """Yield differences between lists and tuples, and between empty dicts and empty sequences, in either direction.

    Containers with children are compared by their leaves.
    """
    for path, node, other in _common_nodes(requested, stored):
        # An object matches a dict or a list, because it becomes one if it is loaded without its class.
        empty = not node.keys and not other.keys and "object" not in (node.kind, other.kind)
        if {node.kind, other.kind} == {"list", "tuple"}:
            line = f"{format_path(path)}: sequence: a {node.kind} is requested, a {other.kind} is stored"
            yield Difference("sequence", line, Remedy("sequences", ["either"]))
        elif empty and (node.kind in _SEQUENCES) != (other.kind in _SEQUENCES):
            line = f"{format_path(path)}: kind: an empty {node.kind} is requested, an empty {other.kind} is stored"
            yield Difference("kind", line)
