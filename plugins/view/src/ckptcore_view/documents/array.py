"""The document about an array: its shards, its chunks, and the objects that contain them. Reads no elements."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ckptcore.errors import CheckpointError
from ckptcore.model import JSON, ArrayRecord, Box, Chunk, ChunkLocations, format_path
from ckptcore.opening.checkpoint import Checkpoint
from ckptcore.protocols import NativeReader
from ckptcore.redaction import redacted
from ckptcore_view.documents.request import Request
from ckptcore_view.open_tree import OpenTree
from ckptcore_view.shardings import framework_of, sharding_of, sharding_text
from ckptcore_view.viewed import Viewed

_MAX_CHUNKS: Final = 1_024
_MAX_COUNTED: Final = 1 << 16
"""Limit of counted chunks, because a hostile checkpoint of a few bytes may state any number."""

_SHOWN_NOTES: Final = frozenset({"framework", "sharding", "dtensor"})
"""Notes that are not shown themselves, because the page shows the results of `framework_of` and `sharding_text`."""

_MAX_SHARDS: Final = 1_024
_MAX_OWNERS: Final = 16
"""Limit of the owners that are named for one shard."""


def array_document(viewed: Viewed, request: Request) -> Mapping[str, JSON]:
    """Return facts about an array. Parameters: ``at``, the place of its tree, and ``leaf``, its number."""
    return viewed.read(request.text("at"), lambda open_tree: _array(open_tree, request.array_of(open_tree), request))


def _array(open_tree: OpenTree, leaf: int, request: Request) -> Mapping[str, JSON]:
    record, tree = open_tree.record(leaf), open_tree.tree
    stored = open_tree.stored(leaf)
    return {
        "path": format_path(tree.paths[leaf]),
        "kind": record.kind,
        "dtype": record.spec.dtype,
        "shape": list(record.spec.shape),
        "elements": record.spec.size,
        "nbytes": record.spec.nbytes,
        "tied": [format_path(tree.paths[other]) for other in _tied(open_tree, stored) if other != leaf],
        "ranks": list(tree.held_by[leaf]) if leaf in tree.held_by else None,
        "notes": {
            name: json.dumps(note, ensure_ascii=False)
            for name, note in record.notes.items()
            if name not in _SHOWN_NOTES
        },
        "framework": framework_of(record),
        "sharded": sharding_text(record),
        "sharding": _sharding(record),
        "chunks": _chunks(open_tree.checkpoint, stored, record, request),
    }


def _tied(open_tree: OpenTree, stored: int) -> Sequence[int]:
    aliases = open_tree.tree.aliases
    return [stored, *(alias for alias, target in aliases.items() if target == stored)]


def _sharding(record: ArrayRecord) -> JSON:
    sharding = sharding_of(record)
    if sharding is None:
        return None
    return {
        "owner": sharding.owner,
        "count": len(sharding.shards),
        "shards": [
            {**_box(box), "owners": list(owners[:_MAX_OWNERS]), "count": len(owners)}
            for box, owners in itertools.islice(sharding.shards.items(), _MAX_SHARDS)
        ],
    }


def _chunks(checkpoint: Checkpoint, leaf: int, record: ArrayRecord, request: Request) -> JSON:
    """Return the first chunks with their positions, if known, and the objects that contain these chunks.

    If there are too many chunks to count, ``count`` is the number of counted chunks, and ``is_all`` is False.
    """
    if checkpoint.derived is not None:
        return {"error": "This checkpoint takes arrays from other checkpoints: look at the base."}
    whole = Box.whole(record.spec.shape)
    try:
        chunks = request.each(checkpoint.index.boxes(leaf, whole))
        shown = list(itertools.islice(chunks, _MAX_CHUNKS))
        located = _located(checkpoint, shown, record.spec.numpy_dtype.itemsize)
    except CheckpointError as error:
        return {"error": redacted(str(error))}
    objects: dict[str, int] = {}
    for chunk in located:
        objects[chunk["key"]] = objects.get(chunk["key"], 0) + 1
    counted = len(shown) + sum(1 for _ in itertools.islice(chunks, _MAX_COUNTED - len(shown)))
    return {
        "count": counted,
        "is_all": counted < _MAX_COUNTED or next(chunks, None) is None,
        "chunks": located,
        "objects": [[key, count] for key, count in objects.items()],
    }


def _located(checkpoint: Checkpoint, chunks: Sequence[Chunk], itemsize: int) -> list[dict[str, Any]]:
    """Find the positions of chunks. Reads indexes and tree nodes if the metadata lacks the positions."""
    index = checkpoint.index
    located = None
    if chunks and not chunks[0].is_exact and not isinstance(index, NativeReader):
        located = index.locate(chunks, checkpoint.store)
    rows = []
    for row, chunk in enumerate(chunks):
        key, start, nbytes, stored = chunk.key, chunk.offset, chunk.box.size * itemsize, "raw"
        if located is not None:
            key, start, stored = located.keys[row], located.starts[row], _stored(located, row)
            stop = located.stops.get(row)
            nbytes = nbytes if stored == "raw" else 0 if stop is None else stop - start
        elif not chunk.is_exact:
            start, nbytes, stored = 0, 0, "item"  # only the native reader knows the position
        rows.append({**_box(chunk.box), "key": key, "start": start, "nbytes": nbytes, "stored": stored})
    return rows


def _stored(located: ChunkLocations, row: int) -> str:
    """Return how a chunk is stored: raw, encoded, inline (next to its key), or not at all, with a fill value."""
    if row in located.fills:
        return "fill value"
    if row in located.inline:
        return "inline"
    return "encoded" if row in located.encoded else "raw"


def _box(box: Box) -> dict[str, JSON]:
    return {"from": list(box.start), "to": list(box.stop)}
