"""Shares of a read: which process reads what several want, and in which order it is sent to the others. Pure."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from ckptcore.loading.stored_pieces import ALIGNMENT, BatchSizes, Order, StoredPiece, TileIndex, batches_of, pieces_of
from ckptcore.model import BLOCK_BYTES
from ckptcore.model.arrays import ArraySpec, Box
from ckptcore.model.chunks import Chunk
from ckptcore.model.transfer import ReadItem
from ckptcore.planning.partition import Wanting, cells_of_wants

__all__ = ["Message", "MessageSizes", "Request", "Round", "SharedPlan", "Tiles", "message_offsets", "plan_shares"]

Request: TypeAlias = Mapping[int, Sequence[Box]]
"""By number of the leaf, never an alias, the boxes that a process wants, without duplicates."""

Tiles: TypeAlias = Callable[[int], Iterable[Chunk]]
"""Gives, by number of the leaf, the tiles that an array is stored in: all plain or none; nothing where that is not known."""

_LEAST_BYTES: Final = 4 << 20
"""Smaller messages are only sent where there is no more to send: each costs a request, and ends where a block does."""

_TURNS: Final = 4
"""How many messages each member reads at least, where they are larger than that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageSizes:
    """How large what is sent at once may be, and how much is in memory, in bytes.

    Attributes:
        message: elements of a message; at least one element is sent.
        round: what a process wants of the arrays of one round; one array may exceed it, alone. None: one round has all.
        block: messages end at multiples of it in an object: less than a block is not read by itself.
    """

    message: int = 32 << 20
    round: int | None = None
    block: int = BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class Message:
    """What one process reads and sends at once.

    Attributes:
        reader: the rank that reads it.
        members: the ranks that want it, sorted, the reader among them; where it is alone, nothing is sent.
        pieces: what it has, in the order in which it is stored. Not every member wants all of it, where several want parts of a tile
            that is only read whole.
        nbytes: how long it is, with what lies between pieces.
        place: where its first piece stands in the order in which all are stored.
    """

    reader: int
    members: tuple[int, ...]
    pieces: tuple[ReadItem, ...]
    nbytes: int
    place: Order


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


def _nowhere(leaf: int) -> Iterable[Chunk]:
    """Nothing is known of where an array is."""
    return ()


def plan_shares(
    specs: Mapping[int, ArraySpec],
    requests: Sequence[Request],
    request_of: Mapping[int, int],
    rank: int,
    sizes: MessageSizes,
    tiles: Tiles = _nowhere,
) -> SharedPlan:
    """What one process does, so that all get what they want and each element is read once.

    What several want is divided among them so that all read about as much, each of them what follows each other. Every process plans
    alike: from the same arguments each finds its part of one whole.

    Args:
        specs: by number of the leaf, the stored arrays that anyone wants.
        requests: what is wanted, each of these once.
        request_of: by rank, for all that read together, which of the requests it has.
        rank: the process to plan for; one of these.
        sizes: how much is sent at once.
        tiles: where arrays are stored; messages are cut so that no block and no tile that is only read whole is in two of them.
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
            index = _index(cells, tiles(leaf))
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
    """Where in a message its pieces begin, in bytes, and how long it is.

    Args:
        pieces: of the message.
        itemsize_of: gives, by leaf, bytes per element.
    """
    offsets, end = [], 0
    for piece in pieces:
        offsets.append(end)
        end += -(-piece.box.size * itemsize_of(piece.leaf) // ALIGNMENT) * ALIGNMENT
    return offsets, end


class _Planning:
    """Who reads what, as it is given out."""

    def __init__(self, ranks_of: Mapping[int, Sequence[int]]) -> None:
        self._ranks_of = ranks_of
        self._load = dict.fromkeys([rank for ranks in ranks_of.values() for rank in ranks], 0)
        self._members: dict[Wanting, tuple[int, ...]] = {}

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

    def assign(self, members: tuple[int, ...], batches: Sequence[Sequence[StoredPiece]]) -> list[Message]:
        """Give batches, which are in order, to members, so that all have read about as much in the end.

        Each gets batches that follow each other: what is in a block with both of two of them it reads once.
        """
        sizes = [sum([piece.nbytes for piece in pieces]) for pieces in batches]
        level = self._level(members, sum(sizes))
        readers = deque(members)
        messages = []
        for pieces, nbytes in zip(batches, sizes, strict=True):
            # A batch goes to who has room for half of it or more.
            while len(readers) > 1 and self._load[readers[0]] + nbytes / 2 > level:
                readers.popleft()
            self._load[readers[0]] += nbytes
            items = tuple([ReadItem(piece.leaf, piece.box) for piece in pieces])
            messages.append(Message(readers[0], members, items, nbytes, pieces[0].order))
        return messages

    def _level(self, members: tuple[int, ...], nbytes: int) -> float:
        """How many bytes each member reads in the end that does not read more already."""
        loads = sorted([self._load[rank] for rank in members])
        held = 0
        for count, load in enumerate(loads, 1):
            held += load
            level = (held + nbytes) / count
            if count == len(loads) or level <= loads[count]:
                return level
        raise AssertionError("a group has members")


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


@dataclass(frozen=True, slots=True)
class _Cell:
    """A box of an array.

    Attributes:
        members: who is sent it.
        is_whole: whether it is a box as it was asked for.
    """

    box: Box
    members: tuple[int, ...]
    is_whole: bool

    @property
    def is_sent(self) -> bool:
        """Whether it is not read into place."""
        return len(self.members) > 1 or not self.is_whole


def _index(cells: Sequence[_Cell], tiles: Iterable[Chunk]) -> TileIndex:
    """The tiles of an array, if its cells are to be cut at them."""
    if len(cells) == 1 and not cells[0].is_sent:
        return TileIndex(())
    found = iter(tiles)
    first = next(found, None)
    if first is None or (first.is_plain and not any(cell.is_sent for cell in cells)):
        return TileIndex(())
    return TileIndex(itertools.chain([first], found))


def _joined(cells: Sequence[_Cell], index: TileIndex) -> list[_Cell]:
    """Cells of which no two have parts of one tile, unless they are for the same members: who wants a part is sent all of them."""
    parts = [list(index.parts(cell.box)) for cell in cells]
    members: dict[Box, set[int]] = {}
    for cell, of_cell in zip(cells, parts, strict=True):
        if sum([part.size for part, _ in of_cell]) != cell.box.size:
            return list(cells)  # the tiles are not those of the array
        for _, tile in of_cell:
            members.setdefault(tile.box, set()).update(cell.members)
    made: list[_Cell] = []
    for cell, of_cell in zip(cells, parts, strict=True):
        if all(len(members[tile.box]) == len(cell.members) for _, tile in of_cell):
            made.append(cell)
        else:
            made.extend([_Cell(part, tuple(sorted(members[tile.box])), False) for part, tile in of_cell])
    return made


def _batch_sizes(pieces: Sequence[StoredPiece], members: int, sizes: MessageSizes) -> BatchSizes:
    """How long messages are: there are as many for each member, so that all read about as much."""
    total = sum([piece.nbytes for piece in pieces])
    most = min(sizes.message, max(_LEAST_BYTES, -(-total // (_TURNS * members))))
    count = -(-total // most)
    if count > members:
        count += -count % members
    return BatchSizes(aim=-(-total // count), most=sizes.message, block=sizes.block)


def _in_turns(messages: Sequence[Message]) -> list[Message]:
    """Messages in the order in which they are sent: of each reader one in turn, so that all of them read meanwhile."""
    of_reader: dict[int, list[Message]] = {}
    for message in messages:
        of_reader.setdefault(message.reader, []).append(message)
    turns = []
    for reader, own in of_reader.items():
        own.sort(key=lambda message: (message.place, message.members))
        turns.extend([(turn, reader, message) for turn, message in enumerate(own)])
    return [message for _, _, message in sorted(turns, key=lambda entry: entry[:2])]
