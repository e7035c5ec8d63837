"""Archives of ``torch.export.save`` (``.pt2``): the weights and tensor constants of an exported program.

Since torch 2.8 (``torch/export/pt2_archive/_package.py``, ``constants.py``) an archive is a zip with uncompressed
members. ``data/weights/<model>_weights_config.json`` lists the name, file, dtype, shape and strides of each weight, and
``data/constants/<model>_constants_config.json`` lists those of each constant. Each file has the bytes of a storage.
Dtypes are the numbers of ``ScalarType`` (``torch/_export/serde/schema.py``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from ckptcore.errors import CorruptCheckpointError
from ckptcore_dcp.pickled_trees import Unreadable
from ckptcore_dcp.storages import StoredBytes
from ckptcore_dcp.stored_tensors import StoredTensor, known_dtype, spec_and_kind
from ckptcore_dcp.zip_directories import Fetch
from ckptcore_dcp.zips import ZipMember, read_member

_FOLDERS: Final = {"data/weights/": "_weights_config.json", "data/constants/": "_constants_config.json"}
"""Suffix of the name of the list of tensors, by folder."""
_DTYPES: Final = {
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float16", 7: "float32", 8: "float64",
    10: "complex64", 11: "complex128", 12: "bool", 13: "bfloat16", 28: "uint16", 29: "float8_e4m3fn",
    30: "float8_e5m2", 31: "float8_e4m3fnuz", 32: "float8_e5m2fnuz", 33: "float8_e8m0fnu", 34: "uint32", 35: "uint64",
}  # fmt: skip
_STRIDED: Final = 7
"""Number of the layout of dense tensors."""
_MAX_LIST_BYTES: Final = 1 << 28


def is_exported(members: Mapping[str, ZipMember]) -> bool:
    """Return True if a zip is an archive with lists of tensors."""
    return any(name.endswith("/archive_format") for name in members) and bool(_lists(members))


def read_exported(
    fetch: Fetch, members: Mapping[str, ZipMember], *, key: str
) -> tuple[Mapping[str, StoredTensor | Unreadable], Mapping[str, StoredBytes]]:
    """Return the tensors of an archive by name, and their storages by the path in the archive.

    If an archive contains several models, each tensor name is prefixed with the name of its model. Tensors that the
    archive stores as pickles, and constants that are not tensors, become leaves that cannot be read.

    Raises:
        CorruptCheckpointError: a list is invalid.
    """
    tensors: dict[str, StoredTensor | Unreadable] = {}
    storages: dict[str, StoredBytes] = {}
    lists = _lists(members)
    models = {model for _, model, _ in lists}
    order = next((member for name, member in members.items() if name.endswith("/byteorder")), None)
    is_big = order is not None and read_member(fetch, order, key=key, limit=64) == b"big"
    for folder, model, name in lists:
        try:
            listed: Any = json.loads(read_member(fetch, members[name], key=key, limit=_MAX_LIST_BYTES))["config"]
            for tensor_name, entry in listed.items():
                path = f"{folder}{entry['path_name']}"
                label = tensor_name if len(models) == 1 else f"{model}.{tensor_name}"
                tensors[label] = _tensor(entry, path)
                if path in members:
                    storages[path] = StoredBytes.of_member(key, members[path], big_endian=is_big)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CorruptCheckpointError(
                f"{name!r} in {key!r} is not a valid list of tensors of torch.export: {error!r}; restore the file from "
                "a copy, or load another one",
                key=key,
            ) from error
    return tensors, storages


def _lists(members: Mapping[str, ZipMember]) -> list[tuple[str, str, str]]:
    """Return the folder, the model and the name of each list of tensors."""
    groups: list[tuple[str, str, str]] = []
    for name in members:
        root, _, inside = name.partition("/")
        for folder, end in _FOLDERS.items():
            if inside.startswith(folder) and inside.endswith(end):
                groups.append((f"{root}/{folder}", inside.removeprefix(folder).removesuffix(end), name))
    return groups


def _tensor(entry: Any, path: str) -> StoredTensor | Unreadable:
    """Return a tensor of a list. The entry may be hostile: the caller converts errors."""
    meta = entry.get("tensor_meta")
    if meta is None or entry.get("use_pickle"):
        return Unreadable("stored as a pickle of torch.export: load it with torch.export.load, and save its tensors")
    dtype = known_dtype(_DTYPES.get(meta["dtype"], ""))
    shape, strides = (tuple([_natural(size["as_int"]) for size in meta[name]]) for name in ("sizes", "strides"))
    if dtype is None or len(shape) != len(strides) or meta["layout"] != _STRIDED:
        return Unreadable(
            f"a tensor with the dtype {meta['dtype']} and the layout {meta['layout']} of torch.export, which is not "
            "supported: load it with torch.export.load, and save a plain tensor"
        )
    spec, kind = spec_and_kind(dtype, shape)
    return StoredTensor(path, spec.dtype, shape, strides, _natural(meta["storage_offset"]["as_int"]), kind)


def _natural(number: Any) -> int:
    if type(number) is not int or not 0 <= number < 1 << 62:
        raise ValueError(f"{number!r} is not a size")
    return number
