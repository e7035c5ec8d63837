"""Safetensors files of other software: single files, files that an index lists, variants, and pipelines.

File names follow `transformers.modeling_utils` 5.23 and `diffusers.models.model_loading_utils` 0.42. Examples for the
stem ``model`` and the variant ``fp16``:

* one file: ``model.safetensors`` and ``model.fp16.safetensors``
* several files: ``model-00001-of-00002.safetensors`` with the index ``model.safetensors.index.json``, and
  ``model.fp16-00001-of-00002.safetensors`` with the index ``model.safetensors.index.fp16.json``
* several files of older versions of diffusers: ``model-00001-of-00002.fp16.safetensors`` with the index
  ``model.safetensors.fp16.index.json``

This module treats a variant as a stem of its own, such as ``model.fp16``.

A directory with the changes of weights relative to another directory, as slime writes it, has an index whose metadata
has ``delta_encoding``, and tensors of encoded bytes. It is left to the layout `slime`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, TypeAlias

from ckptcore.builtin.safetensors_files import (
    PART,
    READER_OF_SLICES,
    SHARDING,
    fits,
    parse_json_object,
    read_header,
    read_json_object,
    record_of,
    refuse_lost_root,
)
from ckptcore.distributions import install_hint
from ckptcore.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CompositeCheckpointError,
    CorruptCheckpointError,
    ObjectNotFoundError,
    UncommittedCheckpointError,
)
from ckptcore.model.metadata import ArrayRecord, LeafRecord, TreeMetadata, unreadable_leaf
from ckptcore.model.tree import JSON, LEAF, Node
from ckptcore.protocols import InspectedComposite, Inspection, ReadStore
from ckptcore.records import NamedTuple

_FILE: Final = ".safetensors"
_ADAPTER: Final = "adapter_model"
_ADAPTER_CONFIG: Final = "adapter_config.json"
_KNOWN_STEMS: Final[Mapping[str, str]] = {
    "model": "pytorch_model",
    "diffusion_pytorch_model": "diffusion_pytorch_model",
    _ADAPTER: _ADAPTER,
}
"""Stems of the files that transformers, diffusers and PEFT look for (their SAFE(TENSORS)_WEIGHTS_NAME), in order of
preference. The value is the stem of the files that they read if there are no safetensors files."""

_OTHER_FILE: Final = ".bin"
_INDEX: Final = re.compile(r"(.+?)\.safetensors(?:\.(.+))?\.index(?:\.(.+))?\.json")
"""Name of an index. The groups are the stem, the variant in older diffusers, and the variant in newer diffusers.
"""
_SHARD: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\..+)?\.safetensors")
_SLICES: Final = re.compile(r"shard-\d+-.+-\d+-of-\d+\.safetensors")
"""Name of a file with slices of arrays. Its header has `SHARDING`, but files of whole arrays may have that as well."""

_PIPELINES: Final = ("model_index.json", "modular_model_index.json")
"""The files in which diffusers lists the models of a pipeline. Each model has its own directory. The second file, for
modular pipelines, may list models of other repositories."""

_CONFIG: Final = "config.json"
_WITHOUT_WEIGHTS: Final = re.compile("Scheduler|Tokenizer|Processor|Extractor|Guide|Guidance")
"""Classes of diffusers and transformers for parts of a pipeline that have no weights."""


class _Leaf(NamedTuple):
    """A leaf.

    Attributes:
        name: its name.
        record: its array, or the reason why it cannot be loaded.
        key: the file.
        offset: the position of its first element in the file, in bytes; -1 for a leaf that cannot be loaded.
    """

    name: str
    record: LeafRecord
    key: str
    offset: int


class _File(NamedTuple):
    """The content of a file.

    Attributes:
        key: the file.
        leaves: its tensors by name, in the order of their bytes, then the same tensors by their aliases.
        others: the aliases: further names of stored tensors.
        metadata: the metadata of its header.
    """

    key: str
    leaves: Mapping[str, _Leaf]
    others: frozenset[str]
    metadata: Mapping[str, str]


class _Content(NamedTuple):
    """The leaves of a checkpoint, and the metadata and unused tensors of its files."""

    leaves: Sequence[_Leaf]
    metadata: Mapping[str, JSON]
    unused: Mapping[str, Sequence[str]] = {}


_Names: TypeAlias = Mapping[str, str]
"""File names by stem, or by tensor name."""


def inspect_files(store: ReadStore, entry: str | None) -> Inspection | None:
    """Inspect safetensors files of other software. Return None if the location has none.

    An index decides from which file each tensor comes. If that file lacks the tensor, the tensor is a leaf that cannot
    be loaded. Aliases of `safetensors.torch.save_model` are leaves that share their bytes. The metadata of an adapter
    has the content of ``adapter_config.json`` as ``adapter_config``.

    Args:
        store: the files of the location.
        entry: the file that the user named, with any suffix, or None for a directory.

    Raises:
        CorruptCheckpointError: an index, or a file that no index lists, is damaged.
        CheckpointNotFoundError: several files exist, and no index lists which of them belong together; or a file has
            slices of arrays.
        CompositeCheckpointError: the location is the directory of a pipeline.
        CorruptCheckpointError: a file of a directory is part of a checkpoint of ckptcore that has lost its root.
    """
    names = () if entry is not None else store.list_names("")
    if (pipeline := _pipeline_of(store, names)) is not None:
        members = list(pipeline.members)
        raise CompositeCheckpointError(
            f"the directory has a pipeline of several models ({', '.join(members)}): use load_checkpointables, or load "
            "one by its own location",
            members,
        )
    try:
        content = _find_in_directory(store, names) if entry is None else _find_in_file(store, entry)
    except _DeltaError as error:
        if entry is None and not error.hint:
            return None  # for the layout `slime`
        raise
    if content is None:
        return None
    leaves, metadata, unused = content
    files = sorted({leaf.key for leaf in leaves if leaf.offset >= 0})
    if entry is None:
        keys = files or [name for name in names if name.endswith(_FILE)]
        refuse_lost_root(keys[0] if keys else "", metadata)
    if SHARDING in metadata and (slices := [key for key in files if _SLICES.fullmatch(key.rpartition("/")[2])]):
        raise CheckpointNotFoundError(
            f"{slices[0]} has slices of arrays, and not whole arrays: name the directory of its checkpoint as the "
            "location. Without checkpoint.json there, load the arrays alone with " + READER_OF_SLICES
        )
    metadata = {name: text for name, text in metadata.items() if name != PART}
    aliases = _aliases(leaves)
    arrays = [number for number, leaf in enumerate(leaves) if leaf.offset >= 0 and number not in aliases]
    numbers = {key: number for number, key in enumerate(files)}
    state: JSON = {
        "files": files,
        "leaf": arrays,
        "file": [numbers[leaves[number].key] for number in arrays],
        "offset": [leaves[number].offset for number in arrays],
    }
    skeleton = Node("dict", tuple([leaf.name for leaf in leaves]), (LEAF,) * len(leaves))
    tree = TreeMetadata(skeleton, tuple([leaf.record for leaf in leaves]), aliases)
    return Inspection(tree, state, "safetensors", dict(metadata), unused=unused)


class _DeltaError(CheckpointNotFoundError):
    """An index lists changes of weights.

    Attributes:
        hint: the command that installs the layout that reads them; empty if it is installed.
    """

    def __init__(self, index: str) -> None:
        self.hint = install_hint(layout="slime")
        way = f"install support for the format of slime with {self.hint}" if self.hint else "name the directory"
        super().__init__(f"{index} lists changes relative to another version, not weights: {way}")


def inspect_pipeline(store: ReadStore) -> InspectedComposite | None:
    """Inspect the directory of a pipeline of diffusers. Return None for other directories.

    The checkpointables are the listed directories that have weights. In a pipeline that is not modular, other models
    are checkpointables too if their directory is missing, is empty, or has a config. At least one directory must have
    weights.

    Raises:
        CorruptCheckpointError: the list of models is damaged.
    """
    return _pipeline_of(store, store.list_names(""))


def _pipeline_of(store: ReadStore, names: Sequence[str]) -> InspectedComposite | None:
    key = next((name for name in _PIPELINES if name in names), None)
    if key is None:
        return None
    index = read_json_object(store, key)
    members, has_weights = [], False
    for name, described in index.items():
        if not isinstance(described, list) or "/" in name or name in ("", ".", ".."):
            continue
        inside = store.list_names(name) if f"{name}/" in names else ()
        if _has_weights(inside):
            has_weights = True
        elif key not in _PIPELINES[:1] or not _is_model(described) or (inside and _CONFIG not in inside):
            continue
        members.append(name)
    if not has_weights:
        return None
    version = index.get("_diffusers_version")
    writer = f"diffusers {version}" if isinstance(version, str) else "diffusers"
    return InspectedComposite(dict.fromkeys(members, "tree"), writer, {"model_index": index})


def _is_model(described: Sequence[JSON]) -> bool:
    """Return True if a part of a pipeline has weights, by its library and class. Both are null for an unused part."""
    library, name = (*described, None, None)[:2]
    return isinstance(library, str) and isinstance(name, str) and not _WITHOUT_WEIGHTS.search(name)


def _has_weights(names: Sequence[str]) -> bool:
    return any(name.endswith((_FILE, _OTHER_FILE)) or _INDEX.fullmatch(name) for name in names)


def _aliases(leaves: Sequence[_Leaf]) -> dict[int, int]:
    """Return, for each leaf with the same bytes as an earlier leaf, the number of the earlier leaf."""
    first: dict[tuple[str, int], int] = {}
    aliases: dict[int, int] = {}
    for number, leaf in enumerate(leaves):
        if isinstance(leaf.record, ArrayRecord) and leaf.record.spec.size:
            original = first.setdefault((leaf.key, leaf.offset), number)
            if original != number:
                aliases[number] = original
    return aliases


def _find_in_file(store: ReadStore, entry: str) -> _Content | None:
    if entry == f"{_ADAPTER}{_FILE}":
        content = _content(_read_file(store, entry))
        try:
            return _with_config(store, content)
        except CorruptCheckpointError:
            return content  # the user asked for this file only, so a damaged config does not matter
    if _INDEX.fullmatch(entry.rpartition("/")[2]):
        return _read_index(store, entry)
    return _content(_read_file(store, entry)) if entry.endswith(_FILE) or _has_header(store, entry) else None


def _find_in_directory(store: ReadStore, names: Sequence[str]) -> _Content | None:
    matches = [match for name in names if (match := _INDEX.fullmatch(name))]
    matches.sort(key=lambda match: match[2] is None)  # older names first, so that current names replace them below
    indexes = {".".join(filter(None, match.groups())): match[0] for match in matches}
    files = [name for name in names if name.endswith(_FILE)]
    if not indexes and not files:
        return None
    stem = _choose_stem(indexes, files)
    if _prefers_other_files(stem, indexes, files, names):
        return None
    if stem is None:
        for key in files[:1]:  # one file is enough: all files of a checkpoint have the mark
            refuse_lost_root(key, _read_file(store, key).metadata)
        raise CheckpointNotFoundError(
            "the directory has several safetensors files and no index lists which belong together: "
            f"{', '.join([*indexes.values(), *files])}. Name one of them as the location"
        )
    content = _read_stem(store, stem, indexes, files)
    if stem not in indexes and _is_changes(content):
        raise UncommittedCheckpointError(
            "the files have changes of weights, and their index, which is written last, does not exist: load it later, "
            "or copy the whole directory"
        )
    return _with_config(store, content) if stem == _ADAPTER else content


def _is_changes(content: _Content) -> bool:
    """Return True for files of slime: tensors of encoded bytes, each with a checksum under its name in the metadata."""
    return bool(content.leaves) and all(
        leaf.name in content.metadata
        and isinstance(leaf.record, ArrayRecord)
        and (leaf.record.spec.dtype, len(leaf.record.spec.shape)) == ("uint8", 1)
        for leaf in content.leaves
    )


def _with_config(store: ReadStore, content: _Content) -> _Content:
    """Add the config of an adapter to its metadata, if the file exists."""
    try:
        config = read_json_object(store, _ADAPTER_CONFIG)
    except ObjectNotFoundError:
        return content
    return content._replace(metadata={**content.metadata, "adapter_config": config})


def _stem_of_file(name: str) -> str:
    """Return the stem, including the variant, of a single file or of one of several files."""
    shard = _SHARD.fullmatch(name)
    return name.removesuffix(_FILE) if shard is None else f"{shard[1]}{shard[4] or ''}"


def _choose_stem(indexes: _Names, files: Sequence[str]) -> str | None:
    """Return the stem of the files to load; None if the choice is ambiguous.

    If a directory has several checkpoints, the main checkpoint of a known library is loaded. For example, a model that
    was trained with an adapter also has the files of the adapter, and a model may have variants.
    """
    stems = set(map(_stem_of_file, files))
    for stem in _KNOWN_STEMS:
        if stem in indexes or stem in stems:
            return stem
    for candidates in (set(indexes), stems):
        if len(candidates) == 1:
            return candidates.pop()
    return None


def _prefers_other_files(stem: str | None, indexes: _Names, files: Sequence[str], names: Sequence[str]) -> bool:
    """Return True if all safetensors files are variants, and a file of another format has the main weights.

    That other file is then loaded instead.
    """
    if stem in _KNOWN_STEMS:
        return False
    stems = [stem] if stem is not None else [*indexes, *map(_stem_of_file, files)]
    return any(
        name.startswith(f"{known}.")
        and (f"{other}{_OTHER_FILE}" in names or f"{other}{_OTHER_FILE}.index.json" in names)
        for known, other in _KNOWN_STEMS.items()
        for name in stems
    )


def _read_stem(store: ReadStore, stem: str, indexes: _Names, files: Sequence[str]) -> _Content:
    """Read the files with a stem: the files that the index lists, the single file, or all shards."""
    whole = f"{stem}{_FILE}"
    if stem in indexes:
        key = indexes[stem]
        # transformers does not delete the index when it replaces several files with one.
        if whole not in files or not set(files).isdisjoint(_read_weight_map(store, key).values()):
            return _read_index(store, key, [name for name in files if _stem_of_file(name) == stem])
    if whole in files:
        return _content(_read_file(store, whole))
    shards = [shard for name in files if (shard := _SHARD.fullmatch(name)) and _stem_of_file(name) == stem]
    counts = sorted({int(shard[3]) for shard in shards})
    if counts != [len(shards)]:
        raise CorruptCheckpointError(
            f"expected {counts[0] if len(counts) == 1 else counts} safetensors shards that belong together, found "
            f"{len(shards)}: {[shard[0] for shard in shards]}"
        )
    return _join([_read_file(store, shard[0]) for shard in shards])


def _content(file: _File) -> _Content:
    return _Content(list(file.leaves.values()), file.metadata)


def _join(files: Sequence[_File]) -> _Content:
    """Join shards without an index. A tensor that several shards have cannot be loaded."""
    leaves: dict[str, _Leaf] = {}
    metadata: dict[str, str] = {}
    for file in files:
        metadata.update(file.metadata)
        for name, leaf in file.leaves.items():
            known = leaves.setdefault(name, leaf)
            if known is leaf:
                continue
            error = CorruptCheckpointError(
                f"the tensor {name!r} is both in {known.key} and in {file.key}, and no index says which is meant: load "
                "one of these files by its own location, or restore the index",
                key=file.key,
            )
            leaves[name] = _Leaf(name, unreadable_leaf(error), file.key, -1)
    return _Content(list(leaves.values()), metadata)


def _read_weight_map(store: ReadStore, key: str) -> Mapping[str, str]:
    """Return the files that an index lists by tensor, as keys of the store."""
    index = parse_json_object(store.get(key), key)
    weight_map, metadata = index.get("weight_map"), index.get("metadata")
    if isinstance(metadata, dict) and "delta_encoding" in metadata:
        raise _DeltaError(key)
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CorruptCheckpointError(f"{key} has no weight_map from names to files", key=key)
    directory = key.rpartition("/")[0]
    return {name: f"{directory}/{file}" if directory else file for name, file in weight_map.items()}


def _read_index(store: ReadStore, index: str, others: Sequence[str] = ()) -> _Content:
    """Read the files that an index lists.

    Args:
        store: the files.
        index: the index.
        others: files that belong to the index by their names. If the index does not list a file, its tensors are
            unused.
    """
    weight_map = _read_weight_map(store, index)
    files: dict[str, _File | CheckpointError] = {}
    for key in sorted(set(weight_map.values())):
        try:
            files[key] = _read_file(store, key)
        except (ObjectNotFoundError, CorruptCheckpointError) as error:
            files[key] = error
    read = [file for file in files.values() if isinstance(file, _File)]
    leaves = list(_leaves_of_index(index, weight_map, files))
    names = {leaf.name for leaf in leaves}
    metadata: dict[str, str] = {}
    for file in read:
        metadata.update(file.metadata)
        # Aliases are only in the metadata of files, so the writer of an index may leave them out.
        leaves.extend([file.leaves[name] for name in file.leaves if name in file.others - names])
        names |= file.others
    for key in others:
        if key not in files:
            with suppress(CheckpointError):  # damage does not matter: this file is not loaded
                read.append(_read_file(store, key))
    unused = {file.key: unlisted for file in read if (unlisted := _unused(file, weight_map))}
    return _Content(leaves, metadata, unused)


def _unused(file: _File, weight_map: _Names) -> Sequence[str]:
    """Return the names of the tensors of a file that its index does not list for this file."""
    return [name for name in file.leaves if name not in file.others and weight_map.get(name) != file.key]


def _leaves_of_index(index: str, weight_map: _Names, files: Mapping[str, _File | CheckpointError]) -> Iterator[_Leaf]:
    """Yield the leaves that an index lists, by file. Leaves in the file come first, in the order of their bytes."""
    listed: dict[str, list[str]] = {}
    for name, key in weight_map.items():
        listed.setdefault(key, []).append(name)
    for key, file in files.items():
        if isinstance(file, _File):
            yield from [leaf for name, leaf in file.leaves.items() if weight_map.get(name) == key]
        for name in listed[key]:
            if not isinstance(file, _File) or name not in file.leaves:
                yield _Leaf(name, unreadable_leaf(_missing(index, name, key, files)), key, -1)


def _missing(index: str, name: str, key: str, files: Mapping[str, _File | CheckpointError]) -> CorruptCheckpointError:
    """Return the error for a tensor that an index lists but that its file does not have."""
    file = files[key]
    if isinstance(file, ObjectNotFoundError):
        return CorruptCheckpointError(
            f"{index} lists {name!r} in {key}, which does not exist: restore {key} from a copy, or correct {index}",
            key=key,
        )
    if isinstance(file, CheckpointError):
        return CorruptCheckpointError(f"{index} lists {name!r} in {key}, which is damaged: {file}", key=key)
    copies = [other.key for other in files.values() if isinstance(other, _File) and name in other.leaves]
    return CorruptCheckpointError(
        f"{index} lists {name!r} in {key}, which does not have it: restore {key} from a copy, or correct {index}"
        + (f", if the copy in {copies[0]} is meant" if copies else ""),
        key=key,
    )


def _has_header(store: ReadStore, key: str) -> bool:
    """Return True if a file starts like a safetensors file: the length of a header that fits into it, then "{".

    Files that start with letters, such as files of torch.save, are excluded: their first 8 bytes are a number that is
    greater than any limit.
    """
    file_bytes = store.size(key)
    begin = store.get(key, 0, min(file_bytes, 9))
    return fits(int.from_bytes(begin[:8], "little"), file_bytes) and begin[8:] == b"{"


def _read_file(store: ReadStore, key: str) -> _File:
    """Read the header of a file.

    `safetensors.torch.save_model` stores a tensor with several names only once, under one name. It lists the other
    names in the metadata: ``{other name: stored name}``.
    """
    header = read_header(partial(store.get, key), store.size(key), key)
    leaves: dict[str, _Leaf] = {}
    for name, entry in header.tensors.items():
        record = record_of(entry)
        if record is None:
            error = CorruptCheckpointError(
                f"the header of {key} describes {name!r} with dtype {entry.dtype[:40]!r} and shape "
                f"{str(list(entry.shape))[:80]}, which cannot be: restore the file from a copy, or save it again",
                key=key,
            )
            leaves[name] = _Leaf(name, unreadable_leaf(error), key, -1)
        else:
            leaves[name] = _Leaf(name, record, key, entry.start)
    metadata = header.metadata or {}
    others = {
        name: leaves[stored]._replace(name=name)
        for name, stored in metadata.items()
        if stored in header.tensors and name not in header.tensors and name != _FORMAT
    }
    return _File(key, {**leaves, **others}, frozenset(others), metadata)


_FORMAT: Final = "format"
"""A name in the metadata that is not an alias. Its value is the framework that wrote the file."""
