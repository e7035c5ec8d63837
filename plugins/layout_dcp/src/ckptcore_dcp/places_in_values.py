"""Places of arrays within values: of a tuple of tensors, which torch.distributed.checkpoint stores whole, as one item."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ckptcore.errors import CorruptCheckpointError
from ckptcore.model import JSON, HostArray, ReadPlan, TreeMetadata
from ckptcore.protocols import ReadStore
from ckptcore_dcp.reading import read_boxes
from ckptcore_dcp.state import ChunkTable
from ckptcore_dcp.storages import KnownPlaces, Place, PlaceColumns, read_places

__all__ = ["places_of_state", "read_boxes_and_places", "state_with_places"]

_KEY: Final = "places"


def state_with_places(chunks: JSON, places: PlaceColumns) -> JSON:
    """The state of chunks, with the places of arrays that have none; for `places_of_state`."""
    state: Any = chunks
    encoded: Any = places.to_json()
    return {**state, _KEY: encoded} if encoded["arrays"] else state


def places_of_state(known: KnownPlaces, tree: TreeMetadata, state: JSON) -> Mapping[int, Place]:
    """By leaf: where the elements of arrays are that have no chunks. The state may be hostile.

    Raises:
        CorruptCheckpointError: it does not fit the tree.
    """
    if not isinstance(state, Mapping):
        raise CorruptCheckpointError("the layout dcp cannot read where arrays are: its state is no object")
    places = state.get(_KEY)
    return {} if places is None else known.places(tree, places)


def read_boxes_and_places(
    plan: ReadPlan, buffers: Sequence[HostArray], store: ReadStore, table: ChunkTable, places: Mapping[int, Place]
) -> Iterator[int]:
    """Fill ``buffers[i]`` with the box of ``plan.items[i]``; yields `i` once it is there.

    Raises:
        CorruptCheckpointError: bytes are missing or wrong.
        UnsupportedLeafError: an array has no place.
    """
    apart = [number for number, item in enumerate(plan.items) if item.leaf in places]
    if not apart:
        yield from read_boxes(plan, buffers, store, table)
        return
    of_chunks = [number for number, item in enumerate(plan.items) if item.leaf not in places]
    for number in read_boxes(_part(plan, of_chunks), [buffers[number] for number in of_chunks], store, table):
        yield of_chunks[number]
    for number in read_places(_part(plan, apart), [buffers[number] for number in apart], store, places):
        yield apart[number]


def _part(plan: ReadPlan, numbers: Sequence[int]) -> ReadPlan:
    return ReadPlan(plan.tree, plan.state, tuple([plan.items[number] for number in numbers]))
