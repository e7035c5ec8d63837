"""Fast reader of the objects that fill a large ``.metadata``: one regular expression per object.

Once the pickle has named classes and attributes, torch's pickler writes chunks
(`ChunkStorageMetadata`), their locations (`MetadataIndex` and `_StorageInfo`) and tensors of one
chunk (`TensorStorageMetadata`) with the same opcodes every time. Such an object becomes a
`CompactObject` in one step instead of about thirty. An expression contains whole opcodes only, so a
match reads the same bytes in the same way as the machine.

A `CompactObject` is not in the memo, and only `MetadataDecoder` can use it. A pickle that uses the
objects differently is rejected and read again without this module (see `read_metadata`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from ckptcore_dcp.metadata.entries import torch_class_name
from ckptcore_dcp.pickles import UNSET, Call, CompactObject, Global, Value

_REFERENCE: Final = rb"(h.|j.{4})"
"""BINGET, LONG_BINGET."""
_NUMBER: Final = rb"(?:K.|M..|J.{4}|\x8a(?:\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8}))"
"""BININT1, BININT2, BININT, LONG1."""
_TEXT: Final = rb"(?:(h.|j.{4})|\x8c(.)([^\x94]{0,255})\x94)"
"""A reference to a text, or SHORT_BINUNICODE: length in bytes, and the text up to MEMOIZE."""
_SIZE: Final = _REFERENCE + rb"(\)|(?:\(%b{4,16}t|%b{1,3}[\x85-\x87])\x94)\x85\x94R\x94" % (_NUMBER, _NUMBER)
"""A call of ``torch.Size``: a reference to the class, and the tuple of numbers."""
_NEW: Final = rb"\)\x81\x94}\x94\("
"""EMPTY_TUPLE, NEWOBJ, MEMOIZE, EMPTY_DICT, MEMOIZE, MARK: an object whose attributes follow."""
_NEXT: Final = b"(?:" + _REFERENCE + b"(?=" + _NEW + b"))?"
"""A reference to the class of the next object, if the next object follows directly."""
_BOX: Final = _NEW + _REFERENCE + _SIZE + _REFERENCE + _SIZE + b"ub"
_PROPERTIES: Final = rb"(?:%b\)\x81\x94\(((?:h.|j.{4}|\x88|\x89){3,8})t\x94b|%b)" % (_REFERENCE, _REFERENCE)
"""Existing `TensorProperties`, by reference, or new ones whose state is a tuple of references and booleans."""


def _compiled(*parts: bytes) -> re.Pattern[bytes]:
    return re.compile(b"".join(parts), re.DOTALL)


_ONE_NUMBER: Final = _compiled(_NUMBER)
_ONE_ITEM: Final = _compiled(rb"h.|j.{4}|\x88|\x89")
_CHUNK: Final = _compiled(_BOX, _NEXT)
_TENSOR: Final = _compiled(
    _NEW, _REFERENCE, _PROPERTIES, _REFERENCE, _SIZE, _REFERENCE, rb"\]\x94", _REFERENCE, _BOX, b"aub"
)
_ITEM_RANGE: Final = _compiled(
    *(_NEW, _REFERENCE, _TEXT, _REFERENCE, b"(?:N|", _NUMBER, b")", _REFERENCE, _SIZE, b"ub"),
    *(_REFERENCE, _NEW, _REFERENCE, _TEXT, (_REFERENCE + b"(" + _NUMBER + b")") * 2, b"ub", _NEXT),
)
_MARK: Final = 0x28
_TUPLE0: Final = 0x84
"""The opcode of a tuple of one to three items, minus the number of items."""
_BOOLEANS: Final = {b"\x88": True, b"\x89": False}
_UNSET: Final = tuple([[UNSET] * count for count in range(16)])

_SIZE_CLASS: Final = Global("torch", "Size")
# Sentinels: no value of a pickle equals them.
_CHUNK_CLASS: Final = object()
_STORAGE_INFO_CLASS: Final = object()
_PROPERTIES_CLASS: Final = object()
_CLASSES: Final[Mapping[str, object]] = {
    "ChunkStorageMetadata": _CHUNK_CLASS,
    "_StorageInfo": _STORAGE_INFO_CLASS,
    "TensorProperties": _PROPERTIES_CLASS,
}
_CHUNK_VALUES: Final = ("offsets", _SIZE_CLASS, "sizes", _SIZE_CLASS)
_ITEM_RANGE_VALUES: Final = (
    "fqn",
    "index",
    "offset",
    _SIZE_CLASS,
    _STORAGE_INFO_CLASS,
    "relative_path",
    "offset",
    "length",
)
_TENSOR_VALUES: Final = ("properties", "size", _SIZE_CLASS, "chunks", _CHUNK_CLASS, *_CHUNK_VALUES)

_Read: TypeAlias = Callable[[Global, int, list[Any]], tuple[list[Any], int]]


class FastObjectReader:
    """Reads objects of one pickle. Not thread-safe."""

    def __init__(self, data: bytes, check_size: Callable[[tuple[int, ...]], object]) -> None:
        """Create a reader. `check_size` raises an error for a tuple that is not a valid tensor size."""
        self._data = data
        self._check_size = check_size
        self._sizes: dict[bytes, tuple[int, ...]] = {}
        # References that matched last, by the first expected value. They stay valid because the
        # memo only grows.
        self._checked: dict[object, tuple[bytes, ...]] = {}
        self._properties: dict[tuple[bytes, bytes], tuple[Global, tuple[Value, ...]]] = {}
        # By identity of the class. The tuple holds a reference, so that no other object gets this
        # identity.
        self._readers: dict[int, tuple[Global, _Read | None]] = {}
        self._reader_of: Mapping[str, _Read] = {
            "ChunkStorageMetadata": self._chunks,
            "MetadataIndex": self._item_ranges,
            "TensorStorageMetadata": self._tensor,
        }

    def read(self, function: Global, position: int, memo: list[Any]) -> tuple[list[Any], int] | None:
        """Read consecutive objects. See `ObjectReader`."""
        known = self._readers.get(id(function))
        if known is None:
            known = self._readers[id(function)] = (function, self._reader_of.get(torch_class_name(function)))
        read = known[1]
        if read is None:
            return None
        values, stop = read(function, position, memo)
        return (values, stop) if values else None

    def _chunks(self, function: Global, position: int, memo: list[Any]) -> tuple[list[Any], int]:
        """Read chunks of a tensor. The number of memo entries of a chunk depends on whether it has axes."""
        values: list[Any] = []
        stop, of_class, known, checked = position, b"", self._sizes.get, self._checked.get(_CHUNK_VALUES[0])
        while (match := _CHUNK.match(self._data, position)) is not None:
            start, count, following = match.group(3, 6, 7)
            offsets, sizes = known(start) or self._size(start), known(count) or self._size(count)
            references = match.group(1, 2, 4, 5)
            if offsets is None or sizes is None:
                break
            if references != checked and not self._refer_to(references, _CHUNK_VALUES, memo):
                break
            checked = references
            memo += _UNSET[6 + bool(offsets) + bool(sizes)]
            values.append(CompactObject(("ChunkStorageMetadata", offsets, sizes)))
            position = stop = match.end()
            if following is None:
                break
            stop -= len(following)
            if following != of_class:
                if not self._refer_to((following,), (function,), memo):
                    break
                of_class = following
        return values, stop

    def _item_ranges(self, function: Global, position: int, memo: list[Any]) -> tuple[list[Any], int]:
        """Read locations of chunks. A text that a location defines enters the memo, and later locations refer to it."""
        values: list[Any] = []
        stop, of_class, known, checked = position, b"", self._sizes.get, self._checked.get(_ITEM_RANGE_VALUES[0])
        while (match := _ITEM_RANGE.match(self._data, position)) is not None:
            name_at, path_at, start, offset, length, following = match.group(2, 11, 8, 15, 17, 18)
            size = known(start) or self._size(start)
            references = match.group(1, 5, 6, 7, 9, 10, 14, 16)
            if size is None or (references != checked and not self._refer_to(references, _ITEM_RANGE_VALUES, memo)):
                break
            checked = references
            name = _read_text(name_at, match, 3, memo)
            path = _read_text(path_at, match, 12, memo)
            if name is None or path is None:
                break
            memo += _UNSET[2]
            if name_at is None:
                memo.append(name)
            memo += _UNSET[4 + bool(size)]
            if path_at is None:
                memo.append(path)
            values.append(CompactObject(("MetadataIndex", name, size)))
            values.append(CompactObject(("_StorageInfo", path, _decode_int(offset), _decode_int(length))))
            position = stop = match.end()
            if following is None:
                break
            stop -= len(following)
            if following != of_class:
                if not self._refer_to((following,), (function,), memo):
                    break
                of_class = following
        return values, stop

    def _tensor(self, function: Global, position: int, memo: list[Any]) -> tuple[list[Any], int]:
        """Read a tensor of one chunk. Reads only one, because the name of the next tensor follows."""
        match = _TENSOR.match(self._data, position)
        if match is None:
            return [], position
        size, offsets, sizes = map(self._size, match.group(7, 12, 15))
        if size is None or offsets is None or sizes is None:
            return [], position
        references = match.group(1, 5, 6, 8, 9, 10, 11, 13, 14)
        if references != self._checked.get(_TENSOR_VALUES[0]) and not self._refer_to(references, _TENSOR_VALUES, memo):
            return [], position
        of_properties, state, reference = match.group(2, 3, 4)
        if reference is None:
            properties = self._new_properties(of_properties, state, memo)
            if properties is None:
                return [], position
            memo += (UNSET, UNSET, properties, UNSET)
        else:
            properties = _memo_entry(reference, memo)
            if properties is UNSET:
                return [], position
            memo += _UNSET[2]
        memo += _UNSET[9 + bool(size) + bool(offsets) + bool(sizes)]
        return [CompactObject(("TensorStorageMetadata", properties, size, offsets, sizes))], match.end()

    def _new_properties(self, reference: bytes, items: bytes, memo: list[Any]) -> Call | None:
        """Return new tensor properties: a class, and the items of a tuple."""
        known = self._properties.get((reference, items))
        if known is None:
            if not self._refer_to((reference,), (_PROPERTIES_CLASS,), memo):
                return None
            state = [
                _BOOLEANS[item] if item in _BOOLEANS else _memo_entry(item, memo) for item in _ONE_ITEM.findall(items)
            ]
            if UNSET in state:
                return None
            known = self._properties[reference, items] = (_memo_entry(reference, memo), tuple(state))
        return Call(known[0], (), known[1], new=True)

    def _refer_to(self, references: tuple[bytes, ...], expected: tuple[object, ...], memo: list[Any]) -> bool:
        """Return whether the references point to the expected values."""
        for reference, value in zip(references, expected, strict=True):
            entry = _memo_entry(reference, memo)
            if type(entry) is Global:
                entry = _CLASSES.get(torch_class_name(entry), entry) if value.__class__ is object else entry
            if entry != value:
                return False
        self._checked[expected[0]] = references
        return True

    def _size(self, numbers: bytes) -> tuple[int, ...] | None:
        """Return the numbers of a tuple, or None if the opcodes do not form one."""
        known = self._sizes.get(numbers)
        if known is not None:
            return known
        size = tuple(map(_decode_int, _ONE_NUMBER.findall(numbers)))
        if size and numbers[0] != _MARK and len(size) != numbers[-2] - _TUPLE0:
            return None
        self._check_size(size)
        self._sizes[numbers] = size
        return size


def _memo_entry(reference: bytes, memo: list[Any]) -> Any:
    """Return the memo entry that an opcode refers to, or `UNSET` if it does not exist."""
    index = int.from_bytes(reference[1:], "little")
    return memo[index] if index < len(memo) else UNSET


def _read_text(reference: bytes | None, match: re.Match[bytes], group: int, memo: list[Any]) -> str | None:
    """Return the text that an object defines or refers to; None if it must be read by the machine."""
    if reference is not None:
        entry = _memo_entry(reference, memo)
        return entry if type(entry) is str else None
    length, named = match.group(group, group + 1)
    if length[0] != len(named):
        return None  # the text contains the terminating byte
    try:
        return named.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return None


def _decode_int(opcodes: bytes) -> int:
    """Return the number encoded by an opcode and its argument."""
    code = opcodes[0]
    if code == 0x4B:  # BININT1
        return opcodes[1]
    if code == 0x4D:  # BININT2
        return opcodes[1] | opcodes[2] << 8
    return int.from_bytes(opcodes[1 if code == 0x4A else 2 :], "little", signed=True)
