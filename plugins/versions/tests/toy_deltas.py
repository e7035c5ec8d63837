"""A layout of versions for tests: an array of a delta is stored as its bytes XOR those of its base, uncompressed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from ckptcore_versions.held_version import HeldVersion

from ckptcore.derivations import Stored
from ckptcore.hookspecs import hookimpl
from ckptcore.io.elements import plain
from ckptcore.model import JSON, ArrayRecord, ArraySegment, ArraySpec, Box, HostArray, Receipt, TreeMetadata
from ckptcore.planning import ChunkColumns, ChunkTable
from ckptcore.protocols import (
    BaseReference,
    ChainedArrays,
    ChainLink,
    ChunkIndex,
    DerivedArray,
    Layout,
    LayoutCapabilities,
    LayoutFactory,
    Snapshot,
    WriteStore,
)
from ckptcore.protocols.values import Part


@dataclass(frozen=True)
class ToyDeltas(Layout):
    """The layout.

    Attributes:
        held: the base of a delta.
        taking: called before each array is taken from the snapshot.
        padding: the size of an unused object in full versions. With it, a delta is much smaller than a full version.
    """

    held: HeldVersion | None = None
    taking: Callable[[str], object] = str
    padding: int = 1 << 20

    name = "toy-deltas"
    capabilities = LayoutCapabilities(any_replica_writes=True)

    def against(self, held: HeldVersion | None) -> ToyDeltas:
        return replace(self, held=held)

    def write(self, snapshot: Snapshot, store: WriteStore) -> JSON:
        plan = snapshot.plan
        rows: list[JSON] = []
        for number, item in enumerate(plan.items):
            path = plan.tree.paths[item.leaf]
            self.taking("/".join(map(str, path)))
            for part, (box, array) in enumerate(zip(item.boxes, snapshot.take(number), strict=True)):
                old = None if self.held is None else self.held.elements(path, item.spec, box)
                elements = np.ascontiguousarray(plain(array)).reshape(box.shape)
                if old is not None:
                    elements = _xor(elements, plain(old))
                key = f"{item.leaf}-{plan.rank}-{part}"
                segment = ArraySegment(box, elements.itemsize, _opened(box, elements), lambda: None)
                store.write(key, [segment])
                rows.append([item.leaf, key, list(box.start), list(box.stop), old is not None])
            snapshot.release(number)
        return rows

    def finish(self, tree: TreeMetadata, receipts: Sequence[Receipt], store: WriteStore) -> JSON:
        rows = [row for receipt in receipts for row in receipt.state]  # type: ignore[union-attr]
        base = None if self.held is None else self.held.version
        if base is None:
            store.put("padding", bytes(self.padding))
        return {"base": None if base is None else [base.name, base.save_id, base.digest], "rows": rows}

    def base(self, tree: TreeMetadata, state: Any) -> BaseReference | None:
        return None if state["base"] is None else BaseReference(*state["base"])

    def index(self, tree: TreeMetadata, state: Any) -> ChunkIndex:
        columns = ChunkColumns()
        for leaf, key, start, stop, _ in state["rows"]:
            columns.add(leaf, key, 0, Box(tuple(start), tuple(stop)))
        return ChunkTable(tree, columns.to_json())

    def derive(self, links: Sequence[ChainLink], base: TreeMetadata) -> ChainedArrays:
        tree = links[0].tree
        arrays: dict[int, DerivedArray] = {}
        for leaf, record in enumerate(tree.leaves):
            if not isinstance(record, ArrayRecord) or leaf in tree.aliases:
                continue
            path = tree.paths[leaf]
            below: DerivedArray | None = None
            deltas: list[Stored] = []
            for source, link in enumerate(links):
                number = link.tree.paths.index(path)
                stored = Stored(record.spec, number, source)
                state: Any = link.state
                if not all(row[4] for row in state["rows"] if row[0] == number):
                    below = stored
                    break
                deltas.append(stored)
            if below is None:
                below = Stored(record.spec, base.paths.index(path), len(links))
            for stored in reversed(deltas):
                below = Xored(record.spec, (below, stored))
            arrays[leaf] = below
        return ChainedArrays(tree, [link.tree for link in links], arrays)


class Xored(NamedTuple):
    """The bytes of two arrays of one shape, XOR. See `DerivedArray`."""

    spec: ArraySpec
    inputs: tuple[DerivedArray, DerivedArray]

    def needed(self, box: Box) -> Sequence[Part]:
        return [Part(0, box), Part(1, box)]

    def views(self, box: Box, out: HostArray) -> None:
        return None

    def make(self, box: Box, parts: Sequence[HostArray], out: HostArray) -> None:
        plain(out)[...] = _xor(plain(parts[0]), plain(parts[1]))


def _xor(first: HostArray, second: HostArray) -> HostArray:
    data = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (first, second)]
    return (data[0] ^ data[1]).view(first.dtype).reshape(first.shape)


def _opened(box: Box, array: HostArray) -> Callable[[], Sequence[tuple[Box, HostArray]]]:
    return lambda: [(box, array)]


class ToyPlugin:
    """The plugin of the layout."""

    @hookimpl
    def ckpt_layouts(self) -> Mapping[str, LayoutFactory]:
        return {"toy-deltas": ToyDeltas}
