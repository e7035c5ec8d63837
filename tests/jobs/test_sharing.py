"""Sharing of writes: replicas write each element once, and each process writes about the same number of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing import ThreadJob
from ckptcore_testing.layouts import cells_of
from ckptcore_testing.trees import same_value
from hypothesis import given
from hypothesis import strategies as st

import ckptcore
from ckptcore.builtin.host_leaves import HostArrayHandler
from ckptcore.model import LEAF, ArrayRecord, ArraySpec, Box, HostArray, Node, Pending, Receipt, Shard, TreeMetadata
from ckptcore.planning import check_coverage, plan_write
from ckptcore.planning.partition import ReplicaOptions, SplitTree, cut_for_replicas, owners_of, written_boxes
from ckptcore.protocols import Coordinator

_Cuts = tuple[tuple[int, ...], ...] | None


def _tree(arrays: Sequence[tuple[tuple[int, ...], _Cuts]], aliases: dict[int, int] | None = None) -> TreeMetadata:
    records = tuple([ArrayRecord(ArraySpec(shape, "int8"), cuts=cuts) for shape, cuts in arrays])
    keys = tuple([str(number) for number in range(len(records))])
    return TreeMetadata(Node("dict", keys, (LEAF,) * len(keys)), records, aliases or {})


def _receipts(split: SplitTree, held: Sequence[Any], size: int) -> list[Receipt]:
    """Return the receipts of each rank; `held` gives the shards of a rank by leaf."""
    receipts = []
    for rank in range(size):
        owners = owners_of(split, rank=rank, size=size)
        plan = plan_write(split.tree, held[rank], rank=rank, size=size, save_id="0" * 16, owners=owners)
        receipts.append(Receipt(rank, plan.items, None, ()))
    return receipts


def _bytes(receipt: Receipt) -> int:
    return sum(box.size for item in receipt.items for box in item.boxes)


_SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple)


@given(st.lists(_SHAPES, max_size=6), st.integers(2, 5), st.integers(1, 64), st.integers(1, 4))
def test_arrays_that_all_processes_hold_are_written_once(
    shapes: list[tuple[int, ...]], size: int, piece: int, most: int
) -> None:
    tree = _tree([(shape, None) for shape in shapes])
    split = cut_for_replicas(tree, ReplicaOptions(piece_bytes=piece, most=most), size=size)
    held = [{leaf: (Shard(Box.whole(shape), rank, size),) for leaf, shape in enumerate(shapes)} for rank in range(size)]
    check_coverage(split.tree, _receipts(split, held, size))
    for leaf, pieces in split.splits.items():
        record = split.tree.leaves[leaf]
        assert isinstance(record, ArrayRecord) and 1 < pieces.count == len(cells_of(record)) <= min(size, most)


@pytest.mark.parametrize("rows", [8, 9, 12])
@pytest.mark.parametrize(("shards", "replicas"), [(2, 2), (2, 3), (4, 2)])
def test_replicated_shards_are_written_once(rows: int, shards: int, replicas: int) -> None:
    """The mesh has replicas and shards, as in hybrid sharding. The last shard may be shorter."""
    size, each = shards * replicas, -(-rows // shards)
    cuts = (tuple(range(each, rows, each)), ())
    split = cut_for_replicas(_tree([((rows, 6), cuts)] * 3), ReplicaOptions(piece_bytes=1), size=size)
    held = []
    for rank in range(size):
        first = each * (rank % shards)
        box = Box((first, 0), (max(first, min(rows, first + each)), 6))
        held.append({leaf: (Shard(box, rank // shards, replicas),) for leaf in range(3)})
    check_coverage(split.tree, _receipts(split, held, size))


def test_every_element_is_written_if_cuts_do_not_match_the_boxes() -> None:
    """One array is on one rank only, although its cuts are for four. The other has boxes that its cuts do not show."""
    split = cut_for_replicas(_tree([((8,), None), ((8,), None)]), ReplicaOptions(piece_bytes=1), size=4)
    halves = [Box((0,), (3,)), Box((3,), (8,))]
    held: list[dict[int, Sequence[Shard]]] = [
        {1: (Shard(halves[rank % 2], rank // 2, 2),), **({0: (Shard(Box((0,), (8,))),)} if rank == 3 else {})}
        for rank in range(4)
    ]
    check_coverage(split.tree, _receipts(split, held, 4))


def test_ranks_share_the_leaves_that_only_they_hold() -> None:
    cut = cut_for_replicas(_tree([((64,), None)] * 6), ReplicaOptions(piece_bytes=4), size=4)
    held_by = {2: (1, 3), 3: (1, 3), 4: (0, 1, 2), 5: (2,)}
    split = SplitTree(TreeMetadata(cut.tree.skeleton, cut.tree.leaves, {}, held_by), cut.splits)
    held: list[dict[int, Sequence[Shard]]] = [{} for _ in range(4)]
    for leaf in range(6):
        holders = held_by.get(leaf, (0, 1, 2, 3))
        for position, rank in enumerate(holders):
            held[rank][leaf] = (Shard(Box((0,), (64,)), position, len(holders)),)
    receipts = _receipts(split, held, 4)
    check_coverage(split.tree, receipts)
    assert all(_bytes(receipt) for receipt in receipts)


@pytest.mark.parametrize("size", [2, 8, 32])
def test_every_process_writes_about_the_same_number_of_bytes(size: int) -> None:
    """The state is like a transformer: a large embedding, matrices of several sizes, and many vectors."""
    shapes: list[tuple[int, ...]] = [(50_000, 1024)]
    for _ in range(24):
        shapes += [(1024, 3072), (1024, 1024), (1024, 4096), (4096, 1024), (1024,), (1024,), (4096,), (3072,)]
    tree = _tree([(shape, None) for shape in shapes])
    split = cut_for_replicas(tree, ReplicaOptions(piece_bytes=1 << 18, most=64), size=size)
    held = [{leaf: (Shard(Box.whole(shape), rank, size),) for leaf, shape in enumerate(shapes)} for rank in range(size)]
    receipts = _receipts(split, held, size)
    check_coverage(split.tree, receipts)
    written = [_bytes(receipt) for receipt in receipts]
    assert max(written) <= 1.1 * sum(written) / size and min(written) >= 0.9 * sum(written) / size


@pytest.mark.parametrize(("shards", "replicas"), [(2, 2), (4, 4), (8, 3)])
def test_replicas_of_small_shards_write_the_same_number_of_bytes(shards: int, replicas: int) -> None:
    """One holder writes each box that is too small to be cut. All holders write equally many boxes."""
    size, rows, arrays = shards * replicas, 8 * shards, 12 * replicas
    cuts = (tuple(range(8, rows, 8)), ())
    split = cut_for_replicas(_tree([((rows, 6), cuts)] * arrays), ReplicaOptions(), size=size)
    assert not split.splits
    held = []
    for rank in range(size):
        first = 8 * (rank % shards)
        shard = Shard(Box((first, 0), (first + 8, 6)), rank // shards, replicas)
        held.append(dict.fromkeys(range(arrays), (shard,)))
    receipts = _receipts(split, held, size)
    check_coverage(split.tree, receipts)
    assert {_bytes(receipt) for receipt in receipts} == {12 * 48}


def test_the_rules_of_owners_do_not_grow_with_the_job() -> None:
    """A process computes one rule for each array, not an owner for each cell."""
    rules = []
    for size in (64, 1 << 20):
        arrays: list[tuple[tuple[int, ...], _Cuts]] = [((1 << 24,), (tuple(range(64, 1 << 12, 64)),))] * 3
        split = cut_for_replicas(_tree(arrays), ReplicaOptions(), size=size)
        rules.append(owners_of(split, rank=5, size=size))
    assert [len(owners) for owners in rules] == [0, 3]
    assert all(len(rule.numbers) == 1 for rule in rules[1].values())


@pytest.mark.parametrize("piece", [1, 1 << 20])
def test_boxes_on_several_devices_are_shared_if_their_replicas_are_known(piece: int) -> None:
    """Each of two processes holds all eight boxes. The number of boxes does not show that they are replicas."""
    tree = _tree([((64, 8), (tuple(range(8, 64, 8)), ()))] * 3)
    boxes = [Box((8 * number, 0), (8 * number + 8, 8)) for number in range(8)]
    held = [{leaf: tuple([Shard(box, rank, 2) for box in boxes]) for leaf in range(3)} for rank in range(2)]
    options = ReplicaOptions(piece_bytes=piece)
    for known, expected in ({}, [3 * 512, 0]), ({0: 2, 1: 2, 2: 2}, [3 * 256, 3 * 256]):
        split = cut_for_replicas(tree, options, size=2, replicas=known)
        receipts = _receipts(split, held, 2)
        check_coverage(split.tree, receipts)
        assert [_bytes(receipt) for receipt in receipts] == expected


def test_cuts_form_a_regular_grid() -> None:
    def cuts_of(shape: tuple[int, ...], cuts: _Cuts, size: int = 4, **options: Any) -> tuple[_Cuts, int]:
        split = cut_for_replicas(_tree([(shape, cuts)]), ReplicaOptions(**{"piece_bytes": 1, **options}), size=size)
        record = split.tree.leaves[0]
        assert isinstance(record, ArrayRecord)
        return record.cuts, split.splits[0].count if split.splits else 1

    assert cuts_of((10, 3), None) == (((3, 6, 9), ()), 4)
    assert cuts_of((2, 30), None) == (((), (8, 16, 24)), 4), "the axis that gives more"
    assert cuts_of((10, 3), None, most=2) == (((5,), ()), 2)
    assert cuts_of((10, 3), None, most=1) == (None, 1)
    assert cuts_of((10, 3), None, piece_bytes=15) == (((5,), ()), 2)
    assert cuts_of((10, 3), None, piece_bytes=16) == (None, 1)
    assert cuts_of((8, 3), ((4,), ())) == (((2, 4, 6), ()), 2), "each of two shards is held twice"
    assert cuts_of((10, 3), ((3, 6, 9), ())) == (((3, 6, 9), ()), 1), "there are no replicas"
    assert cuts_of((10, 4), ((3,), ())) == (((3,), (2,)), 2), "an axis that is cut unevenly stays"
    assert cuts_of((7,), ((5,),)) == (((5,),), 1)
    assert cuts_of((), None) == (None, 1)


def test_without_owners_replica_0_writes_all() -> None:
    record = ArrayRecord(ArraySpec((4,), "int8"))
    whole = Box((0,), (4,))
    assert written_boxes(record, (Shard(whole, 0, 2),), None) == (whole,)
    assert written_boxes(record, (Shard(whole, 1, 2),), None) == ()


def test_invalid_options_are_refused() -> None:
    wrongs: list[dict[str, Any]] = [{"piece_bytes": 0}, {"most": 0}]
    for wrong in wrongs:
        with pytest.raises(ValueError, match="at least 1"):
            ReplicaOptions(**wrong)


class _Counting(HostArrayHandler):
    """A handler that counts the bytes that a rank writes."""

    def __init__(self) -> None:
        self.nbytes = 0

    def view_on_host(self, leaf: Any, boxes: Sequence[Box]) -> Sequence[Pending[HostArray]]:
        self.nbytes += sum(box.size for box in boxes) * leaf.dtype.itemsize
        return super().view_on_host(leaf, boxes)


def _state() -> dict[str, Any]:
    shared = np.arange(3000.0).reshape(50, 60)
    return {
        "large": np.arange(40_000, dtype=np.float32).reshape(100, 400),
        "odd": np.arange(7 * 331, dtype=np.int16).reshape(7, 331),
        "tied": [shared, shared],
        "bfloat16": np.ones((33, 5), "bfloat16"),
        "text": "x" * 30_000,
        **{f"small {number}": np.full(number + 1, number) for number in range(20)},
        "empty": np.zeros((0, 3)),
        "number": np.array(3),
    }


def _saved(location: Path, layout: str, size: int = 3, **options: Any) -> Sequence[int]:
    """Save on ranks with equal states. Return the bytes of NumPy arrays that each rank wrote."""

    def of_rank(coordinator: Coordinator) -> int:
        handler = _Counting()
        context = ckptcore.Context(
            job=ckptcore.context.JobOptions(
                coordinator=coordinator, replicas=ckptcore.context.ReplicaOptions(piece_bytes=1 << 10)
            ),
            io=ckptcore.context.IOOptions(threads=1),
            durability="none",
            plugins=ckptcore.context.PluginOptions(handlers={np.ndarray: handler}),
        )
        ckptcore.save(location, _state(), layout=layout, context=context, **options)
        return handler.nbytes

    return ThreadJob(size, timeout_seconds=30).run(of_rank)


@pytest.mark.parametrize("layout", ["ocdbt", "zarr3", "zarr", "dcp"])
def test_ranks_share_the_writes_in_every_layout_with_pieces(layout: str, tmp_path: Path) -> None:
    written = _saved(tmp_path / "c", layout)
    assert max(written) < 1.1 * sum(written) / 3
    assert same_value(ckptcore.load(tmp_path / "c"), _state()) and ckptcore.verify(tmp_path / "c").ok
    loaded = ckptcore.load(tmp_path / "c")
    assert loaded["tied"][0] is loaded["tied"][1]


def test_saves_and_exports_in_safetensors_are_not_shared(tmp_path: Path) -> None:
    assert _saved(tmp_path / "c", "safetensors")[1:] == [0, 0]
    export = ckptcore.Export(location=tmp_path / "export", layout="safetensors")
    assert _saved(tmp_path / "d", "ocdbt", strategy=ckptcore.WithExports([export]))[1:] == [0, 0]
    assert [path.name for path in sorted((tmp_path / "export").glob("*.safetensors"))] == ["model.safetensors"]
    shared = ckptcore.Export(location=tmp_path / "f", layout="dcp")
    assert _saved(tmp_path / "e", "ocdbt", strategy=ckptcore.WithExports([shared]))[1] > 0
    assert same_value(ckptcore.load(tmp_path / "f"), _state())
