"""Shares of a read: which process reads what several want, and in which order it is sent to the others. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from ckptcore.cells import Wanting, cells_of_wants, cut_box
from ckptcore.model.arrays import ArraySpec, Box
from ckptcore.model.transfer import ReadItem

__all__ = ["Message", "MessageSizes", "Request", "Round", "SharedPlan", "message_offsets", "plan_shares"]

Request: TypeAlias = Mapping[int, Sequence[Box]]
"""By number of the leaf, never an alias, the boxes that a process wants, without duplicates."""

_LEAST_BYTES: Final = 4 << 20
"""Smaller messages are only sent where there is no more to send: each costs a request, and each end of it a block that is read twice."""

_TURNS: Final = 4
"""How many messages each member reads at least, where they are larger than that."""

_ALIGNMENT: Final = 64
"""Elements of a message begin at multiples of so many bytes: of any dtype, and of what vector instructions like."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageSizes:
    """How large what is sent at once may be, and how much is in memory, in bytes.

    Attributes:
        message: elements of a message; at least one element is sent.
        round: what a process wants of the arrays of one round; one array may exceed it, alone. None: one round has all.
    """

    message: int = 32 << 20
    round: int | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """What one process reads and sends at once.

    Attributes:
        reader: the rank that reads it.
        members: the ranks that want it, sorted, the reader among them; where it is alone, nothing is sent.
        pieces: what it has.
        nbytes: how long it is, with what lies between pieces.
    """

    reader: int
    members: tuple[int, ...]
    pieces: tuple[ReadItem, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Round:
    """What is read and sent before anything of the next round is.

    Attributes:
        leaves: the arrays of which the round has everything.
        direct: boxes that this process wants whole and nobody else any part of; it reads them into place.
        messages: those that this process takes part in, in the order in which all their members do.
    """

    leaves: frozenset[int]
    direct: tuple[ReadItem, ...]
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class SharedPlan:
    """What a process reads, sends and is sent.

    Attributes:
        rounds: one after the other.
        groups: the members of all messages that are sent and that this process takes part in; each once, in the order in which all
            processes come upon them.
    """

    rounds: tuple[Round, ...]
    groups: tuple[tuple[int, ...], ...]


def plan_shares(
    specs: Mapping[int, ArraySpec],
    requests: Sequence[Request],
    request_of: Mapping[int, int],
    rank: int,
    sizes: MessageSizes,
    rows: Mapping[int, int] | None = None,
) -> SharedPlan:
    """What one process does, so that all get what they want and each element is read once.

    What several want goes, a message at a time and largest first, to the one of them that has the fewest bytes to read so far. Every process
    plans alike: from the same arguments each finds its part of one whole.

    Args:
        specs: by number of the leaf, the stored arrays that anyone wants.
        requests: what is wanted, each of these once.
        request_of: by rank, for all that read together, which of the requests it has.
        rank: the process to plan for; one of these.
        sizes: how much is sent at once.
        rows: by leaf, indices of the first axis to cut at multiples of; see `cut_box`.
    """
    ranks_of: dict[int, list[int]] = {}
    for member, number in sorted(request_of.items()):
        ranks_of.setdefault(number, []).append(member)
    planning = _Planning(ranks_of)
    rounds = []
    groups: dict[tuple[int, ...], None] = {}
    for leaves in _rounds(specs, {number: requests[number] for number in ranks_of}, sizes.round):
        direct: list[ReadItem] = []
        shared: dict[tuple[int, ...], list[ReadItem]] = {}
        for leaf in leaves:
            for box, wanting, is_whole in _cells(leaf, requests, ranks_of):
                members = planning.members(wanting)
                if len(members) > 1 or not is_whole:
                    shared.setdefault(members, []).append(ReadItem(leaf, box))
                    continue
                planning.add(members[0], box.size * specs[leaf].numpy_dtype.itemsize)
                if members[0] == rank:
                    direct.append(ReadItem(leaf, box))
        batches = [
            (members, batch, nbytes)
            for members, items in shared.items()
            for batch, nbytes in _batches(items, specs, len(members), sizes.message, rows or {})
        ]
        messages = _in_turns(planning.assign(batches))
        groups.update(dict.fromkeys([message.members for message in messages if len(message.members) > 1]))
        own = tuple([message for message in messages if rank in message.members])
        rounds.append(Round(frozenset(leaves), tuple(direct), own))
    return SharedPlan(tuple(rounds), tuple([group for group in groups if rank in group]))


def message_offsets(pieces: Sequence[ReadItem], itemsize_of: Callable[[int], int]) -> tuple[Sequence[int], int]:
    """Where in a message its pieces begin, in bytes, and how long it is.

    Args:
        pieces: of the message.
        itemsize_of: gives, by leaf, bytes per element.
    """
    offsets, end = [], 0
    for piece in pieces:
        offsets.append(end)
        end += -(-piece.box.size * itemsize_of(piece.leaf) // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


class _Planning:
    """Who reads what, as it is given out."""

    def __init__(self, ranks_of: Mapping[int, Sequence[int]]) -> None:
        self._ranks_of = ranks_of
        self._load = dict.fromkeys([rank for ranks in ranks_of.values() for rank in ranks], 0)
        self._members: dict[Wanting, tuple[int, ...]] = {}
        self._heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}

    def members(self, wanting: Wanting) -> tuple[int, ...]:
        """The ranks that have one of these requests."""
        found = self._members.get(wanting)
        if found is None:
            found = tuple(sorted([rank for number in wanting for rank in self._ranks_of[number]]))
            self._members[wanting] = found
        return found

    def add(self, rank: int, nbytes: int) -> None:
        """Say that a rank reads more."""
        self._load[rank] += nbytes

    def assign(self, batches: Iterable[tuple[tuple[int, ...], Sequence[ReadItem], int]]) -> list[Message]:
        """Give each batch to one of its members; the largest come first."""
        return [
            Message(self._take(members, nbytes), members, tuple(items), nbytes)
            for members, items, nbytes in sorted(batches, key=lambda batch: (-batch[2], _place(batch[1]), batch[0]))
        ]

    def _take(self, members: tuple[int, ...], nbytes: int) -> int:
        """The member with the fewest bytes, which gets more."""
        heap = self._heaps.get(members)
        if heap is None:
            heap = self._heaps[members] = [(self._load[rank], rank) for rank in members]
            heapq.heapify(heap)
        while heap[0][0] != self._load[heap[0][1]]:  # it was given something with other members
            heapq.heapreplace(heap, (self._load[heap[0][1]], heap[0][1]))
        rank = heap[0][1]
        self._load[rank] += nbytes
        heapq.heapreplace(heap, (self._load[rank], rank))
        return rank


def _rounds(specs: Mapping[int, ArraySpec], requests: Mapping[int, Request], most: int | None) -> list[list[int]]:
    """Arrays in order, cut into rounds of which no process wants more bytes than that."""
    leaves = sorted({leaf for request in requests.values() for leaf in request})
    if most is None:
        return [leaves] if leaves else []
    rounds: list[list[int]] = []
    held: dict[int, int] = {}
    for leaf in leaves:
        itemsize = specs[leaf].numpy_dtype.itemsize
        taken = {number: sum([box.size for box in request.get(leaf, ())]) for number, request in requests.items()}
        if not rounds or any(held[number] and held[number] + size * itemsize > most for number, size in taken.items()):
            rounds.append([])
            held = dict.fromkeys(requests, 0)
        rounds[-1].append(leaf)
        for number, size in taken.items():
            held[number] += size * itemsize
    return rounds


def _cells(
    leaf: int, requests: Sequence[Request], ranks_of: Mapping[int, Sequence[int]]
) -> list[tuple[Box, Wanting, bool]]:
    """The cells of an array, and whether each is a box as it was asked for."""
    wants: dict[Box, set[int]] = {}
    for number in ranks_of:
        for box in requests[number].get(leaf, ()):
            wants.setdefault(box, set()).add(number)
    cells = cells_of_wants({box: frozenset(numbers) for box, numbers in wants.items()})
    return [(box, wanting, box in wants) for box, wanting in cells]


def _batches(
    items: Sequence[ReadItem], specs: Mapping[int, ArraySpec], members: int, most: int, rows: Mapping[int, int]
) -> Iterator[tuple[Sequence[ReadItem], int]]:
    """What is sent at once of what some processes want, with its bytes.

    Pieces that follow each other go together: a reader then reads runs of bytes, of which only the blocks at the ends, read whole for
    their checksums, are read by another one too. There are several for each member, so that all read about as much.
    """

    def itemsize(leaf: int) -> int:
        return specs[leaf].numpy_dtype.itemsize

    _, total = message_offsets(items, itemsize)
    most = min(most, max(_LEAST_BYTES, -(-total // (_TURNS * members))))
    batch: list[ReadItem] = []
    held = 0
    for item in items:
        for box in cut_box(item.box, itemsize(item.leaf), most, rows.get(item.leaf, 1)):
            piece = ReadItem(item.leaf, box)
            _, nbytes = message_offsets([piece], itemsize)
            if batch and held + nbytes > most:
                yield batch, held
                batch, held = [], 0
            batch.append(piece)
            held += nbytes
    if batch:
        yield batch, held


def _in_turns(messages: Sequence[Message]) -> list[Message]:
    """Messages in the order in which they are sent: of each reader one in turn, so that all of them read meanwhile."""
    of_reader: dict[int, list[Message]] = {}
    for message in messages:
        of_reader.setdefault(message.reader, []).append(message)
    turns = []
    for reader, own in of_reader.items():
        own.sort(key=lambda message: (_place(message.pieces), message.members))
        turns.extend([(turn, reader, message) for turn, message in enumerate(own)])
    return [message for _, _, message in sorted(turns, key=lambda entry: entry[:2])]


def _place(items: Sequence[ReadItem]) -> tuple[int, tuple[int, ...]]:
    """Where the first of some pieces is; no two batches begin at one place."""
    return items[0].leaf, items[0].box.start
