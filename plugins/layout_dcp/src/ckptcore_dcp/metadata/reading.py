"""Reader of ``.metadata``: converts the inert values of its pickle to entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, NoReturn, TypeGuard

import numpy as np

from ckptcore.errors import CheckpointError, CorruptCheckpointError, UnsupportedLeafError
from ckptcore.model import ValueRecord, unreadable_leaf
from ckptcore_dcp.metadata.entries import (
    DcpMetadata,
    DcpPath,
    DcpValue,
    Sizes,
    torch_class_name,
)
from ckptcore_dcp.metadata.fast import CHUNKS, ITEM_RANGES, TENSORS, FastObjectReader
from ckptcore_dcp.metadata.joining import ListedItems, ListedTensors, find_outside, join, padded_extents, row_keys
from ckptcore_dcp.pickles import Call, CompactObject, Global, ObjectReader, Value, brief, read_pickle
from ckptcore_dcp.stored_tensors import known_dtype, spec_and_kind

_MAX_COUNT: Final = 1 << 62
_MAX_AXES: Final = 64
_PATH_DEPTH: Final = 48
"""Maximum length of a path, in keys. A value may add 150 containers, and the core's limit is 200."""
_SIZE: Final = Global("torch", "Size")
_PATH_LENGTHS: Final = frozenset(range(1, _PATH_DEPTH + 1))
_TEXT: Final = frozenset({str})
_TUPLE: Final = frozenset({tuple})


@dataclass(slots=True)
class MetadataDecoder:
    """Converts one pickle. Methods raise `CorruptCheckpointError` for anything unexpected.

    Attributes:
        key: the file, for errors.
        remaining: number of chunks and transforms that may still be read; initially the length of
            the pickle in bytes. This limit rejects a small pickle that refers to one list many times.
        classes: name of the torch class, or "", by ``id()`` of a `Global` of the pickle.
        size_class: the `Global` for ``torch.Size`` of this pickle, once seen.
    """

    key: str
    remaining: int
    classes: dict[int, str] = field(default_factory=dict)
    size_class: Value = None

    def metadata(self, value: Value) -> DcpMetadata:
        """Convert the value of the pickle.

        Raises:
            CorruptCheckpointError: it is not what torch.distributed.checkpoint writes.
        """
        nbytes = self.remaining
        state = self.attributes_of(value, "Metadata")
        items = self.items(state.get("storage_data"))
        tensors = ListedTensors()
        values: dict[str, DcpValue] = {}
        unreadable: dict[str, ValueRecord] = {}
        count = 0
        for name, entry in self.mapping(state.get("state_dict_metadata"), "state_dict_metadata").items():
            if _is_rows(name, TENSORS):
                self.expect_rows(name, entry)
                _, names, *attributes = name
                count += len(names)
                self.tensors(tensors, names, *attributes)
                continue
            count += 1
            if type(name) is not str:
                self.fail(f"the name of an entry is {brief(name)}; expected a string")
            if self.is_instance(entry, "BytesStorageMetadata"):
                item_range = items.values.get(name)
                if item_range is None:
                    error = CorruptCheckpointError(
                        f"{self.key} lists no file for the value {name!r}; its save was not finished. Load another "
                        "checkpoint",
                        key=self.key,
                    )
                    unreadable[name] = unreadable_leaf(error)
                else:
                    values[name] = DcpValue(*item_range)
                continue
            try:
                self.tensor(name, entry, tensors)
            except UnsupportedLeafError as unsupported:
                unreadable[name] = unreadable_leaf(unsupported)
        if count != len({*tensors.heads, *values, *unreadable}) or count != len(tensors.counts) + len(values) + len(
            unreadable
        ):
            self.fail("it lists a name twice")
        if padded_extents(tensors, items) > nbytes:
            # Each chunk and location of torch takes more bytes than a torch.Size has axes, at most 64.
            self.fail("its tensors, chunks and locations, times the axes of the largest, exceed its bytes")
        if (outside := find_outside(tensors)) is not None:
            name = list(tensors.heads)[outside[1]]
            self.fail(f"chunk {outside[0]} exceeds its tensor {name!r} of {tensors.heads[name][1]}")
        save_id, checkpoint_id = self.storage_meta(state.get("storage_meta"))
        paths = self.paths(state.get("planner_data"))
        stored_tensors, unknown = join(tensors, items)
        unlisted: dict[str, list[str]] = {}
        files = list(items.files)
        others = [(name, file) for name, (file, *_) in items.values.items() if name not in tensors.heads]
        others += dict.fromkeys((items.names[row], files[items.file[row]]) for row in unknown)
        for name, file in others:
            if name not in values and name not in unreadable:
                unlisted.setdefault(file, []).append(name)
        return DcpMetadata(
            stored_tensors, values, paths, save_id, checkpoint_id, unreadable, frozenset(files), unlisted
        )

    def items(self, value: Value) -> ListedItems:
        """Return the byte ranges of all items."""
        items = ListedItems()
        paths: dict[str, str] = {}
        for index, info in self.mapping(value, "storage_data").items():
            if _is_rows(index, ITEM_RANGES):
                self.expect_rows(index, info)
                _, names, offsets, files, start, length = index
                for path in {*files}:
                    self.plain_path(path)
                items.extend(names, offsets, files, start, length)
                continue
            if index.__class__ is CompactObject and index[0] == "MetadataIndex":
                _, name, offset = index
            else:
                at = self.attributes_of(index, "MetadataIndex")
                name, offset = at.get("fqn"), at.get("offset")
                offset = None if offset is None else self.size(offset)
            if type(name) is not str:
                self.fail(f"a name in storage_data is {brief(name)}; expected a string")
            if info.__class__ is CompactObject and info[0] == "_StorageInfo":
                _, path, start, length = info
                transforms = None
            else:
                state = self.attributes_of(info, "_StorageInfo")
                path, start, length = state.get("relative_path"), state.get("offset"), state.get("length")
                transforms = state.get("transform_descriptors")
            if type(path) is not str:
                self.fail(f"the file name of {name!r} is {brief(path)}; expected a string")
            items.append(
                name,
                offset,
                (
                    paths.get(path) or paths.setdefault(path, self.plain_path(path)),
                    self.count(start, "the offset of an item"),
                    self.count(length, "the length of an item"),
                    () if transforms is None else self.texts(transforms),
                ),
            )
        return items

    def tensor(self, name: str, entry: Value, tensors: ListedTensors) -> None:
        """Add a tensor and its chunks."""
        listed: Value
        if entry.__class__ is CompactObject and entry[0] == "TensorStorageMetadata":
            _, properties, size, offsets, sizes = entry
            listed = [CompactObject(("ChunkStorageMetadata", offsets, sizes))]
        else:
            state = self.attributes_of(entry, "TensorStorageMetadata")
            properties, size, listed = state.get("properties"), state.get("size"), state.get("chunks")
        head = self.head(name, properties, size)
        if type(listed) is not list:
            self.fail(f"the chunks of {name!r} are {brief(listed)}; expected a list")
        count = len(listed)
        self.count_parts(count)
        for chunk in listed:
            if _is_rows(chunk, CHUNKS):
                more = len(chunk[1][0]) - 1
                self.count_parts(more)
                count += more
                tensors.offsets.extend(chunk[1])
                tensors.sizes.extend(chunk[2])
            else:
                offsets, sizes = self.box(chunk)
                tensors.offsets.append(offsets)
                tensors.sizes.append(sizes)
        tensors.heads[name] = head
        tensors.shapes.append(head[1])
        tensors.counts.append(count)

    def head(self, name: str, properties: Value, size: Value) -> tuple[str, tuple[int, ...], bool]:
        """Return dtype, shape and requires_grad of a tensor."""
        dtype, requires_grad = self.properties(name, properties)
        shape = self.size(size)
        spec, _ = spec_and_kind(dtype, shape)
        if not spec.is_possible:
            self.fail(f"the tensor {name!r} is {spec}, which exceeds the address space")
        return dtype, shape, requires_grad

    def tensors(
        self,
        tensors: ListedTensors,
        names: Sequence[str],
        properties: Sequence[Value],
        shapes: Sizes,
        offsets: Sizes,
        sizes: Sizes,
    ) -> None:
        """Add tensors of one chunk. One of an unknown dtype is reported by the machine."""
        self.count_parts(len(names))
        keys = row_keys(np.array([*map(id, properties)]), *shapes)
        heads: dict[bytes, tuple[str, tuple[int, ...], bool]] = {}
        for key, number in dict(zip(keys, range(len(keys)), strict=True)).items():
            shape = tuple(shapes[1][number, : shapes[0][number]].tolist())
            heads[key] = self.head(names[number], properties[number], shape)
        tensors.heads.update(zip(names, map(heads.__getitem__, keys), strict=True))
        tensors.shapes.extend(shapes)
        tensors.offsets.extend(offsets)
        tensors.sizes.extend(sizes)
        tensors.counts += [1] * len(names)

    def box(self, chunk: Value) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the offsets and sizes of a chunk."""
        if chunk.__class__ is CompactObject and chunk[0] == "ChunkStorageMetadata":
            _, offsets, sizes = chunk
            return offsets, sizes
        state = self.attributes_of(chunk, "ChunkStorageMetadata")
        return self.size(state.get("offsets")), self.size(state.get("sizes"))

    def properties(self, name: str, value: Value) -> tuple[str, bool]:
        """Return dtype and requires_grad of a tensor."""
        if not self.is_instance(value, "TensorProperties"):
            self.fail(f"the properties of {name!r} are {brief(value)}; expected TensorProperties")
        state = value.state  # type: ignore[union-attr]  # a Call, see `is_instance`
        match state:
            case (dtype, _, bool() as requires_grad, *_):
                pass
            case {"dtype": dtype, **rest}:
                requires_grad = rest.get("requires_grad") is True
            case _:
                self.fail(f"the state of the properties of {name!r} is {brief(state)}; expected a tuple or a dict")
        if not isinstance(dtype, Global) or dtype.module != "torch":
            self.fail(f"the dtype of {name!r} is {brief(dtype)}; expected a torch.dtype")
        known = known_dtype(dtype.name)
        if known is None:
            raise UnsupportedLeafError(
                f"the tensor {name!r} has the dtype torch.{dtype.name[:40]}, which NumPy cannot represent; "
                "load it with torch, and save it as another dtype"
            )
        return known, requires_grad

    def storage_meta(self, value: Value) -> tuple[str | None, str | None]:
        """Return the save id and the location. Unknown forms count as None."""
        if not self.is_instance(value, "StorageMeta"):
            return None, None
        state = self.attributes_of(value, "StorageMeta")
        save_id, location = state.get("save_id"), state.get("checkpoint_id")
        if isinstance(location, Call) and isinstance(location.function, Global):
            parts = location.arguments
            known = location.function.module.partition(".")[0] == "pathlib"
            location = "/".join(parts).replace("//", "/", 1) if known and _are_texts(parts) else None  # type: ignore[arg-type]  # texts, checked here
        return save_id if type(save_id) is str else None, location if type(location) is str else None

    def paths(self, value: Value) -> dict[str, DcpPath] | None:
        """Return the paths if the planner data contains paths, else None. Planners may store other data."""
        if type(value) is not dict:
            return None
        stored: Mapping[Any, Any] = value
        if (  # one pass for each check is three times as fast as one loop
            _TUPLE.issuperset(map(type, stored.values()))
            and _PATH_LENGTHS.issuperset(map(len, stored.values()))
            and _TEXT.issuperset(map(type, chain(stored, chain.from_iterable(stored.values()))))
        ):
            return dict(stored)
        paths: dict[str, DcpPath] = {}
        for name, path in value.items():
            if type(name) is not str or type(path) is not tuple or not 0 < len(path) <= _PATH_DEPTH:
                return None
            if not _TEXT.issuperset(map(type, path)) and not all(
                type(step) is str or (type(step) is int and 0 <= step < _MAX_COUNT) for step in path
            ):
                return None
            paths[name] = path  # type: ignore[assignment]  # checked above
        return paths

    def plain_path(self, path: str) -> str:
        """Validate that a path stays below the directory of the checkpoint."""
        parts = path.split("/")
        plain = all(part not in ("", ".", "..") for part in parts) and not any(letter in path for letter in "\\\0")
        if not plain or path[1:2] == ":" or not path.isprintable():
            self.fail(f"invalid file name {path[:200]!r}: expected a path inside the directory of the checkpoint")
        return path

    def size(self, value: Value) -> tuple[int, ...]:
        """Return a ``torch.Size``, or another sequence of counts, as a tuple."""
        numbers: Any = value
        if isinstance(value, Call) and (value.function is self.size_class or value.function == _SIZE):
            self.size_class = value.function
            numbers = value.arguments[0] if len(value.arguments) == 1 else () if not value.arguments else None
        if type(numbers) not in (tuple, list) or len(numbers) > _MAX_AXES:
            self.fail(f"expected a torch.Size, found {brief(value)}")
        for number in numbers:
            if number.__class__ is not int or not 0 <= number < _MAX_COUNT:
                self.fail(f"an extent of a torch.Size is {brief(number)}; expected a number of elements")
        return tuple(numbers)

    def count(self, value: Value, what: str) -> int:
        """Return a value if it is a valid number of bytes."""
        if type(value) is not int or not 0 <= value < _MAX_COUNT:
            self.fail(f"{what} is {brief(value)}; expected a number of bytes")
        return value

    def texts(self, value: Value) -> tuple[str, ...]:
        """Return the names of transforms."""
        if type(value) not in (list, tuple) or not _are_texts(value):  # type: ignore[arg-type]  # a sequence, see above
            self.fail(f"the transforms of an item are {brief(value)}; expected a list of names")
        self.count_parts(len(value))  # type: ignore[arg-type]  # as above
        return tuple(value)  # type: ignore[arg-type]  # texts, checked above

    def mapping(self, value: Value, what: str) -> dict[Any, Value]:
        """Return a value if it is a dict."""
        if type(value) is not dict:
            self.fail(f"{what} is {brief(value)}; expected a dict")
        return value

    def is_instance(self, value: Value, name: str) -> bool:
        """Return whether a value is an object of the torch class with this name."""
        if value.__class__ is not Call:
            return False
        function = value.function
        known = self.classes.get(id(function))
        if known is None:
            if not isinstance(function, Global):
                return False
            # The pickle names a class once and refers to it from each object, so its `Global` and
            # id persist.
            known = self.classes[id(function)] = torch_class_name(function)
        return known == name

    def attributes_of(self, value: Value, name: str) -> Mapping[Any, Value]:
        """Return the attributes of an object of a torch class."""
        if not self.is_instance(value, name) or type(value.state) is not dict:  # type: ignore[union-attr]  # a Call, see `is_instance`
            self.fail(f"expected a {name} of torch.distributed.checkpoint, found {brief(value)}")
        return value.state  # type: ignore[union-attr]  # checked above

    def expect_rows(self, name: Value, value: Value) -> None:
        """Check that objects which were read in one step are a whole dict item."""
        if value is not name:
            self.fail("it uses objects in an unusual way")

    def count_parts(self, count: int) -> None:
        """Count chunks and transforms. Fail if the file lists more of them than it has bytes."""
        self.remaining -= count
        if self.remaining < 0:
            self.fail("it lists more chunks and transforms than it has bytes")

    def fail(self, reason: str) -> NoReturn:
        """Raise an error for this file.

        Raises:
            CorruptCheckpointError: always.
        """
        raise CorruptCheckpointError(
            f"{self.key} cannot be read: {reason}; restore it from a copy, or load another checkpoint", key=self.key
        )


def _is_rows(value: Value, name: str) -> TypeGuard[CompactObject]:
    """Return True if a value is a batch of objects that `ckptcore_dcp.metadata.fast` read as columns."""
    return value.__class__ is CompactObject and value[0] == name


def _are_texts(value: Sequence[Value]) -> bool:
    return all(type(text) is str for text in value)


def read_metadata(data: bytes, *, key: str) -> DcpMetadata:
    """Read ``.metadata``. Every byte may be hostile.

    Skips chunks without a location: a save whose writer failed leaves such chunks (pytorch issue
    191391), and the other tensors can still be loaded. Loading checks that chunks cover a tensor.

    Args:
        data: the file.
        key: its name, for errors.

    Raises:
        CorruptCheckpointError: it is not ``.metadata``, a chunk exceeds its tensor, or a file path
            leaves the checkpoint.
    """
    try:
        return read_fast(data, key=key)
    except CheckpointError:
        return read_opcodes(data, key=key)  # decides whether the file is corrupt, and reports why


def read_fast(data: bytes, *, key: str) -> DcpMetadata:
    """Read ``.metadata`` with `FastObjectReader`. Rejects pickles that use objects differently from torch."""
    reader = MetadataDecoder(key, len(data))
    return _read(data, key, reader, FastObjectReader(data).read)


def read_opcodes(data: bytes, *, key: str) -> DcpMetadata:
    """Read ``.metadata`` opcode by opcode."""
    return _read(data, key, MetadataDecoder(key, len(data)), None)


def _read(data: bytes, key: str, reader: MetadataDecoder, objects: ObjectReader | None) -> DcpMetadata:
    value, stop = read_pickle(data, key=key, objects=objects)
    del objects  # frees its columns of all rows before the metadata is built
    if stop != len(data):
        raise CorruptCheckpointError(f"{key} has {len(data)} bytes, but its pickle ends at byte {stop}", key=key)
    return reader.metadata(value)
