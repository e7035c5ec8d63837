"""Records of a checkpoint: its leaves, their tree, and its objects with block checksums."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar, cast

from ckptcore.errors import CheckpointError, CorruptCheckpointError, InvalidLocationError, UnsupportedLeafError
from ckptcore.model.arrays import ArraySpec, dtype_from_name
from ckptcore.model.tree import (
    JSON,
    Skeleton,
    TreePath,
    damaged_tree,
    leaf_count,
    leaf_paths,
    skeleton_from_json,
    skeleton_to_json,
)

PLAIN_ARRAY: Final = "array"
"""The kind of a plain array."""

T = TypeVar("T")

_NO_NOTES: Final[Mapping[str, JSON]] = {}


PARTS: Final = "__parts__"
"""A key in the dict that stores an array of a framework in parts. Its value is a text that describes the array."""

UNREADABLE: Final = "unreadable"
"""The kind of a leaf that cannot be loaded, although the other leaves of its checkpoint can be loaded."""


class ArrayRecord(NamedTuple):
    """An array leaf.

    Attributes:
        spec: shape and dtype of the whole array, over all processes.
        kind: the meaning of the array: `PLAIN_ARRAY`, or a name that its leaf handler defines (``numpy.scalar``,
            ``jax.key``). A handler that does not know the kind treats the leaf as a plain array.
        cuts: for each axis, the sorted inner boundaries of shards, in elements; None if there are no boundaries.
        notes: JSON of its leaf handler, such as the framework, the sharding and conversions. Reading the elements never
            needs them. Several records may share one object, which must not be changed.
    """

    spec: ArraySpec
    kind: str = PLAIN_ARRAY
    cuts: tuple[tuple[int, ...], ...] | None = None
    notes: Mapping[str, JSON] = _NO_NOTES

    @property
    def framework(self) -> str | None:
        """The framework of the saved array according to its notes, such as ``"torch"``; None if unknown."""
        framework = self.notes.get("framework")
        return framework if isinstance(framework, str) else None


class ValueRecord(NamedTuple):
    """A value that is stored in the root.

    Attributes:
        kind: the name of its type: none, bool, int, float, complex, str, bytes; list, tuple, dict for a column; or a
            name that its leaf handler defines. `UNREADABLE` for a leaf of other software that no load can return: see
            `unreadable_leaf`.
        value: the value as JSON, in the encoding of its leaf handler.
    """

    kind: str
    value: JSON


LeafRecord: TypeAlias = ArrayRecord | ValueRecord
"""The record of one leaf."""


def unreadable_leaf(error: CheckpointError) -> ValueRecord:
    """Return the record of a leaf of other software that cannot be loaded, although the other leaves can be loaded.

    Args:
        error: a message about this leaf alone, which says what is stored, why it cannot be loaded, and what to do. A
            CorruptCheckpointError means that data are missing or damaged. `ckptcore.verify` then reports them.
    """
    if isinstance(error, CorruptCheckpointError):
        return ValueRecord(UNREADABLE, {"reason": str(error), "damaged": True, "key": error.key})
    return ValueRecord(UNREADABLE, {"reason": str(error), "damaged": False})


def unreadable_error(record: LeafRecord) -> CorruptCheckpointError | UnsupportedLeafError | None:
    """Return the error for a request of a leaf that cannot be loaded; None for other leaves."""
    if not isinstance(record, ValueRecord) or record.kind != UNREADABLE:
        return None
    match record.value:
        case {"reason": str() as reason, "damaged": True, "key": str() | None as key}:
            return CorruptCheckpointError(reason, key=key)
        case {"reason": reason}:
            return UnsupportedLeafError(str(reason))
        case value:
            return UnsupportedLeafError(f"it was saved as {value}")


@dataclass(frozen=True)
class TreeMetadata:
    """The structure of a saved value and a record for each leaf.

    Attributes:
        skeleton: the containers.
        leaves: a record for each leaf, in the order of the skeleton.
        aliases: for each leaf that shares its bytes with an earlier leaf, the number of the earlier leaf.
        held_by: for each leaf that only some of the saving processes held, the ascending ranks of these processes. A
            rank that held no elements of an array is left out. A process may load the tree without such a leaf. Several
            leaves may share one tuple.
    """

    skeleton: Skeleton
    leaves: tuple[LeafRecord, ...]
    aliases: Mapping[int, int] = field(default_factory=dict)
    held_by: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @cached_property
    def paths(self) -> tuple[TreePath, ...]:
        """The path of each leaf."""
        return tuple(leaf_paths(self.skeleton))

    @cached_property
    def arrays(self) -> Mapping[int, ArrayRecord]:
        """The records of the arrays, by leaf, in order; aliases included."""
        return {leaf: record for leaf, record in enumerate(self.leaves) if isinstance(record, ArrayRecord)}

    @property
    def nbytes(self) -> int:
        """Bytes of all array leaves; tied arrays count once."""
        return sum(record.spec.nbytes for leaf, record in self.arrays.items() if leaf not in self.aliases)

    def to_json(self) -> dict[str, JSON]:
        """Return the tree as JSON: columns for arrays, and a row for each value. Columns are small and fast to parse.

        Equal notes are stored once in ``notes``, because thousands of arrays may have the same few shardings. The
        column ``note`` has their indices.
        """
        arrays: list[JSON] = []
        values: list[JSON] = []
        dtypes: dict[str, int] = {}
        dtype_column: list[JSON] = []
        shape_column: list[JSON] = []
        extras: dict[str, JSON] = {}
        notes = _NoteTable()
        note_column: list[JSON] = []
        for number, record in enumerate(self.leaves):
            if isinstance(record, ValueRecord):
                values.append([number, record.kind, record.value])
                continue
            arrays.append(number)
            dtype_column.append(dtypes.setdefault(record.spec.dtype, len(dtypes)))
            shape_column.append(record.spec.shape)
            plain = record.kind == PLAIN_ARRAY
            note_column.append(notes.number(record.notes) if record.notes else None)
            if not plain or record.cuts is not None:
                extra: dict[str, JSON] = {}
                if not plain:
                    extra["kind"] = record.kind
                if record.cuts is not None:
                    extra["cuts"] = record.cuts
                extras[str(number)] = extra
        encoded: dict[str, JSON] = {
            "skeleton": skeleton_to_json(self.skeleton),
            "count": len(self.leaves),
            "dtypes": list(dtypes),
            "dtype": dtype_column,
            "shape": shape_column,
            "values": values,
            "extras": extras,
            "aliases": [[alias, target] for alias, target in self.aliases.items()],
        }
        if notes.table:
            encoded["notes"] = notes.table
            encoded["note"] = note_column
        if self.held_by:
            leaves: dict[tuple[int, ...], list[int]] = {}
            for number, ranks in self.held_by.items():
                leaves.setdefault(ranks, []).append(number)
            encoded["held_by"] = [[ranks, numbers] for ranks, numbers in leaves.items()]
        return encoded

    @classmethod
    def from_json(cls, encoded: JSON) -> TreeMetadata:
        """Decode the result of `to_json`. The JSON may be hostile.

        Raises:
            CorruptCheckpointError: the JSON is not a tree.
            UnsupportedLeafError: the JSON names an unknown dtype.
        """
        try:
            return _decode(encoded)
        except (CorruptCheckpointError, UnsupportedLeafError):
            raise
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError, OverflowError) as error:
            raise damaged_tree(f"the leaf table is damaged: {error!r}") from error


class _NoteTable:
    """The distinct notes of a tree, in `table`. Records refer to notes by their position in the table."""

    def __init__(self) -> None:
        self.table: list[JSON] = []
        self._numbers: dict[str, int] = {}
        self._seen: dict[int, int] = {}

    def number(self, notes: Mapping[str, JSON]) -> int:
        # Compare by identity first, because most records share one object, and the JSON of a sharding over many devices
        # is long. Ids stay unique, because the records keep the objects alive.
        known = self._seen.get(id(notes))
        if known is None:
            known = self._numbers.setdefault(json.dumps(dict(notes)), len(self.table))
            if known == len(self.table):
                self.table.append(dict(notes))
            self._seen[id(notes)] = known
        return known


def _decode(encoded: JSON) -> TreeMetadata:
    table = _expect(encoded, dict)
    dtype_names = [_expect(name, str) for name in _expect(table["dtypes"], list)]
    for name in dtype_names:
        dtype_from_name(name)
    dtype_column = _expect(table["dtype"], list)
    shape_column = _expect(table["shape"], list)
    values = _expect(table["values"], list)
    extras = _expect(table["extras"], dict)
    count = _natural(table["count"])
    note_table: list[Mapping[str, JSON]] = [_expect(notes, dict) for notes in _expect(table.get("notes", []), list)]
    note_column = _expect(table["note"], list) if note_table else [None] * len(shape_column)
    if not len(dtype_column) == len(shape_column) == len(note_column) == count - len(values):
        raise damaged_tree("its columns have different lengths")
    skeleton = skeleton_from_json(table["skeleton"], count)
    if leaf_count(skeleton) != count:
        raise damaged_tree("its skeleton and its leaf table have different numbers of leaves")
    leaves: list[LeafRecord | None] = [None] * count
    for number, kind, value in values:
        number = _natural(number)
        if leaves[number] is not None:
            raise damaged_tree("a leaf has two values")
        leaves[number] = ValueRecord(_expect(kind, str), value)
    _check_shapes(shape_column)
    # Exact types, because isinstance accepts a bool as an int.
    if {*map(type, dtype_column)} - {int} or {*map(type, note_column)} - {int, type(None)}:
        raise damaged_tree("a column of numbers has other values")
    free = range(count) if not values else [number for number, leaf in enumerate(leaves) if leaf is None]
    arrays = _array_records(note_column, dtype_column, shape_column, note_table, dtype_names)
    if not values:
        leaves = [*arrays]
    else:
        for number, array in zip(free, arrays, strict=True):
            leaves[number] = array
    if extras:
        for number, plain in zip(free, arrays, strict=True):
            extra = extras.get(str(number))
            if extra is not None:
                kind = _expect(_expect(extra, dict).get("kind", PLAIN_ARRAY), str)
                leaves[number] = plain._replace(kind=kind, cuts=_cuts(extra.get("cuts"), plain.spec))
    aliases: dict[int, int] = {}
    for alias, target in _expect(table["aliases"], list):
        record, original = leaves[_natural(alias)], leaves[_natural(target)]
        if (
            not isinstance(record, ArrayRecord)
            or not isinstance(original, ArrayRecord)
            or record.spec != original.spec
            or target >= alias
            or target in aliases
        ):
            raise damaged_tree(f"leaf {alias} cannot share leaf {target}")
        aliases[alias] = target
    held_by = _held_by(table.get("held_by", []), count)
    return TreeMetadata(skeleton, tuple(cast(list[LeafRecord], leaves)), aliases, held_by)  # all are set


def _array_records(
    note_column: list[Any],
    dtype_column: list[Any],
    shape_column: list[Any],
    notes: list[Mapping[str, JSON]],
    dtypes: list[str],
) -> list[ArrayRecord]:
    """Return a record for each row. Equal arrays, the common case, share one immutable record."""
    shapes = [*map(tuple, shape_column)]
    if not notes and len(set(dtype_column)) == 1:  # the common case: only shapes differ
        of_shape = {shape: _plain_record(None, dtype_column[0], shape, notes, dtypes) for shape in set(shapes)}
        return [*map(of_shape.__getitem__, shapes)]
    alike = [*zip(note_column, dtype_column, shapes, strict=True)]
    records = {key: _plain_record(*key, notes, dtypes) for key in set(alike)}
    return [*map(records.__getitem__, alike)]


def _plain_record(
    note: int | None, dtype_number: int, shape: tuple[int, ...], notes: list[Mapping[str, JSON]], dtypes: list[str]
) -> ArrayRecord:
    if len(shape) > 64:
        raise damaged_tree(f"an array has {len(shape)} axes")
    if min(shape, default=0) < 0:
        raise damaged_tree(f"{min(shape)} is not a valid length of an axis")
    spec = ArraySpec(shape, dtypes[_natural(dtype_number)])
    if 0 in shape and not spec.is_possible:  # other arrays are compared with the sizes of their objects
        raise damaged_tree(f"an array cannot be {spec}")
    return ArrayRecord(spec, notes=_NO_NOTES if note is None else notes[_natural(note)])


def _check_shapes(column: list[Any]) -> None:
    """Refuse anything but lists of integers. Checks whole columns, because a checkpoint may have very many arrays."""
    if {*map(type, column)} - {list, tuple}:
        raise damaged_tree("a shape is not a list")
    kinds = {*map(type, itertools.chain.from_iterable(column))} - {int}
    if kinds:
        raise damaged_tree(f"a {kinds.pop().__name__} is not a valid length of an axis")


def _held_by(encoded: JSON, count: int) -> dict[int, tuple[int, ...]]:
    held: dict[int, tuple[int, ...]] = {}
    for ranks_json, numbers in _expect(encoded, list):
        ranks = tuple([_natural(rank) for rank in _expect(ranks_json, list)])
        if not ranks or any(first >= second for first, second in itertools.pairwise(ranks)):
            raise damaged_tree("the ranks that hold a leaf are not in order")
        for number in _expect(numbers, list):
            if _natural(number) >= count or number in held:
                raise damaged_tree(f"leaf {number} has no valid ranks")
            held[number] = ranks
    return held


def _cuts(encoded: JSON, spec: ArraySpec) -> tuple[tuple[int, ...], ...] | None:
    """Return the boundaries of shards. None if they are invalid, because arrays can be read without them."""
    if not isinstance(encoded, list) or len(encoded) != len(spec.shape):
        return None
    if {*map(type, encoded)} - {list} or {*map(type, itertools.chain.from_iterable(encoded))} - {int}:
        return None
    cuts = tuple(map(tuple, encoded))
    ends = [(0, *axis, extent) for axis, extent in zip(cuts, spec.shape, strict=True) if axis]
    is_ordered = all(first < second for axis in ends for first, second in itertools.pairwise(axis))
    return cuts if is_ordered else None


def _expect(value: Any, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise damaged_tree(f"expected a {kind.__name__}, found {str(value)[:80]!r}")
    return value


def _natural(value: JSON) -> int:
    if type(value) is not int or value < 0:
        raise damaged_tree(f"expected a count, found {str(value)[:80]!r}")
    return value


BLOCK_BYTES: Final = 1 << 20
"""Bytes of the largest blocks. One checksum covers one block; the last block of an object may be shorter."""

_SHIFTS: Final = 5
"""Blocks have `BLOCK_BYTES`, or a half, a quarter, an eighth or a sixteenth of it: at least 64 KiB."""

_MOST_SMALL_BLOCKS: Final = 1 << 14
"""Number of blocks of a checkpoint up to which its blocks are smaller than `BLOCK_BYTES`. Each costs an opening 35 ns.
The checksums of so many are below 256 KiB of JSON, and are in the root. See docs/design/chunk-index.md."""


def block_bytes_for(nbytes: int) -> int:
    """Return the size of the blocks of a new checkpoint whose arrays have `nbytes`.

    A first read of a slice reads and verifies whole blocks, and an opening reads one checksum for each block. Small
    checkpoints therefore have small blocks.
    """
    for shift in reversed(range(_SHIFTS)):
        if nbytes <= (BLOCK_BYTES >> shift) * _MOST_SMALL_BLOCKS:
            return BLOCK_BYTES >> shift
    return BLOCK_BYTES


def block_bytes_of(size: int, blocks: int, most: int = BLOCK_BYTES) -> int:
    """Return the size of the blocks of an object of `size` bytes that has `blocks` of them; 0 if there is none.

    Two sizes give an object the same number of blocks only if both make it one block. The larger one is returned.
    """
    for shift in range(_SHIFTS):
        block = most >> shift or 1
        if -(-size // block) == blocks:
            return block
    return 0


CHECKSUM_ALGORITHM: Final = "xxh3_64"
"""The algorithm of new checksums: XXH3 with 64 bits and seed 0."""

CHECKSUM_BYTES: Final = 8
"""Bytes of one checksum in `ObjectRecord.checksums`."""

_NO_NAMES: Final = frozenset({"", ".", ".."})


class ObjectRecord(NamedTuple):
    """An object of a checkpoint.

    Attributes:
        key: its name within the checkpoint, with ``/`` between directories.
        size: its size in bytes.
        checksums: the checksum of each block, in order, each a little-endian uint64; empty if there are none.
    """

    key: str
    size: int
    checksums: bytes = b""

    @property
    def block_bytes(self) -> int:
        """The bytes of its blocks, which follow from its size and the number of checksums.

        `BLOCK_BYTES` if it has no checksums; 0 if it cannot have that number of checksums.
        """
        count, rest = divmod(len(self.checksums), CHECKSUM_BYTES)
        return BLOCK_BYTES if not self.checksums else 0 if rest else block_bytes_of(self.size, count)


def check_key(key: str) -> str:
    """Return a key if it names an object below a directory: relative, with ``/`` between its parts.

    Keys may come from a hostile file. A storage may refuse further keys, which none of its objects can have.

    Raises:
        InvalidLocationError: the key is absolute or empty, or has an empty, ``.`` or ``..`` part, a NUL character or a
            surrogate that represents no byte of a file name.
    """
    if not _NO_NAMES.isdisjoint(key.split("/")):
        raise InvalidLocationError(
            f"the key {key[:200]!r} has an empty, '.' or '..' part; expected a relative key such as 'directory/name'. "
            "If it comes from a checkpoint, that checkpoint is damaged or hostile"
        )
    try:
        if "\0" not in key and (key.isascii() or key.encode("utf-8", "surrogateescape")):
            return key
    except UnicodeEncodeError:
        pass  # the error below
    raise InvalidLocationError(
        f"the key {key[:200]!r} has a character that is not valid in names. "
        "If it comes from a checkpoint, that checkpoint is damaged or hostile"
    )


def check_directory_key(key: str) -> str:
    """Return the key of a directory without a trailing ``/``. The empty key is the directory of the storage.

    Raises:
        InvalidLocationError: see `check_key`.
    """
    return check_key(key.removesuffix("/")) if key else key
