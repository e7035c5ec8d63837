"""The layout `torch-checkpointing`: directories of torch_checkpointing, a file for each item and process. Read-only.

An item ``model`` is in ``model_0.pt``, ``model_1.pt`` and so on, each written by ``torch.save``. If an item can be
divided, there is a file ``metadata.pkl``. It has the number of processes, and lists files with other names or formats
(torch_checkpointing 0.1.1, `DistributedMetadata.to_dict`). The rest of the metadata is not needed: divided tensors are
stored as DTensors, which contain their position in the whole tensor.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from ckptcore_dcp.reading import read_pickle

from ckptcore.errors import CorruptCheckpointError, UnsupportedLeafError
from ckptcore.model import Key
from ckptcore.protocols import Inspection, ReadStore
from ckptcore_formats.assembly import (
    RESTORE,
    AssembledLayout,
    Branch,
    Entry,
    Part,
    PartReader,
    Refused,
    has_weights,
    inspection_of,
)
from ckptcore_formats.rank_files import merge_parts

_METADATA: Final = "metadata.pkl"
_ITEM: Final = re.compile(r"([\w-]+)_(0|[1-9][0-9]{0,8})\.pt", re.ASCII)
_MAX_METADATA_BYTES: Final = 1 << 28


class TorchCheckpointingLayout(AssembledLayout):
    """Directories of torch_checkpointing. Read-only."""

    name = "torch-checkpointing"

    def inspect(self, store: ReadStore, entry: str | None) -> Inspection | None:
        """Recognise a directory with the metadata of torch_checkpointing, or with divided tensors.

        Raises:
            CorruptCheckpointError: the file of a process is missing, or the metadata is damaged.
        """
        names = () if entry is not None else store.list_names("")
        files = _items(names)
        layouts: Mapping[str, Sequence[str]] = {}
        size = 0
        if not files or has_weights(names):
            return None
        reader = PartReader(store)
        first: dict[str, Part] = {}
        for item, of_item in files.items():
            part = reader.find(of_item[min(of_item)])
            if part is None:
                return None
            first[item] = part
        is_divided = any(part.processes for part in first.values())
        if _METADATA in names:
            try:
                size, layouts = _read_metadata(store)
            except CorruptCheckpointError:
                if is_divided:
                    raise
                return None  # may be a file of the user
        elif not is_divided:
            return None  # may be files of several epochs
        size = max(size, *[part.processes for part in first.values()])
        tree: dict[Key, Entry] = {}
        for item, of_item in files.items():
            expected = max(size, max(of_item) + 1)
            for rank in range(expected):
                if rank not in of_item:
                    missing = f"{item}_{rank}.pt"
                    raise CorruptCheckpointError(
                        f"{missing} is missing: the checkpoint was saved by {expected} processes, of which "
                        f"{len(of_item)} have a file of {item!r}; {RESTORE}, or load one file by its own path",
                        key=missing,
                    )
            tree[item] = _merged([first[item], *[reader.read(of_item[rank]) for rank in range(1, expected)]])
        for item, keys in layouts.items():
            if item not in tree and keys:
                tree[item] = Refused(
                    UnsupportedLeafError(f"the item is in files of its own layout: load {keys[0]} by its own path")
                )
        return inspection_of(tree, "torch_checkpointing", {*reader.keys, *({_METADATA} & set(names))})

    def own_keys(self, keys: Sequence[str], members: Collection[str]) -> Collection[str]:
        """Return the files of items and the metadata."""
        if _METADATA not in keys:
            return ()  # other software may write files with such names too
        return [key for key in keys if key == _METADATA or _ITEM.fullmatch(key)]


def _items(names: Sequence[str]) -> Mapping[str, Mapping[int, str]]:
    """Return the files of each item by rank."""
    files: dict[str, dict[int, str]] = {}
    for name in names:
        if (match := _ITEM.fullmatch(name)) and not match[1].endswith("rank"):  # see `RankFilesLayout`
            files.setdefault(match[1], {})[int(match[2])] = name
    return files


def _merged(parts: Sequence[Part]) -> Entry:
    """Merge the states of all processes. States that differ and have no divided tensors become a dict by rank."""
    merged = merge_parts(parts)
    same = isinstance(merged, Branch) and not any(isinstance(entry, Refused) for entry in merged.entries)
    if same or any(part.processes for part in parts):
        return merged
    return dict(enumerate(parts))


def _read_metadata(store: ReadStore) -> tuple[int, Mapping[str, Sequence[str]]]:
    """Return the number of processes, and the files of each item that has its own layout.

    Raises:
        CorruptCheckpointError: the metadata is damaged.
    """
    try:
        if store.size(_METADATA) > _MAX_METADATA_BYTES:
            raise ValueError("it is too long")
        document: Any = read_pickle(store.get(_METADATA), key=_METADATA)[0]
        size, items = document["world_size"], document["metadata"]
        if type(size) is not int or not 0 < size < 1 << 30:
            raise ValueError("world_size is no number of processes")
        layouts = {
            item: [layout["file_path"] for layout in of_item["rank_to_layout_info"].values() if layout]
            for item, of_item in items.items()
        }
        if not all(type(text) is str for item, paths in layouts.items() for text in (item, *paths)):
            raise ValueError("a name is no text")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CorruptCheckpointError(
            f"{_METADATA} is not the metadata of torch_checkpointing: {error!r}; {RESTORE}", key=_METADATA
        ) from error
    return size, layouts
