"""Plans of recoveries: every needed element is sent once, by a process that holds it, and the work is balanced."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from ckptcore_recovery.peers.messages import PIECE_BYTES
from ckptcore_recovery.replicas.transfers import HeldBox, HeldIndex, Parcel, missing_boxes, plan_parcels
from hypothesis import given
from hypothesis import strategies as st

from ckptcore.model import Box
from ckptcore.model.transfer import ReadItem


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """Return a box of an array; it may be empty."""
    ranges = [sorted([draw(st.integers(0, extent)), draw(st.integers(0, extent))]) for extent in shape]
    return Box(tuple([start for start, _ in ranges]), tuple([stop for _, stop in ranges]))


@given(st.data())
def test_every_needed_element_is_sent_once_by_a_holder(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=3)))
    ranks_of = st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True).map(sorted).map(tuple)
    held = [
        HeldBox(data.draw(boxes(shape)), data.draw(ranks_of))
        for _ in range(data.draw(st.sampled_from([0, 1, 2, 3, 20])))
    ]
    needs = {
        rank: list({ReadItem(0, data.draw(boxes(shape))): None for _ in range(data.draw(st.integers(1, 2)))})
        for rank in data.draw(st.sets(st.integers(6, 8), min_size=1))
    }
    index, is_held = HeldIndex({0: held}), np.zeros(shape, bool)
    for box, _ in held:
        is_held[box.slices] = True
    for items in needs.values():
        for item in list(items):
            missing = np.zeros(shape, int)
            for lacking in missing_boxes([item], index):
                missing[lacking.box.slices] += 1
            assert (missing[item.box.slices] == ~is_held[item.box.slices]).all()
            if missing.any():
                items.remove(item)  # the leader refuses the recovery
    parcels = plan_parcels({0: 4}, {0: held}, needs)
    for rank, items in needs.items():
        for item in items:
            counts = np.zeros(shape, int)
            for parcel in parcels:
                for piece in parcel.pieces:
                    if rank in parcel.senders and piece.item == item:
                        counts[piece.box.slices] += 1
                        assert item.box.contains(piece.box)
            assert (counts[item.box.slices] == 1).all()
    for parcel in parcels:
        assert parcel.nbytes == 4 * sum([piece.box.size for piece in parcel.pieces])
        assert set(parcel.senders.values()) <= set(parcel.holders)
        assert set(parcel.senders.values()) <= set(parcel.witnesses) <= set(parcel.holders)
        for holder, piece in itertools.product(parcel.holders, parcel.pieces):
            covered = np.zeros(shape, bool)
            for present in held:
                if holder in present.ranks:
                    covered[present.box.slices] = True
            assert covered[piece.box.slices].all()


def sent_by(parcels: Sequence[Parcel]) -> dict[int, int]:
    """Return the bytes that each process sends."""
    sent: dict[int, int] = {}
    for parcel in parcels:
        for sender in parcel.senders.values():
            sent[sender] = sent.get(sender, 0) + parcel.nbytes
    return sent


@pytest.mark.parametrize("holders", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("lost", [1, 2, 5])
def test_no_holder_sends_more_than_its_share(holders: int, lost: int) -> None:
    shapes = [(1000, 1024), (1, 5_000_000), (17,), (), (3, 333, 3333), *[(number,) for number in range(200)]]
    itemsizes = {leaf: (1, 2, 4, 8, 16)[leaf % 5] for leaf in range(len(shapes))}
    wholes = [Box.whole(shape) for shape in shapes]
    held = {leaf: [HeldBox(box, tuple(range(holders)))] for leaf, box in enumerate(wholes)}
    needs = {holders + rank: [ReadItem(leaf, box) for leaf, box in enumerate(wholes)] for rank in range(lost)}
    parcels = plan_parcels(itemsizes, held, needs)
    sent = sent_by(parcels)
    needed = lost * sum([box.size * itemsizes[leaf] for leaf, box in enumerate(wholes)])
    assert sum(sent.values()) == needed
    assert max(sent.values()) <= 1.1 * needed / holders
    assert max([parcel.nbytes for parcel in parcels]) <= PIECE_BYTES
    digests = [sum([rank in parcel.witnesses for parcel in parcels]) for rank in range(holders)]
    assert max(digests) <= 2 * max(1, min(digests)), "the digests are divided, too"


def test_boxes_with_few_holders_are_balanced_with_those_that_many_hold() -> None:
    box = Box.whole((8_000_000,))
    held = {0: [HeldBox(box, (0,))], 1: [HeldBox(box, (0, 1))], 2: [HeldBox(box, (0, 1, 2))]}
    sent = sent_by(plan_parcels({0: 4, 1: 4, 2: 4}, held, {3: [ReadItem(leaf, box) for leaf in range(3)]}))
    assert max(sent.values()) <= 1.1 * min(sent.values())


def test_the_plan_grows_with_the_bytes_only() -> None:
    box = Box.whole((1 << 20, 1 << 10))
    held = {0: [HeldBox(box, tuple(range(1024)))]}
    parcels = plan_parcels({0: 4}, held, {5000: [ReadItem(0, box)]})
    assert len(parcels) <= 2 * box.size * 4 // PIECE_BYTES + 1024
    assert max([len(parcel.pieces) for parcel in parcels]) <= 3
