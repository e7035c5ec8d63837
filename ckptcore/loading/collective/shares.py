"""Shares of a read: the process that reads each requested box, and the order of messages. Pure."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from ckptcore.loading.stored_pieces import ALIGNMENT, BatchSizes, ChunkLookup, Order, StoredPiece, batches_of, pieces_of
from ckptcore.model import BLOCK_BYTES
from ckptcore.model.arrays import ArraySpec, Box
from ckptcore.model.transfer import Chunk, ReadItem
from ckptcore.planning.partition import Wanting, cells_of_wants

__all__ = ["ChunksOf", "Message", "MessageSizes", "Request", "Round", "SharedPlan", "message_offsets", "plan_shares"]

Request: TypeAlias = Mapping[int, Sequence[Box]]
"""The boxes that a process requests, by number of the leaf (never an alias), without duplicates."""

ChunksOf: TypeAlias = Callable[[int], Iterable[Chunk]]
"""Returns the chunks in which an array is stored, by number of its leaf: all plain or none. Empty if unknown."""

_LEAST_BYTES: Final = 4 << 20
"""Minimum size of messages, except the last: each costs a request, and ends at a block."""

_TURNS: Final = 4
"""Minimum number of messages that each member reads, if they are larger than `_LEAST_BYTES`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageSizes:
    """Limits of messages and of memory, in bytes.

    Attributes:
        message: elements of a message; a message has at least one element.
        round: bytes that a process requests in one round; a single array may exceed it. None: one round.
        block: messages end at multiples of it in an object, because a block is read whole.
    """

    message: int = 32 << 20
    round: int | None = None
    block: int = BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class Message:
    """A part of the data that one process reads and sends at once.

    Attributes:
        reader: the rank that reads it.
        members: the ranks that request it, sorted, with the reader; a single one sends nothing.
        pieces: its boxes, in the order in which they are stored. A member may request only some of them, if several
            request parts of a chunk that is read whole.
        nbytes: its length, with the padding between pieces.
        place: the position of its first piece in the order in which all are stored.
    """

    reader: int
    members: tuple[int, ...]
    pieces: tuple[ReadItem, ...]
    nbytes: int
    place: Order


@dataclass(frozen=True, slots=True)
class Round:
    """A part of an exchange that ends before the next one begins.

    Attributes:
        leaves: the arrays that the round exchanges completely.
        direct: boxes that only this process requests, and whole; it reads them into their destination.
        messages: the messages of this process, in the same order as on all their members.
    """

    leaves: frozenset[int]
    direct: tuple[ReadItem, ...]
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class SharedPlan:
    """The part of one process in an exchange.

    Attributes:
        rounds: in order.
        groups: the distinct members of the messages of this process, in the same order on all processes.
    """

    rounds: tuple[Round, ...]
    groups: tuple[tuple[int, ...], ...]


def _nowhere(leaf: int) -> Iterable[Chunk]:
    """Return no chunks: the location of the array is unknown."""
    return ()


def plan_shares(
    specs: Mapping[int, ArraySpec],
    requests: Sequence[Request],
    request_of: Mapping[int, int],
    rank: int,
    sizes: MessageSizes,
    chunks: ChunksOf = _nowhere,
) -> SharedPlan:
    """Plan the part of one process in an exchange, in which each requested element is read once.

    Data that several processes request is divided among them in contiguous parts of about the same size. Every process
    computes the same plan from the same arguments, and takes its own part.

    Args:
        specs: the requested arrays, by number of the leaf.
        requests: the distinct requests.
        request_of: the number of its request, by rank, for all ranks of the exchange.
        rank: the rank to plan for.
        sizes: limits of messages and rounds.
        chunks: where arrays are stored: no block, and no chunk that is read whole, is cut by messages.
    """
    ranks_of: dict[int, list[int]] = {}
    for member, number in sorted(request_of.items()):
        ranks_of.setdefault(number, []).append(member)
    planning = _Planning(ranks_of)
    rounds = []
    groups: dict[tuple[int, ...], None] = {}
    for leaves in _rounds(specs, {number: requests[number] for number in ranks_of}, sizes.round):
        direct: list[ReadItem] = []
        shared: dict[tuple[int, ...], list[StoredPiece]] = {}
        for leaf in leaves:
            itemsize = specs[leaf].numpy_dtype.itemsize
            cells = [
                _Cell(box, planning.members(wanting), is_whole)
                for box, wanting, is_whole in _cells(leaf, requests, ranks_of)
            ]
            index = _index(cells, chunks(leaf))
            for cell in cells if index.is_plain else _joined(cells, index):
                if cell.is_sent:
                    shared.setdefault(cell.members, []).extend(pieces_of(leaf, cell.box, itemsize, index))
                    continue
                planning.add(cell.members[0], cell.box.size * itemsize)
                if cell.members[0] == rank:
                    direct.append(ReadItem(leaf, cell.box))
        given: list[Message] = []
        for members in sorted(shared, key=lambda members: (len(members), members)):
            pieces = shared[members]
            batches = batches_of(pieces, _batch_sizes(pieces, len(members), sizes))
            given.extend(planning.assign(members, list(batches)))
        messages = _in_turns(given)
        groups.update(dict.fromkeys([message.members for message in messages if len(message.members) > 1]))
        own = tuple([message for message in messages if rank in message.members])
        rounds.append(Round(frozenset(leaves), tuple(direct), own))
    return SharedPlan(tuple(rounds), tuple([group for group in groups if rank in group]))


def message_offsets(pieces: Sequence[ReadItem], itemsize_of: Callable[[int], int]) -> tuple[Sequence[int], int]:
    """Return the offsets of the pieces of a message and its length, in bytes.

    Args:
        pieces: of the message.
        itemsize_of: returns the bytes per element of a leaf.
    """
    offsets, end = [], 0
    for piece in pieces:
        offsets.append(end)
        end += -(-piece.box.size * itemsize_of(piece.leaf) // ALIGNMENT) * ALIGNMENT
    return offsets, end


class _Planning:
    """The distribution of reads among ranks."""

    def __init__(self, ranks_of: Mapping[int, Sequence[int]]) -> None:
        self._ranks_of = ranks_of
        self._load = dict.fromkeys([rank for ranks in ranks_of.values() for rank in ranks], 0)
        self._members: dict[Wanting, tuple[int, ...]] = {}

    def members(self, wanting: Wanting) -> tuple[int, ...]:
        """Return the ranks that have one of these requests."""
        found = self._members.get(wanting)
        if found is None:
            found = tuple(sorted([rank for number in wanting for rank in self._ranks_of[number]]))
            self._members[wanting] = found
        return found

    def add(self, rank: int, nbytes: int) -> None:
        """Add bytes that a rank reads."""
        self._load[rank] += nbytes

    def assign(self, members: tuple[int, ...], batches: Sequence[Sequence[StoredPiece]]) -> list[Message]:
        """Assign ordered batches to members, so that all members read about the same number of bytes in total.

        Each member gets consecutive batches, and reads a block that two of them share only once.
        """
        sizes = [sum([piece.nbytes for piece in pieces]) for pieces in batches]
        level = self._level(members, sum(sizes))
        readers = deque(members)
        messages = []
        for pieces, nbytes in zip(batches, sizes, strict=True):
            # A batch goes to a member with room for at least half of it.
            while len(readers) > 1 and self._load[readers[0]] + nbytes / 2 > level:
                readers.popleft()
            self._load[readers[0]] += nbytes
            items = tuple([ReadItem(piece.leaf, piece.box) for piece in pieces])
            messages.append(Message(readers[0], members, items, nbytes, pieces[0].order))
        return messages

    def _level(self, members: tuple[int, ...], nbytes: int) -> float:
        """Return the total bytes of each member that does not already read more."""
        loads = sorted([self._load[rank] for rank in members])
        held = 0
        for count, load in enumerate(loads, 1):
            held += load
            level = (held + nbytes) / count
            if count == len(loads) or level <= loads[count]:
                return level
        raise AssertionError("a group has members")


def _rounds(specs: Mapping[int, ArraySpec], requests: Mapping[int, Request], most: int | None) -> list[list[int]]:
    """Cut the ordered arrays into rounds, in each of which no process requests more than `most` bytes."""
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
    """Return the cells of an array, the requests of each, and True for a cell that is a requested box."""
    wants: dict[Box, set[int]] = {}
    for number in ranks_of:
        for box in requests[number].get(leaf, ()):
            wants.setdefault(box, set()).add(number)
    cells = cells_of_wants({box: frozenset(numbers) for box, numbers in wants.items()})
    return [(box, wanting, box in wants) for box, wanting in cells]


@dataclass(frozen=True, slots=True)
class _Cell:
    """A box of an array.

    Attributes:
        members: the ranks that request it.
        is_whole: True for a requested box.
    """

    box: Box
    members: tuple[int, ...]
    is_whole: bool

    @property
    def is_sent(self) -> bool:
        """True if it is sent as a message, not read directly."""
        return len(self.members) > 1 or not self.is_whole


def _index(cells: Sequence[_Cell], chunks: Iterable[Chunk]) -> ChunkLookup:
    """The chunks of an array, if its cells are to be cut at them."""
    if len(cells) == 1 and not cells[0].is_sent:
        return ChunkLookup(())
    found = iter(chunks)
    first = next(found, None)
    if first is None or (first.is_plain and not any(cell.is_sent for cell in cells)):
        return ChunkLookup(())
    return ChunkLookup(itertools.chain([first], found))


def _joined(cells: Sequence[_Cell], index: ChunkLookup) -> list[_Cell]:
    """Split cells so that cells with parts of one chunk have the same members, who are sent the whole chunk."""
    parts = [list(index.parts(cell.box)) for cell in cells]
    members: dict[Box, set[int]] = {}
    for cell, of_cell in zip(cells, parts, strict=True):
        if sum([part.size for part, _ in of_cell]) != cell.box.size:
            return list(cells)  # the chunks are not those of the array
        for _, chunk in of_cell:
            members.setdefault(chunk.box, set()).update(cell.members)
    made: list[_Cell] = []
    for cell, of_cell in zip(cells, parts, strict=True):
        if all(len(members[chunk.box]) == len(cell.members) for _, chunk in of_cell):
            made.append(cell)
        else:
            made.extend([_Cell(part, tuple(sorted(members[chunk.box])), False) for part, chunk in of_cell])
    return made


def _batch_sizes(pieces: Sequence[StoredPiece], members: int, sizes: MessageSizes) -> BatchSizes:
    """Return the sizes of messages. Each member reads the same number of them."""
    total = sum([piece.nbytes for piece in pieces])
    most = min(sizes.message, max(_LEAST_BYTES, -(-total // (_TURNS * members))))
    count = -(-total // most)
    if count > members:
        count += -count % members
    return BatchSizes(aim=-(-total // count), most=sizes.message, block=sizes.block)


def _in_turns(messages: Sequence[Message]) -> list[Message]:
    """Return messages in the order of sending: one of each reader in turn, so that all read at the same time."""
    of_reader: dict[int, list[Message]] = {}
    for message in messages:
        of_reader.setdefault(message.reader, []).append(message)
    turns = []
    for reader, own in of_reader.items():
        own.sort(key=lambda message: (message.place, message.members))
        turns.extend([(turn, reader, message) for turn, message in enumerate(own)])
    return [message for _, _, message in sorted(turns, key=lambda entry: entry[:2])]
