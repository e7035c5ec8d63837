"""The layout `torch`: files of ``torch.save``, read as data. No code in them is executed.

Formats (``torch/serialization.py``): since torch 1.6 a zip with the pickle ``data.pkl`` and a
member ``data/<key>`` for each storage; before that a sequence of pickles followed by storages (see
`legacy_files`). ``torch.jit.save`` writes such a zip with the constants of the code in
``constants.pkl``. ``torch.export.save`` writes a different zip (see `exported_programs`). Several
files form one checkpoint if ``pytorch_model.bin.index.json`` of Hugging Face transformers lists them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ckptcore.errors import CheckpointNotFoundError, CorruptCheckpointError, ObjectNotFoundError, UnsupportedLeafError
from ckptcore.model import (
    JSON,
    LEAF,
    ArrayRecord,
    Attribute,
    LeafRecord,
    Node,
    Receipt,
    Skeleton,
    TreeMetadata,
    format_path,
    unreadable_leaf,
)
from ckptcore.model.file_kinds import FILE_HEAD_BYTES, file_kind, is_text, kind_in_place_of
from ckptcore.protocols import ChunkIndex, Inspection, Layout, ReadStore, Snapshot, WriteStore
from ckptcore_dcp.chunk_index import StorageIndex, ZipIndex
from ckptcore_dcp.directories import find_rank_files
from ckptcore_dcp.exported_programs import is_exported, read_exported
from ckptcore_dcp.legacy_files import is_legacy, read_legacy
from ckptcore_dcp.pickled_trees import Leaf, Unreadable, leaf_record, tree_of
from ckptcore_dcp.pickles import Places, read_pickle
from ckptcore_dcp.storages import LocationColumns, StoredBytes, pickled_storages, zip_storages
from ckptcore_dcp.stored_tensors import StoredTensor
from ckptcore_dcp.tensor_parts import TensorPart
from ckptcore_dcp.zip_directories import STORED, Fetch
from ckptcore_dcp.zips import ZipMember, max_pickle_bytes, read_member, read_zip, torch_members


@dataclass(frozen=True, slots=True)
class ReadOnlyLayout(Layout):
    """A layout of files that other software writes."""

    def check(self, tree: TreeMetadata, size: int) -> None:
        """Reject saving.

        Raises:
            UnsupportedLeafError: always.
        """
        raise self._read_only()

    def write(self, snapshot: Snapshot, store: WriteStore) -> JSON:
        """Reject saving. See `check`."""
        raise self._read_only()

    def finish(self, tree: TreeMetadata, receipts: Sequence[Receipt], store: WriteStore) -> JSON:
        """Reject saving. See `check`."""
        raise self._read_only()

    def index(self, tree: TreeMetadata, state: JSON) -> ChunkIndex:
        """Return the index of arrays at byte ranges of files."""
        return StorageIndex(tree, state)

    def _read_only(self) -> UnsupportedLeafError:
        return UnsupportedLeafError(
            f"the layout {self.name!r} only reads files of other software; save with layout='dcp', 'safetensors' or "
            "another one"
        )


_INDEX: Final = re.compile(r"(.+?)\.bin(?:\.(.+))?\.index(?:\.(.+))?\.json")
"""Groups: the stem, and the variant at the two places where older and newer versions of diffusers put it."""
_KNOWN_STEMS: Final = ("pytorch_model", "diffusion_pytorch_model", "adapter_model")
"""Names that transformers, diffusers and PEFT look for if there is no safetensors file, in order of preference."""
_VARIANT: Final = re.compile(rf"(?:{'|'.join(_KNOWN_STEMS)})\.(?!.*-\d+-of-\d+).+\.bin")
_CONSTANTS: Final = "constants.pkl"
_MAX_INDEX_BYTES: Final = 1 << 28
_HEAD_BYTES: Final = 64
_RESTORE: Final = "restore it from a copy, or load another checkpoint"


@dataclass(frozen=True, slots=True)
class TorchLayout(ReadOnlyLayout):
    """Files of ``torch.save``. Read-only."""

    name = "torch"

    def index(self, tree: TreeMetadata, state: JSON) -> ChunkIndex:
        """Return the index of arrays in storages."""
        return ZipIndex(tree, state)

    def inspect(self, store: ReadStore, entry: str | None) -> Inspection | None:
        """Recognise a file of torch.save with any name, an index of several files, or a directory.

        A directory is recognised by the name of a file or index, see `_main_name`. A directory
        that contains nothing but one file per process, such as ``extra_state_rank_0.pt``, becomes a
        mapping from file names.
        """
        names = () if entry is not None else store.list_names("")
        name = entry if entry is not None else _main_name(names)
        if name is not None:
            return _inspect_index(store, name) if _stem_of_index(name) is not None else _inspect_file(store, name)
        ranked = find_rank_files(names)
        return None if ranked is None else _inspect_files(store, ranked)


def _main_name(names: Sequence[str]) -> str | None:
    """Return the file or index to load: one with a known stem, else the only index, else the only variant.

    Raises:
        CheckpointNotFoundError: there are several variants, and no plain file.
    """
    indexes = {stem: name for name in names if (stem := _stem_of_index(name)) is not None}
    for stem in _KNOWN_STEMS:
        if stem in indexes or f"{stem}.bin" in names:
            return indexes.get(stem, f"{stem}.bin")
    if len(indexes) == 1:
        return next(iter(indexes.values()))
    variants = [name for name in names if _VARIANT.fullmatch(name)]
    if len(variants) > 1:
        raise CheckpointNotFoundError(
            f"the directory has several variants of a model: {', '.join(variants)}. Name one of them as the location"
        )
    return variants[0] if variants else None


def _stem_of_index(key: str) -> str | None:
    """Return the stem and the variant that an index is for; None for other files."""
    match = _INDEX.fullmatch(key.rpartition("/")[2])
    return None if match is None else ".".join([part for part in match.groups() if part is not None])


@dataclass(frozen=True, slots=True)
class TorchFile:
    """The contents of a file of ``torch.save``.

    Attributes:
        skeleton, leaves: the tree.
        storages: byte range of each storage, by `StoredTensor.storage`.
        writer: the function that wrote it.
    """

    skeleton: Skeleton
    leaves: Sequence[Leaf]
    storages: Mapping[str, StoredBytes]
    writer: str = "torch.save"


def _inspect_file(store: ReadStore, key: str) -> Inspection | None:
    content = read_torch_file(store, key)
    return None if content is None else _inspection(content.skeleton, [(key, content)])


def _inspect_files(store: ReadStore, keys: Sequence[str]) -> Inspection | None:
    """Inspect several files as one mapping from their names. Return None if one is not a torch.save file."""
    contents: list[TorchFile] = []
    for key in keys:
        content = read_torch_file(store, key)
        if content is None:
            return None
        contents.append(content)
    skeleton = Node("dict", tuple(keys), tuple([content.skeleton for content in contents]))
    return _inspection(skeleton, list(zip(keys, contents, strict=True)))


def _inspection(skeleton: Skeleton, files: Sequence[tuple[str, TorchFile]]) -> Inspection:
    """Return a tree with the leaves of these files, concatenated."""
    columns = LocationColumns()
    records = [leaf_record(leaf) for _, content in files for leaf in content.leaves]
    paths = (
        TreeMetadata(skeleton, tuple(records)).paths if any(type(record) is ArrayRecord for record in records) else ()
    )
    number = 0
    for key, content in files:
        for leaf in content.leaves:
            if isinstance(leaf, StoredTensor):
                path = format_path(paths[number])
                records[number] = columns.add(number, leaf, content.storages, key=key, path=path)
            number += 1
    tree = TreeMetadata(skeleton, tuple(records), columns.aliases)
    writer = files[0][1].writer if len(files) == 1 else "torch.save"
    return Inspection(tree, columns.to_json(), writer, files=[key for key, _ in files])


def read_torch_file(store: ReadStore, key: str) -> TorchFile | None:
    """Return the contents of a file, or None if it is not a torch.save file. Reads no elements.

    Raises:
        CorruptCheckpointError, UnsupportedLeafError, ObjectNotFoundError
    """

    def fetch(start: int, stop: int) -> bytes:
        return store.get(key, start, stop)

    head = fetch(0, _HEAD_BYTES)
    if head[:4] == b"PK\x03\x04":
        every = read_zip(fetch, 0, store.size(key), key=key)
        if is_exported(every):
            tensors, storages = read_exported(fetch, every, key=key)
            program = Node("dict", tuple(tensors), (LEAF,) * len(tensors))
            return TorchFile(program, tuple(tensors.values()), storages, "torch.export.save")
        members = torch_members(every)
        if "data.pkl" not in members:
            return None  # another kind of zip, such as arrays of NumPy
        member = members["data.pkl"]
        pickle = read_member(fetch, member, key=key, limit=max_pickle_bytes(member.nbytes))
        places = Places() if member.compression == STORED else None
        value, _ = read_pickle(pickle, key=key, places=places)
        skeleton, leaves = tree_of(value, key=key, limit=len(pickle) + (1 << 16), places=places)
        pickled = pickled_storages(leaves, key=key, start=member.start, pickle=pickle if member.crc else b"")
        storages = {**zip_storages(members, fetch, key=key), **pickled}
        if _CONSTANTS not in members:
            return TorchFile(skeleton, leaves, storages)
        skeleton, leaves = _with_constants(skeleton, leaves, fetch, members[_CONSTANTS], key)
        return TorchFile(skeleton, leaves, storages, "TorchScript (torch.jit.save)")
    if is_legacy(head):
        places = Places()
        value, legacy, pickle_bytes = read_legacy(fetch, store.size(key), key=key, places=places)
        skeleton, leaves = tree_of(value, key=key, limit=pickle_bytes + (1 << 16), places=places)
        return TorchFile(skeleton, leaves, {**legacy, **pickled_storages(leaves, key=key, start=0)})
    return None


def _with_constants(
    skeleton: Skeleton, leaves: Sequence[Leaf], fetch: Fetch, member: ZipMember, key: str
) -> tuple[Skeleton, Sequence[Leaf]]:
    """Add the constants of TorchScript code as ``CONSTANTS``. They contain the weights of a frozen module."""
    pickle = read_member(fetch, member, key=key, limit=max_pickle_bytes(member.nbytes))
    constants, more = tree_of(read_pickle(pickle, key=key)[0], key=key, limit=len(pickle) + (1 << 16))
    if not more or not isinstance(skeleton, Node):
        return skeleton, leaves
    more = [replace(leaf, storage=f"constants/{leaf.storage}") if type(leaf) is StoredTensor else leaf for leaf in more]
    keys, children = (*skeleton.keys, Attribute("CONSTANTS")), (*skeleton.children, constants)
    return skeleton._replace(keys=keys, children=children), [*leaves, *more]


def _inspect_index(store: ReadStore, key: str) -> Inspection:
    """Inspect the files that an index lists. A listed tensor that its file lacks becomes an unreadable leaf."""
    weight_map = _read_weight_map(store, key)
    directory = key.rpartition("/")[0]
    names: list[str] = []
    records: list[LeafRecord] = []
    columns = LocationColumns()
    unused: dict[str, Sequence[str]] = {}
    by_file: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        if not file or "/" in file or "\\" in file or "\0" in file or file in (".", ".."):
            raise CorruptCheckpointError(f"{key} lists the invalid file name {file[:80]!r}: {_RESTORE}", key=key)
        by_file.setdefault(f"{directory}/{file}" if directory else file, []).append(name)
    for file, listed in sorted(by_file.items()):
        content, problem = None, "is not a file of torch.save"
        try:
            content = read_torch_file(store, file)
            if content is None:
                head = store.get(file, 0, FILE_HEAD_BYTES)
                if (kind := kind_in_place_of(head) or (None if is_text(head) else file_kind(head, file))) is not None:
                    problem = f"is {kind}"
        except ObjectNotFoundError:
            problem = "does not exist"
        except (CorruptCheckpointError, UnsupportedLeafError) as error:
            problem = f"cannot be read ({error})"
        tensors = _outermost_tensors(content) if content is not None else {}
        for name in listed:
            if content is not None and name in tensors:
                record = columns.add(len(records), tensors[name], content.storages, key=file, path=name)
            else:
                problem = problem if content is None else "does not have it"
                record = unreadable_leaf(_missing(key, name, file, problem))
            names.append(name)
            records.append(record)
        if others := [name for name in tensors if name not in listed]:
            unused[file] = others
    skeleton = Node("dict", tuple(names), (LEAF,) * len(names))
    tree = TreeMetadata(skeleton, tuple(records), columns.aliases)
    return Inspection(tree, columns.to_json(), "torch.save", unused=unused)


def _missing(index: str, name: str, file: str, problem: str) -> CorruptCheckpointError:
    restore = ". Restore" if ": " in problem else ": restore"
    return CorruptCheckpointError(
        f"{index} lists {name!r} in {file}, which {problem}{restore} {file} from a copy, or correct {index}", key=file
    )


def _outermost_tensors(content: TorchFile) -> Mapping[str, StoredTensor | TensorPart | Unreadable]:
    """Return the tensors in the outermost mapping of a file, by name."""
    if not isinstance(content.skeleton, Node) or content.skeleton.kind not in ("dict", "OrderedDict"):
        return {}
    tensors: dict[str, StoredTensor | TensorPart | Unreadable] = {}
    tree = TreeMetadata(content.skeleton, tuple([leaf_record(leaf) for leaf in content.leaves]))
    for path, leaf in zip(tree.paths, content.leaves, strict=True):
        if len(path) == 1 and isinstance(path[0], str) and isinstance(leaf, StoredTensor | TensorPart | Unreadable):
            tensors[path[0]] = leaf
    return tensors


def _read_weight_map(store: ReadStore, key: str) -> Mapping[str, str]:
    if store.size(key) > _MAX_INDEX_BYTES:
        raise CorruptCheckpointError(f"{key} is too long for an index of torch.save files: {_RESTORE}", key=key)
    try:
        index: Any = json.loads(store.get(key))
        weight_map = index["weight_map"]
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise TypeError("weight_map must map names to files")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"{key} is not a valid index of torch.save files: {error!r}; {_RESTORE}", key=key
        ) from error
    return weight_map
