"""Steps saved by AXLearn: a JSON index, a zarr 2 array for each tensor, and the states of iterators."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from ckptcore.errors import CorruptCheckpointError, UncommittedCheckpointError, UnsupportedLeafError
from ckptcore.model import JSON, ArraySpec, dtype_from_name, unreadable_leaf
from ckptcore.protocols import ReadStore
from ckptcore_orbax.orbax.aggregate import unpack
from ckptcore_orbax.orbax.json_files import expect_text, expect_type, parse_json, unexpected
from ckptcore_orbax.orbax.trees import MAX_DEPTH, OrbaxTree, TreeLeaf, plain_tree

_INDEX: Final = "index"
_ARRAYS: Final = "gda"
_ITERATOR: Final = "<class '"
"""Prefix of index entries for iterators."""

_SHAPE: Final = re.compile(r"\((?:\d{1,18}(?:, \d{1,18})*,?)?\)")
_STATES: Final = re.compile(r"(python|grain|tf)_(\d{1,9})/")


@dataclass(frozen=True, slots=True)
class AxlearnStep:
    """The contents of a directory ``step_%08d``.

    Attributes:
        tree: nested dicts by the parts of each path, and the step number as ``step``, unless the
            state has its own leaf ``step``. The `TreeLeaf.name` of an array is its directory. Its
            `TreeLeaf.spec` comes from the index and is compared with the array's own metadata. The
            state of an iterator is a tree of values, or a dict of such trees by process number if
            several processes saved their states.
        custom: under ``not_readable``, the class names of entries that only TensorFlow can read, by
            path. Empty if there are none.
        writer: name of the writer, with a note about the entries in ``not_readable``.
    """

    tree: OrbaxTree
    writer: str
    custom: Mapping[str, JSON] = field(default_factory=dict)


def find_axlearn(store: ReadStore) -> AxlearnStep | None:
    """Parse the AXLearn step in the store's directory, without reading arrays. None for other directories.

    Everything may be hostile. The index is a list of ``[path, value]``: ``["step", N]`` first; for
    an array ``{"dtype": "float32", "shape": "(8, 8)"}``; for an iterator the name of its class; any
    other value is stored in the index itself.

    Raises:
        CorruptCheckpointError: a file is invalid. Also raised for a truncated index, which AXLearn itself accepts as
            complete.
        UncommittedCheckpointError: there are arrays but no index.
    """
    names = frozenset(store.list_names())
    if f"{_ARRAYS}/" not in names and not (_INDEX in names and any(map(_STATES.fullmatch, names))):
        return None
    if _INDEX not in names:
        raise UncommittedCheckpointError(
            f"{store.address.url if store.address is not None else 'the directory'} has arrays of AXLearn, but "
            f"{_INDEX}, which a save writes last, is missing: the save failed or is still running. Load another step"
        )
    entries = _index_entries(store.get(_INDEX))
    states = _state_files(store, names, {path for path, value in entries if _is_iterator(value)})
    has_step = any(path == "step" for path, _ in entries[1:])
    root: dict[str, object] = {}
    unreadable: dict[str, JSON] = {}
    for path, value in entries:
        leaf: object
        if path == "step" and type(value) is int and has_step:
            continue  # the state has its own leaf "step", which is loaded instead
        if isinstance(value, dict) and {"dtype", "shape"} <= value.keys():
            leaf = _array(path, value)
        elif not _is_iterator(value):
            leaf = value
        elif path in states:
            leaf = _state(store, states[path])
        else:
            unreadable[path] = value
            continue
        _insert(root, path, leaf)
    writer = "AXLearn"
    if unreadable:
        writer += f" (not read, only TensorFlow can: {', '.join(sorted(unreadable))[:200]})"
    return AxlearnStep(plain_tree(root, _INDEX), writer, {"not_readable": unreadable} if unreadable else {})


def _index_entries(data: bytes) -> list[tuple[str, JSON]]:
    entries: list[tuple[str, JSON]] = []
    for entry in expect_type(parse_json(data, _INDEX), list, _INDEX, "the index"):
        pair = expect_type(entry, list, _INDEX, "an entry of the index")
        if len(pair) != 2:
            raise unexpected(_INDEX, "a path and a value", pair)
        path = expect_text(pair[0], _INDEX, "a path")
        parts = path.split("/")
        if len(parts) >= MAX_DEPTH or not {"", ".", ".."}.isdisjoint(parts) or "\0" in path:
            raise unexpected(_INDEX, "a relative path", path)
        entries.append((path, pair[1]))
    return entries


def _is_iterator(value: JSON) -> bool:
    return isinstance(value, str) and value.startswith(_ITERATOR)


def _spec(value: Mapping[str, JSON]) -> ArraySpec:
    shape = expect_text(value["shape"], _INDEX, "a shape")
    if not _SHAPE.fullmatch(shape):
        raise unexpected(_INDEX, "a shape such as '(8, 8)'", shape)
    extents = tuple([int(extent) for extent in shape.strip("(),").split(",") if extent.strip()])
    if len(extents) > 64:
        raise unexpected(_INDEX, "at most 64 axes", len(extents))
    dtype = expect_text(value["dtype"], _INDEX, "a dtype")
    dtype_from_name(dtype)
    return ArraySpec(extents, dtype)


def _state_files(store: ReadStore, names: frozenset[str], paths: set[str]) -> dict[str, dict[int, str]]:
    """Return the files with iterator states, by path and process number. Skips those of TensorFlow."""
    files: dict[str, dict[int, str]] = {}
    for name in names:
        match = _STATES.fullmatch(name)
        if match is None or match[1] == "tf":
            continue
        for path in paths:
            directory, _, last = f"{name}{path}".rpartition("/")
            if last in store.list_names(directory):
                files.setdefault(path, {})[int(match[2])] = f"{name}{path}"
    return files


def _array(path: str, value: Mapping[str, JSON]) -> TreeLeaf:
    try:
        return TreeLeaf(f"{_ARRAYS}/{path}", "jax.Array", spec=_spec(value))
    except UnsupportedLeafError as error:
        return TreeLeaf("", value=unreadable_leaf(error))


def _state(store: ReadStore, files: Mapping[int, str]) -> object:
    """Return the iterator state of the only process, or a dict of all processes' states."""
    states: dict[int, object] = {}
    for process, key in sorted(files.items()):
        try:
            states[process] = _decode_state(store.get(key), key)
        except CorruptCheckpointError as error:
            states[process] = TreeLeaf("", value=unreadable_leaf(error))
    return next(iter(states.values())) if len(states) == 1 else states


def _decode_state(data: bytes, key: str) -> object:
    """Decode a state file: JSON, as older versions wrote it for Grain, or msgpack."""
    if key.startswith("grain_"):
        return parse_json(data, key)

    def refuse(code: int, _: bytes) -> object:
        raise CorruptCheckpointError(
            f"{key}: found a value of the msgpack extension type {code}, which only the software that wrote it can "
            "read; expected numbers, str, bytes, lists and dicts",
            key=key,
        )

    return unpack(data, key, refuse)


def _insert(root: dict[str, object], path: str, value: object) -> None:
    inner = root
    *parents, last = path.split("/")
    for part in parents:
        below = inner.setdefault(part, {})
        if not isinstance(below, dict):
            raise unexpected(_INDEX, f"one leaf at {path[:80]!r}", "another leaf above it")
        inner = below
    if last in inner:
        raise unexpected(_INDEX, f"one leaf at {path[:80]!r}", "two")
    inner[last] = value
