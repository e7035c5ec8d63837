"""Shared loads: one process reads data that several processes request, and sends it to the others."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import numpy as np
import xxhash

from ckptcore.context import Context, ReadGroups, Reads
from ckptcore.errors import PluginError, RankFailedError
from ckptcore.loading.joint import CollectiveAttempt
from ckptcore.loading.reading import TreeRead
from ckptcore.model import BLOCK_BYTES
from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.model.metadata import ArrayRecord
from ckptcore.model.transfer import Chunk, Pending, ReadItem
from ckptcore.model.tree import JSON
from ckptcore.opening.checkpoint import Checkpoint, naming_arrays
from ckptcore.protocols import Channels
from ckptcore.runtime import runtime_of
from ckptcore_collective.broadcasts import READ_AHEAD, Broadcasts
from ckptcore_collective.shares import Message, MessageSizes, RequestedBoxes, Round, SharedPlan, plan_shares


@dataclass(frozen=True, slots=True)
class SharedArray:
    """The identity of an array that ranks request. Equal on two ranks exactly if the array has the same elements.

    Attributes:
        leaf: its number in the stored tree, or in the result of transforms, which is equal on all ranks.
        change: a description of its change by matching, which may differ by rank; empty without a change.
        spec: its shape and dtype after the change.
        axis, step: divide the array into bands of `step` elements along `axis`, which are read from different bytes.
            Both are 0 if there are no such bands.
        is_stored: True for a stored array without any change.
    """

    leaf: int
    change: str
    spec: ArraySpec
    axis: int = 0
    step: int = 0
    is_stored: bool = False

    @classmethod
    def of(cls, checkpoint: Checkpoint, leaf: int) -> SharedArray:
        """Return the identity of an array that is not an alias.

        Args:
            checkpoint: the checkpoint, as this rank reads it.
            leaf: the number of the array in it.
        """
        record = checkpoint.tree.leaves[leaf]
        assert isinstance(record, ArrayRecord)  # only boxes of arrays are requested
        derived = checkpoint.derived
        if derived is None:
            return cls(leaf, "", record.spec, is_stored=True)
        common, change = derived.changes.get(leaf, (leaf, ""))
        if not derived.description and not change:
            return cls(common, "", record.spec, is_stored=True)
        axis, step = derived.bands(leaf, BLOCK_BYTES) or (0, 0)
        return cls(common, change, record.spec, axis, step)

    @property
    def order(self) -> tuple[int, str, str]:
        """Sort key. All ranks number the arrays in this order."""
        return self.leaf, self.change, str(self.spec)

    def to_json(self) -> JSON:
        """Encode it for a message."""
        if self.is_stored:
            return self.leaf
        return [self.leaf, self.change, list(self.spec.shape), self.spec.dtype, self.axis, self.step]

    @classmethod
    def from_json(cls, message: Any, stored: Checkpoint) -> SharedArray:
        """Decode it from a message; `stored` is the stored checkpoint."""
        if isinstance(message, int):
            record = stored.tree.leaves[message]
            assert isinstance(record, ArrayRecord)  # as at the sender
            return cls(message, "", record.spec, is_stored=True)
        leaf, change, shape, dtype, axis, step = message
        return cls(leaf, change, ArraySpec(tuple(shape), dtype), axis, step)

    def chunks(self) -> Iterable[Chunk]:
        """Return its bands as chunks that start at block boundaries, so that messages end there."""
        if not self.step:
            return ()
        bands = Box.whole(self.spec.shape).bands(self.axis, self.step)
        stride = -(-bands[0].size * self.spec.numpy_dtype.itemsize // BLOCK_BYTES) * BLOCK_BYTES
        key = f"{self.leaf:09} {self.change}"  # sorts as leaves do
        return [Chunk(key, number * stride, band, is_plain=True) for number, band in enumerate(bands)]


def stored_checkpoint(checkpoint: Checkpoint) -> Checkpoint:
    """Return the stored checkpoint from which a checkpoint may be derived."""
    while checkpoint.derived is not None:
        checkpoint = checkpoint.derived.sources[0]
    return checkpoint


def renumbered(plan: SharedPlan, own: Mapping[int, int]) -> SharedPlan:
    """Return a plan with the leaf numbers of one rank.

    Args:
        plan: the plan of that rank.
        own: the leaf of each array that the rank requests, by the number of the array in the plan.
    """
    if all(number == leaf for number, leaf in own.items()):
        return plan

    def items(given: tuple[ReadItem, ...]) -> tuple[ReadItem, ...]:
        return tuple([ReadItem(own[item.leaf], item.box) for item in given])

    def messages(given: tuple[Message, ...]) -> tuple[Message, ...]:
        return tuple([replace(message, pieces=items(message.pieces)) for message in given])

    rounds = [
        Round(
            frozenset([own[leaf] for leaf in part.leaves if leaf in own]), items(part.direct), messages(part.messages)
        )
        for part in plan.rounds
    ]
    return replace(plan, rounds=tuple(rounds))


T = TypeVar("T")

_SHOWN: Final = 300
"""Maximum length of a description of transforms in a message, in characters. A digest replaces the rest."""

_MESSAGE_BYTES: Final = 32 << 20
_MAX_MESSAGES: Final = 2 * READ_AHEAD
"""Maximum number of messages in memory."""


class SharedAttempt(CollectiveAttempt[T]):
    """One attempt to load, in which one process reads data that several processes request, and sends it to the others.

    Raises:
        ValueError: the ranks have different options.
        PluginError: there are no collectives for the transfer.
    """

    _requests: list[Mapping[SharedArray, Sequence[Box]]]
    _own: Mapping[int, SharedArray]
    _own_request: Sequence[JSON]
    _decided: Any

    def _message(self, checkpoint: Checkpoint, reading: TreeRead) -> JSON:
        """Return a digest of the boxes that this rank requests, the save that it opened, its options and its host."""
        wanted = _request_of(reading)
        self._own = {leaf: SharedArray.of(reading.checkpoint, leaf) for leaf in wanted}
        self._own_request = [[self._own[leaf].to_json(), _boxes_to_json(boxes)] for leaf, boxes in wanted.items()]
        memory = self._load.context.memory
        options = [
            str(self._load.context.job.reads),
            memory.load_bytes,
            memory.exchange_bytes,
            _transforms_of(reading.checkpoint),
        ]
        return [_digest(self._own_request), self._version(checkpoint), options, socket.gethostname()]

    def _decide(self, messages: Sequence[Any]) -> JSON:
        return _decide(messages)

    def _agree(self, decision: Any, reading: TreeRead) -> bool:
        if decision["differ"]:
            raise ValueError(
                f"the ranks load {self._load.location} with different options, or open different checkpoints there: "
                f"{decision['differ']}. Pass the same Context(job=JobOptions(reads=...), memory=...), transforms and "
                'matching on all ranks, and use a location that all ranks share; or load with reads="all"'
            )
        if decision["again"]:
            return False
        self._decided = decision
        self._requests = self._exchange_requests(self._own_request, stored_checkpoint(reading.checkpoint))
        return True

    def _version(self, checkpoint: Checkpoint) -> str:
        """Return a text that is equal on ranks that opened the same save."""
        root = checkpoint.version.root
        return (
            xxhash.xxh3_128_hexdigest(root)
            if isinstance(root, bytes)
            else "tree " + _digest([checkpoint.tree.to_json(), checkpoint.state])
        )

    def _exchange_requests(self, own: Sequence[JSON], stored: Checkpoint) -> list[Mapping[SharedArray, Sequence[Box]]]:
        """Return the distinct requests. The first rank with a request sends it to all."""
        first = self._decided["first"]
        if len(first) == 1:
            return [_request_from_json(own, stored)]
        with self._agreement.stage(f"requests-{self._number}") as stage:
            stage.payload = own if self._agreement.rank in first else None
            stage.decide = lambda: [stage.payloads[rank] for rank in first]
        return [_request_from_json(request, stored) for request in stage.decision]

    def read(self, reading: TreeRead) -> bool:
        """Run the planned reads collectively. Return False if the checkpoint was replaced meanwhile."""
        with ExitStack() as open_channels:
            broadcasts: list[Broadcasts] = []

            def connect() -> JSON:
                shares = self._shares(reading)
                channels = open_channels.enter_context(closing(self._channels(shares)))
                broadcasts.append(Broadcasts(reading, shares, channels, self._agreement.rank))
                return None

            def exchange(reading: TreeRead, context: Context) -> None:
                try:
                    broadcasts[0].run()
                except RankFailedError as error:
                    open_channels.close()  # processes that wait for this one fail now, not at a deadline
                    raise RankFailedError(f"collective load of {self._load.location}: {error}") from error

            def read() -> JSON:
                with naming_arrays(reading.checkpoint):
                    self._load.read(reading, exchange)
                self._expect_unchanged()
                return None

            steps = (("connect", connect), ("read", read))
            return all(self._take_step(name, work) is not None for name, work in steps)

    def _shares(self, reading: TreeRead) -> SharedPlan:
        checkpoint, rank = reading.checkpoint, self._agreement.rank
        group = _group_of(rank, self._load.context.job.reads, self._decided["hosts"])
        request_of = {member: self._decided["of"][member] for member in group if member < self._agreement.size}
        wanted = {array for number in set(request_of.values()) for array in self._requests[number]}
        arrays = sorted(wanted, key=lambda array: array.order)
        number_of = {array: number for number, array in enumerate(arrays)}
        requests: list[RequestedBoxes] = [
            {number_of[array]: boxes for array, boxes in request.items() if array in number_of}
            for request in self._requests
        ]
        specs = {number: array.spec for number, array in enumerate(arrays)}
        memory, stored = self._load.context.memory, stored_checkpoint(checkpoint)
        sizes = MessageSizes(
            message=max(1, min(_MESSAGE_BYTES, memory.exchange_bytes // _MAX_MESSAGES)), round=memory.load_bytes
        )

        def chunks(number: int) -> Iterator[Chunk]:
            array = arrays[number]
            if array.is_stored:
                yield from stored.index.boxes(array.leaf, Box.whole(array.spec.shape))
            else:
                yield from array.chunks()

        plan = plan_shares(specs, requests, request_of, rank, sizes, chunks)
        return renumbered(plan, {number_of[array]: leaf for leaf, array in self._own.items() if array in number_of})

    def _channels(self, shares: SharedPlan) -> Channels:
        """Return channels to the processes with which this one exchanges data.

        Raises:
            PluginError: there are no collectives for this job.
        """
        if not shares.groups:
            return _NoChannels()
        context, job = self._load.context, self._job
        collectives = context.job.collectives or runtime_of(context).registry.collectives()
        if collectives is None:
            raise PluginError(
                f"{self._load.location}: JobOptions(reads={self._load.context.job.reads!r}) sends data between "
                "processes, but no installed plugin has collectives for this job. Initialize torch.distributed or "
                "jax.distributed before the load and install the plugin of the framework, or pass "
                'JobOptions(collectives=...), or use reads="all"'
            )
        if (collectives.rank, collectives.size) != (job.rank, job.size):
            raise PluginError(
                f"{collectives.name} has rank {collectives.rank} of {collectives.size} processes, but the coordinator "
                f"has rank {job.rank} of {job.size}: use a coordinator and collectives of the same job"
            )
        return collectives.connect(f"ckptcore/{self._decided['key']}", shares.groups)


class _NoChannels:
    """Channels of a process that exchanges no data."""

    depth = 1

    def memory(self, nbytes: int) -> HostArray:
        """Return new memory."""
        return np.empty(nbytes, np.uint8)

    def broadcast(self, group: int, sender: int, data: HostArray) -> Pending[None]:
        """Raise an error, because there is no group."""
        raise PluginError(f"cannot broadcast to group {group}: this process is in no group")

    def close(self) -> None:
        """Do nothing."""


def _transforms_of(checkpoint: Checkpoint) -> str:
    """Return a description of the transforms. They must be equal on all ranks, because they determine leaf numbers."""
    text = "" if checkpoint.derived is None else checkpoint.derived.description
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({_digest(text)})"


def _decide(messages: Sequence[Any]) -> JSON:
    """Combine the messages of all ranks. Each message has the digest, version, options and host of one rank."""
    options = {json.dumps(option): rank for rank, (_, _, option, _) in reversed(list(enumerate(messages)))}
    versions = {version: rank for rank, (_, version, _, _) in reversed(list(enumerate(messages)))}
    differ = options if len(options) > 1 else {}
    if len(versions) > 1 and any(version.startswith("tree ") for version in versions):
        differ = versions  # without a root, a replacement cannot be detected
    first: dict[str, int] = {}
    for rank, (digest, _, _, _) in enumerate(messages):
        first.setdefault(digest, rank)
    numbers = {digest: number for number, digest in enumerate(first)}
    return {
        "differ": ", ".join([f"rank {rank}: {value}" for value, rank in differ.items()]),
        "again": len(versions) > 1,
        "first": list(first.values()),
        "of": [numbers[digest] for digest, _, _, _ in messages],
        "hosts": [host for _, _, _, host in messages],
        "key": os.urandom(8).hex(),
    }


def _group_of(rank: int, reads: Reads, hosts: Sequence[str]) -> tuple[int, ...]:
    """Return the ranks that share reads with a rank, including itself.

    Args:
        rank: the rank.
        reads: the option `JobOptions.reads`.
        hosts: the name of the host of each rank.
    """
    if isinstance(reads, ReadGroups):
        return next((group for group in reads.groups if rank in group), (rank,))
    if reads == "broadcast":
        return tuple(range(len(hosts)))
    if reads == "per_node":
        return tuple([other for other, host in enumerate(hosts) if host == hosts[rank]])
    return (rank,)


def _request_of(reading: TreeRead) -> RequestedBoxes:
    """Return the boxes that this process requests, by array."""
    wanted: dict[int, dict[Box, None]] = {}
    for leaf_read in reading.leaf_reads:
        if leaf_read.array is None:
            wanted.setdefault(leaf_read.leaf, {}).update(dict.fromkeys([box for box in leaf_read.boxes if box.size]))
    return {leaf: tuple(boxes) for leaf, boxes in sorted(wanted.items()) if boxes}


def _boxes_to_json(boxes: Sequence[Box]) -> JSON:
    return [[list(box.start), list(box.stop)] for box in boxes]


def _request_from_json(message: Any, stored: Checkpoint) -> Mapping[SharedArray, Sequence[Box]]:
    return {
        SharedArray.from_json(array, stored): tuple([Box(tuple(start), tuple(stop)) for start, stop in boxes])
        for array, boxes in message
    }


def _digest(document: JSON) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(document).encode())
