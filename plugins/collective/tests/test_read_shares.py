"""Plans of a shared read: all ranks make the same plan, read each element once and deliver it to each requester."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from ckptcore_collective.shares import (
    ChunksOf,
    Message,
    MessageSizes,
    RequestedBoxes,
    SharedPlan,
    cut_by_readers,
    message_offsets,
    plan_shares,
)
from ckptcore_testing import strategies
from hypothesis import given
from hypothesis import strategies as st

from ckptcore.model import Chunk, ReadItem
from ckptcore.model.arrays import ArraySpec, Box
from ckptcore.planning.partition import cut_box

SHAPES = ((7, 5), (6,), (), (3, 0), (4, 3, 2))
SPECS = {
    leaf: ArraySpec(shape, dtype)
    for leaf, (shape, dtype) in enumerate(zip(SHAPES, ("float32", "int8") * 3, strict=False))
}


@st.composite
def requests(draw: st.DrawFn) -> list[RequestedBoxes]:
    """Generate the requests of up to four ranks: boxes of some arrays. Several ranks often request the same box."""
    known = {
        leaf: draw(st.lists(strategies.boxes(spec.shape, allow_empty=True), min_size=1, max_size=4))
        for leaf, spec in SPECS.items()
    }
    wanted = st.fixed_dictionaries(
        {}, optional={leaf: st.lists(st.sampled_from(boxes), unique=True) for leaf, boxes in known.items()}
    )
    return draw(st.lists(wanted, min_size=1, max_size=4))


def _unknown(leaf: int) -> Sequence[Chunk]:
    return ()


def _plans(
    wanted: Sequence[RequestedBoxes], of: Sequence[int], sizes: MessageSizes, chunks: ChunksOf = _unknown
) -> list[SharedPlan]:
    request_of = dict(enumerate(of))
    return [plan_shares(SPECS, wanted, request_of, rank, sizes, chunks) for rank in request_of]


@given(requests(), st.data(), st.sampled_from([1, 8, 64, 1 << 20]), st.sampled_from([None, 30, 200]))
def test_each_element_is_read_once_and_delivered_once_to_each_requester(
    wanted: list[RequestedBoxes], data: st.DataObject, message: int, round_bytes: int | None
) -> None:
    of = data.draw(st.lists(st.integers(0, len(wanted) - 1), min_size=1, max_size=6))
    plans = _plans(wanted, of, MessageSizes(message=message, round=round_bytes))
    read = {leaf: np.zeros(spec.shape, int) for leaf, spec in SPECS.items()}
    everyone = {leaf: np.zeros(spec.shape, bool) for leaf, spec in SPECS.items()}
    for rank, plan in enumerate(plans):
        got = {leaf: np.zeros(spec.shape, int) for leaf, spec in SPECS.items()}
        for part in plan.rounds:
            for item in part.direct:
                got[item.leaf][item.box.slices] += 1
                read[item.leaf][item.box.slices] += 1
            for sent in part.messages:
                assert rank in sent.members and sent.reader in sent.members
                for item in sent.pieces:
                    got[item.leaf][item.box.slices] += 1
                    if sent.reader == rank:
                        read[item.leaf][item.box.slices] += 1
        for leaf, spec in SPECS.items():
            mine = np.zeros(spec.shape, bool)
            for box in wanted[of[rank]].get(leaf, ()):
                mine[box.slices] = True
            assert np.array_equal(got[leaf], mine)
            everyone[leaf] |= mine
    for leaf in SPECS:
        assert np.array_equal(read[leaf], everyone[leaf])


@given(requests(), st.data(), st.sampled_from([8, 1 << 20]))
def test_members_plan_the_same_messages_in_the_same_order(
    wanted: list[RequestedBoxes], data: st.DataObject, message: int
) -> None:
    of = data.draw(st.lists(st.integers(0, len(wanted) - 1), min_size=2, max_size=5))
    plans = _plans(wanted, of, MessageSizes(message=message, round=60))
    sent = [_sent(plan) for plan in plans]
    for first, second in itertools.combinations(range(len(of)), 2):
        common = [
            [message for message in sent[rank] if first in message.members and second in message.members]
            for rank in (first, second)
        ]
        assert common[0] == common[1]
        groups = [
            [group for group in plans[rank].groups if first in group and second in group] for rank in (first, second)
        ]
        assert groups[0] == groups[1]
    for rank, plan in enumerate(plans):
        assert set(plan.groups) == {message.members for message in sent[rank]}


def _sent(plan: SharedPlan) -> list[Message]:
    return [message for part in plan.rounds for message in part.messages if len(message.members) > 1]


def test_ranks_read_equal_shares_of_arrays_that_all_request() -> None:
    """Each of 8 ranks reads an eighth of 40 arrays of different sizes. The shares differ by at most one message."""
    specs = {leaf: ArraySpec((64 + leaf, 100), "float32") for leaf in range(40)}
    request = {leaf: (Box.whole(spec.shape),) for leaf, spec in specs.items()}
    sizes = MessageSizes(message=1 << 14)
    plans = [plan_shares(specs, [request], dict.fromkeys(range(8), 0), rank, sizes, _unknown) for rank in range(8)]
    reads = [_read_bytes(plan, rank, specs) for rank, plan in enumerate(plans)]
    total = sum(spec.nbytes for spec in specs.values())
    assert sum(reads) == total
    assert max(reads) - min(reads) <= sizes.message
    first = [message.reader for message in plans[0].rounds[0].messages[:8]]
    assert sorted(first) == list(range(8)), "each rank reads one of the first 8 messages"


def test_a_rank_that_reads_much_for_itself_reads_less_for_others() -> None:
    specs = {0: ArraySpec((1280,), "int8"), **{leaf: ArraySpec((128,), "int8") for leaf in range(1, 11)}}
    shared = {leaf: (Box.whole((128,)),) for leaf in range(1, 11)}
    wanted = [{0: (Box.whole((1280,)),), **shared}, shared]
    plans = [plan_shares(specs, wanted, {0: 0, 1: 1}, rank, MessageSizes(message=128), _unknown) for rank in (0, 1)]
    assert _read_bytes(plans[0], 0, specs) == 1280 and _read_bytes(plans[1], 1, specs) == 1280


def _read_bytes(plan: SharedPlan, rank: int, specs: Mapping[int, ArraySpec]) -> int:
    items = [item for part in plan.rounds for item in part.direct]
    items += [
        item for part in plan.rounds for message in part.messages if message.reader == rank for item in message.pieces
    ]
    return sum(item.box.size * specs[item.leaf].numpy_dtype.itemsize for item in items)


def test_boxes_that_one_rank_requests_are_read_in_place_and_not_sent() -> None:
    """A load of sharded arrays without replicas sends no messages."""
    specs = {0: ArraySpec((8, 8), "float32")}
    wanted: list[RequestedBoxes] = [{0: (Box((2 * rank, 0), (2 * rank + 2, 8)),)} for rank in range(4)]
    for rank in range(4):
        plan = plan_shares(specs, wanted, {rank: rank for rank in range(4)}, rank, MessageSizes(), _unknown)
        ((part,), groups) = plan.rounds, plan.groups
        assert not groups and not part.messages
        assert [item.box for item in part.direct] == list(wanted[rank][0])


def test_only_ranks_with_the_same_shard_send_it_to_each_other() -> None:
    """A mesh of 2 x 2: ranks 0 and 2 hold the first half of the array, ranks 1 and 3 the second half."""
    specs = {0: ArraySpec((8, 8), "float32")}
    halves: list[RequestedBoxes] = [{0: (Box((0, 0), (4, 8)),)}, {0: (Box((4, 0), (8, 8)),)}]
    plans = [
        plan_shares(specs, halves, {0: 0, 1: 1, 2: 0, 3: 1}, rank, MessageSizes(message=64), _unknown)
        for rank in range(4)
    ]
    assert [plan.groups for plan in plans] == [((0, 2),), ((1, 3),), ((0, 2),), ((1, 3),)]
    readers = Counter(message.reader for message in plans[0].rounds[0].messages)
    assert readers == {0: 1, 2: 1}


def test_rounds_do_not_exceed_their_limit() -> None:
    specs = {leaf: ArraySpec((10,), "int8") for leaf in range(7)}
    request = {leaf: (Box.whole((10,)),) for leaf in specs}
    plan = plan_shares(specs, [request], {0: 0, 1: 0}, 0, MessageSizes(round=25), _unknown)
    assert [sorted(part.leaves) for part in plan.rounds] == [[0, 1], [2, 3], [4, 5], [6]]


@given(st.data())
def test_boxes_that_do_not_overlap_are_not_cut(data: st.DataObject) -> None:
    parts = data.draw(strategies.partitions((9, 8)))
    wants = {box: frozenset([number]) for number, box in enumerate(parts)}
    assert sorted(cut_by_readers(wants), key=str) == sorted(
        [(box, number) for box, number in wants.items() if box.size], key=str
    )


def test_many_shards_are_planned_quickly() -> None:
    """Planning does not compare all pairs of boxes: 4000 boxes would need 16 million comparisons for each array."""
    boxes = {Box((0, 2 * number), (9, 2 * number + 2)): frozenset([number]) for number in range(4000)}
    compared = 0

    class Counting(frozenset[int]):
        def __or__(self, other: object) -> Counting:
            nonlocal compared
            compared += 1
            return self

    cells = cut_by_readers({box: Counting(wanting) for box, wanting in boxes.items()})
    assert len(cells) == 4000 and compared == 0


@given(strategies.boxes((9, 7, 5)), st.integers(1, 400))
def test_pieces_cover_each_element_of_a_box_once(box: Box, most: int) -> None:
    pieces = list(cut_box(box, 4, most))
    counts = np.zeros((9, 7, 5), int)
    for piece in pieces:
        assert piece.size and (piece.size * 4 <= most or piece.size == 1)
        counts[piece.slices] += 1
    assert counts.sum() == box.size and (counts[box.slices] == 1).all()


@st.composite
def stored(draw: st.DrawFn, is_plain: bool) -> dict[int, list[Chunk]]:
    """Generate the chunks of all arrays, stored one after another in one object."""
    offset = draw(st.integers(0, 40))
    chunks: dict[int, list[Chunk]] = {}
    for leaf, spec in SPECS.items():
        boxes = [box for box in draw(strategies.partitions(spec.shape)) if box.size]
        chunks[leaf] = []
        for box in boxes:
            chunks[leaf].append(Chunk("file", offset, box, is_plain))
            offset += box.size * spec.numpy_dtype.itemsize + draw(st.sampled_from([0, 4]))
    return chunks


@given(requests(), st.data(), st.sampled_from([1, 8, 200]), st.booleans())
def test_places_of_chunks_change_only_which_rank_reads_and_sends(
    wanted: list[RequestedBoxes], data: st.DataObject, message: int, is_plain: bool
) -> None:
    """Each requested element is still read by one rank, once, and is delivered once to each requester."""
    of = data.draw(st.lists(st.integers(0, len(wanted) - 1), min_size=1, max_size=5))
    tiles = data.draw(stored(is_plain))
    sizes = MessageSizes(message=message, block=16)
    plans = _plans(wanted, of, sizes, lambda leaf: tiles[leaf])
    read = {leaf: np.zeros(spec.shape, int) for leaf, spec in SPECS.items()}
    for rank, plan in enumerate(plans):
        got = {leaf: np.zeros(spec.shape, int) for leaf, spec in SPECS.items()}
        for part in plan.rounds:
            pieces = [item for sent in part.messages for item in sent.pieces]
            own = [item for sent in part.messages if sent.reader == rank for item in sent.pieces]
            for item in [*part.direct, *pieces]:
                got[item.leaf][item.box.slices] += 1
            for item in [*part.direct, *own]:
                read[item.leaf][item.box.slices] += 1
        for leaf, spec in SPECS.items():
            mine = np.zeros(spec.shape, bool)
            for box in wanted[of[rank]].get(leaf, ()):
                mine[box.slices] = True
            assert (got[leaf][mine] == 1).all() and (got[leaf] <= 1).all()
            assert is_plain <= (not got[leaf][~mine].any()), "a rank received elements that it did not request"
    for leaf, spec in SPECS.items():
        everyone = np.zeros(spec.shape, int)
        for number in set(of):
            for box in wanted[number].get(leaf, ()):
                everyone[box.slices] = 1
        assert np.array_equal(read[leaf], everyone)


@given(requests(), st.data())
def test_each_encoded_chunk_is_read_by_one_rank(wanted: list[RequestedBoxes], data: st.DataObject) -> None:
    of = data.draw(st.lists(st.integers(0, len(wanted) - 1), min_size=1, max_size=5))
    tiles = data.draw(stored(is_plain=False))
    plans = _plans(wanted, of, MessageSizes(), lambda leaf: tiles[leaf])
    readers: dict[tuple[int, Box], set[object]] = {}
    for rank, plan in enumerate(plans):
        for part in plan.rounds:
            reads: list[tuple[object, ReadItem]] = [((rank, "direct"), item) for item in part.direct]
            reads += [
                ((rank, message.order), item)
                for message in part.messages
                if message.reader == rank
                for item in message.pieces
            ]
            for reader, item in reads:
                for tile in tiles[item.leaf]:
                    if tile.box.intersect(item.box) is not None:
                        readers.setdefault((item.leaf, tile.box), set()).add(reader)
    assert all(len(reader) == 1 for reader in readers.values())


@pytest.mark.parametrize(
    "boxes",
    [
        (Box((0,), (1,)), Box((0,), (2,))),
        (Box((0,), (1,)), Box((0,), (2,)), Box((3,), (10,)), Box((10,), (12,))),  # the third box is in both chunks
    ],
)
def test_a_chunk_is_read_once_for_overlapping_boxes_of_one_rank(boxes: tuple[Box, ...]) -> None:
    chunks = [Chunk("file", 9 * number, Box((6 * number,), (6 * number + 6,)), False) for number in range(2)]
    specs, sizes = {0: ArraySpec((12,), "int8")}, MessageSizes()
    (part,) = plan_shares(specs, [{0: boxes}], {0: 0}, 0, sizes, lambda _: chunks).rounds
    reads = [part.direct, *[message.pieces for message in part.messages]]
    for chunk in chunks:
        assert sum(any(chunk.box.intersect(item.box) for item in items) for items in reads) <= 1


def test_requesters_of_an_encoded_chunk_receive_all_requested_parts_of_it() -> None:
    """Two ranks request the halves of three chunks. One rank reads the middle chunk and sends both parts of it."""
    specs = {0: ArraySpec((12,), "int8")}
    wanted: list[RequestedBoxes] = [{0: (Box((0,), (6,)),)}, {0: (Box((6,), (12,)),)}]
    tiles = [Chunk("file", 9 * number, Box((4 * number,), (4 * number + 4,)), False) for number in range(3)]
    plans = [plan_shares(specs, wanted, {0: 0, 1: 1}, rank, MessageSizes(), lambda _: tiles) for rank in (0, 1)]
    (sent,) = [message for message in plans[0].rounds[0].messages if len(message.members) > 1]
    assert [item.box for item in sent.pieces] == [Box((4,), (6,)), Box((6,), (8,))]
    assert sent in plans[1].rounds[0].messages and sent.members == (0, 1)
    assert plans[0].groups == plans[1].groups == ((0, 1),)


@pytest.mark.parametrize("dtype", ["int8", "float64", "S7"])
def test_pieces_of_a_message_are_aligned(dtype: str) -> None:
    spec = ArraySpec((5, 3), dtype)
    request = {0: (Box.whole(spec.shape),), 1: (Box.whole(spec.shape),)}
    plan = plan_shares({0: spec, 1: spec}, [request], {0: 0, 1: 0}, 0, MessageSizes(message=1 << 10), _unknown)
    itemsize = spec.numpy_dtype.itemsize
    for message in plan.rounds[0].messages:
        offsets, end = message_offsets(message.pieces, [itemsize] * len(message.pieces))
        assert end == message.nbytes and all(offset % 64 == 0 for offset in offsets)
        assert end >= sum(math.prod(item.box.shape) * itemsize for item in message.pieces)
