"""Writing a ``.metadata``, with the opcodes that torch's pickler would choose."""

from __future__ import annotations

import struct
from typing import Final

from ckptcore_dcp.metadata.entries import DcpChunk, DcpMetadata, DcpValue

__all__ = ["write_metadata"]

_METADATA: Final = "torch.distributed.checkpoint.metadata"
_FILES: Final = "torch.distributed.checkpoint.filesystem"
_INDEX: Final = (_METADATA, "MetadataIndex")
_CHUNK: Final = (_METADATA, "ChunkStorageMetadata")
_INFO: Final = (_FILES, "_StorageInfo")
_BEGIN: Final = b")\x81}("
"""EMPTY_TUPLE NEWOBJ EMPTY_DICT MARK: an object whose attributes follow."""
_SET: Final = b"ub"
"""SETITEMS BUILD: the attributes are complete."""
_SMALL: Final = tuple([b"K" + bytes([number]) for number in range(256)])


def write_metadata(metadata: DcpMetadata) -> bytes:
    """The bytes of a ``.metadata`` that torch loads as if it had written it.

    Takes some 3 microseconds per chunk. Texts and classes stand once and are referred to; nothing else that torch gives a number
    needs one. It is one frame: reading it moves all of it into memory anyway.
    """
    pickle = _Pickle()
    out = pickle.out
    out += [pickle[_METADATA, "Metadata"], _BEGIN, pickle["state_dict_metadata"], b"}("]
    strided = layout = b""
    for name in metadata.names:
        out.append(pickle[name])
        tensor = metadata.tensors.get(name)
        if tensor is None:
            out += [pickle[_METADATA, "BytesStorageMetadata"], b")\x81"]
            continue
        out += [pickle[_METADATA, "TensorStorageMetadata"], _BEGIN, pickle["properties"]]
        out += [pickle[_METADATA, "TensorProperties"], b")\x81(", pickle["torch", tensor.dtype]]
        if not layout:
            out += [pickle["torch.serialization", "_get_layout"], pickle["torch.strided"], b"\x85R"]
            layout = pickle.keep()
        else:
            out.append(layout)
        out.append(b"\x88" if tensor.requires_grad else b"\x89")
        if not strided:
            out += [pickle[_METADATA, "_MEM_FORMAT_ENCODING"], b"K\x00\x85R"]
            strided = pickle.keep()
        else:
            out.append(strided)
        out += [b"\x89tb", pickle["size"], pickle.sizes[tensor.shape], pickle["chunks"], b"]("]
        sizes = pickle.sizes
        for chunk in tensor.chunks:
            out += (pickle[_CHUNK], _BEGIN, pickle["offsets"], sizes[chunk.offsets])
            out += (pickle["sizes"], sizes[chunk.sizes], _SET)
        out.append(b"eub")
    out += [b"u", pickle["planner_data"]]
    _write_paths(metadata, pickle)
    out += [pickle["storage_data"], b"}("]
    for name, value in metadata.values.items():
        out += (pickle[_INDEX], _BEGIN, pickle["fqn"], pickle[name], pickle["index"], b"Nub")
        _write_place(value, pickle)
    for name, tensor in metadata.tensors.items():
        fqn = pickle[name]
        for number, chunk in enumerate(tensor.chunks):
            out += (pickle[_INDEX], _BEGIN, pickle["fqn"], fqn, pickle["index"], _number(number))
            out += (pickle["offset"], pickle.sizes[chunk.offsets], _SET)
            _write_place(chunk, pickle)
    out += [b"u", pickle["storage_meta"], pickle[_METADATA, "StorageMeta"], _BEGIN]
    out += [pickle["checkpoint_id"], pickle.optional(metadata.checkpoint_id)]
    out += [pickle["save_id"], pickle.optional(metadata.save_id), pickle["load_id"], b"N", pickle["modules"], b"]ub"]
    out += [pickle["version"], pickle["1.0.0"], b"ub."]
    data = b"".join(out)
    return b"\x80\x04\x95" + len(data).to_bytes(8, "little") + data


def _write_paths(metadata: DcpMetadata, pickle: _Pickle) -> None:
    if metadata.paths is None:
        pickle.out.append(b"N")
        return
    pickle.out.append(b"}(")
    for name, path in metadata.paths.items():
        steps = [_number(step) if isinstance(step, int) else pickle[step] for step in (name, *path)]
        pickle.out += [steps[0], b"(", *steps[1:], b"t"]
    pickle.out.append(b"u")


def _write_place(place: DcpChunk | DcpValue, pickle: _Pickle) -> None:
    out = pickle.out
    out += (pickle[_INFO], _BEGIN, pickle["relative_path"], pickle[place.relative_path])
    out += (pickle["offset"], _number(place.offset), pickle["length"], _number(place.length))
    if place.transforms:
        names = [pickle[text] for text in place.transforms]
        out += [pickle["transform_descriptors"], b"](", *names, b"e"]
    out.append(_SET)


class _Pickle(dict[str | tuple[str, str], bytes]):
    """The opcodes of texts and of classes, by module and name; they have to be written in the order they are asked for in.

    The first time those that make one and give it a number, then those that refer to it.

    Attributes:
        out: what is written so far.
        sizes: the opcodes of a ``torch.Size``.
    """

    def __init__(self) -> None:
        self.out: list[bytes] = []
        self.sizes = _Sizes(self)
        self._numbered = 0

    def __missing__(self, item: str | tuple[str, str]) -> bytes:
        if isinstance(item, tuple):
            return self[item[0]] + self[item[1]] + b"\x93" + self._number_of(item)
        data = item.encode("utf-8", "surrogatepass")
        length = b"\x8c" + bytes([len(data)]) if len(data) < 256 else b"X" + len(data).to_bytes(4, "little")
        return length + data + self._number_of(item)

    def keep(self) -> bytes:
        """Give the object that was written last a number; the opcodes that refer to it."""
        self.out.append(b"\x94")
        return self._next()

    def optional(self, text: str | None) -> bytes:
        """The opcodes of a text or None."""
        return b"N" if text is None else self[text]

    def _number_of(self, item: str | tuple[str, str]) -> bytes:
        self[item] = self._next()
        return b"\x94"

    def _next(self) -> bytes:
        number = self._numbered
        self._numbered += 1
        return b"h" + bytes([number]) if number < 256 else b"j" + number.to_bytes(4, "little")


class _Sizes(dict[tuple[int, ...], bytes]):
    """The opcodes of a ``torch.Size``."""

    def __init__(self, pickle: _Pickle) -> None:
        self._pickle = pickle

    def __missing__(self, size: tuple[int, ...]) -> bytes:
        numbers = b"".join(map(_number, size))
        count = len(size)
        pair = numbers + (b")", b"\x85", b"\x86", b"\x87")[count] if count < 4 else b"(" + numbers + b"t"
        made = self._pickle["torch", "Size"]
        self[size] = self._pickle["torch", "Size"] + pair + b"\x85R"
        return made + pair + b"\x85R"


def _number(number: int) -> bytes:
    """The opcodes of an int."""
    if 0 <= number < 256:
        return _SMALL[number]
    if 0 <= number < 1 << 16:
        return b"M" + number.to_bytes(2, "little")
    if -(1 << 31) <= number < 1 << 31:
        return b"J" + struct.pack("<i", number)
    return b"\x8a\x08" + struct.pack("<q", number)
