"""Sessions of a partial save in safetensors: files of each session, and the index that makes one checkpoint of them.

Files of whole arrays are named by their session, ``model-session-00001.safetensors``, which is the number of its first process: how many
files there will be nobody knows as they are written. Whoever reads the format by its index takes any names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ckptcore.builtin.safetensors_files import METADATA, encode_header, file_metadata
from ckptcore.builtin.safetensors_places import SliceColumns
from ckptcore.model.metadata import TreeMetadata
from ckptcore.model.transfer import Receipt
from ckptcore.model.tree import JSON
from ckptcore.protocols import WriteStore

__all__ = ["finish_sessions", "renumbered_places"]


def renumbered_places(state: JSON, leaves: Sequence[int]) -> JSON:
    """The state of a receipt where leaves have other numbers."""
    columns: Any = state  # what a hostile one raises the caller knows
    made = {**columns, "leaf": [leaves[leaf] for leaf in columns["leaf"]]}
    if "slices" in columns:
        made["slices"] = {**columns["slices"], "leaf": [leaves[leaf] for leaf in columns["slices"]["leaf"]]}
    return made


def finish_sessions(
    tree: TreeMetadata, receipts: Sequence[Receipt], stem: str, metadata: Mapping[str, str], store: WriteStore
) -> JSON:
    """Put together where sessions wrote arrays, and write the index; one empty file where there are no arrays at all.

    The index has the names that stand in the files. Where arrays are in slices there is none, as after any save.
    """
    states: list[Any] = [receipt.state for receipt in receipts]
    places: dict[int, tuple[str, int, str]] = {}
    for state in states:
        columns = zip(state["leaf"], state["file"], state["offset"], state["name"], strict=True)
        places.update({leaf: (state["files"][file], offset, name) for leaf, file, offset, name in columns})
    slices = SliceColumns()
    for state in states:
        if "slices" in state:
            slices.extend(state["slices"], tree, places)
    keys = list(dict.fromkeys([key for key, _, _ in places.values()]))
    if not slices and places:
        weight_map = {name: key for key, _, name in places.values()}
        index: JSON = {"metadata": {"total_size": tree.nbytes}, "weight_map": weight_map}
        store.put(f"{stem}.safetensors.index.json", json.dumps(index, indent=2).encode())
    elif not slices:
        keys = [f"{stem}.safetensors"]
        store.put(keys[0], encode_header({METADATA: file_metadata(tree, {}, (), metadata)}, 0))
    numbers = {key: number for number, key in enumerate(keys)}
    state = {
        "files": keys,
        "leaf": list(places),
        "file": [numbers[key] for key, _, _ in places.values()],
        "offset": [offset for _, offset, _ in places.values()],
    }
    return {**state, "slices": slices.to_json()} if slices else state
