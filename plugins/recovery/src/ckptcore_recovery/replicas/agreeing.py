"""What all processes of a job agree on before elements are sent: the state, the plan, and the digests."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from ckptcore.job.agreement import Agreement
from ckptcore.model.arrays import Box
from ckptcore.model.transfer import ReadItem
from ckptcore.model.tree import JSON, format_path
from ckptcore_recovery.replicas.job_state import JobState, ReplicasDifferError
from ckptcore_recovery.replicas.sending import DIGEST_BYTES, HeldElements
from ckptcore_recovery.replicas.transfers import Parcel, plan_parcels

NOTHING_CHANGED: Final = "nothing was changed"

_SHOWN: Final = 20

Address: TypeAlias = tuple[str, int]
"""Host and port at which a process sends its elements."""


class Start(NamedTuple):
    """What the leader decides first.

    Attributes:
        lost: the ranks that lost their state.
        groups: the ranks that have equal reports about their states. The first of each group sends its report.
        token: the secret of this recovery, hexadecimal.
    """

    lost: Sequence[int]
    groups: Sequence[Sequence[int]]
    token: str


class Agreed(NamedTuple):
    """What all processes know before elements are sent.

    Attributes:
        parcels: the plan.
        digests: the digest of each parcel.
        excluded: by number of a parcel, the witnesses with another digest than the majority.
    """

    parcels: Sequence[Parcel]
    digests: Sequence[bytes]
    excluded: Mapping[int, Sequence[int]]


def agree_on_start(agreement: Agreement, digest: str | None) -> Start:
    """Find the processes that lost their state.

    Args:
        agreement: the exchanges of the recovery.
        digest: the digest of the report of this process; None if it lost its state.
    """
    with agreement.stage("states", meaning=NOTHING_CHANGED) as stage:
        stage.payload = digest
    payloads = stage.payloads

    def start() -> list[JSON]:
        groups: dict[JSON | bytes, list[JSON]] = {}
        for rank, payload in enumerate(payloads):
            groups.setdefault(payload, []).append(rank)
        lost = groups.pop(None, [])
        return [lost, list(groups.values()), secrets.token_hex(32)]

    started: Any = agreement.lead("start", start)
    return Start(*started)


def agree_on_state(agreement: Agreement, start: Start, payloads: Sequence[Any]) -> tuple[str, Mapping[int, Address]]:
    """Return the encoded state of the job, and the addresses of the processes that hold it.

    Args:
        agreement: the exchanges of the recovery.
        start: the result of `agree_on_start`.
        payloads: on the leader, by rank: host, port, and for the first rank of a group its report; None for a process
            that lost its state.

    Raises:
        ReplicasDifferError: on the leader; see `JobState.merge`.
    """

    def merge() -> list[JSON]:
        reports = [payloads[group[0]][2] for group in start.groups]
        addresses: list[JSON] = [[rank, *payload[:2]] for rank, payload in enumerate(payloads) if payload is not None]
        return [JobState.merge(reports, start.groups, start.lost).encode(), addresses]

    merged: Any = agreement.lead("state", merge)
    encoded, addresses = merged
    return encoded, {rank: (host, port) for rank, host, port in addresses}


def needs_payload(items: Iterable[ReadItem]) -> JSON:
    """Return the boxes that this process needs, for the payload of its stage."""
    return [[item.leaf, list(item.box.start), list(item.box.stop)] for item in items]


def agree_on_parcels(
    agreement: Agreement, state: JobState, payloads: Sequence[Any], elements: HeldElements | None
) -> Agreed:
    """Plan the parcels, compute their digests, and compare the digests of different processes.

    Args:
        agreement: the exchanges of the recovery.
        state: the state of the job.
        payloads: on the leader, by rank, the result of `needs_payload`; None for a process that has its state.
        elements: the elements of this process; None if it lost its state.

    Raises:
        ReplicasDifferError: on the leader, if processes hold different elements, and there is no majority.
    """
    listed: Any = agreement.lead("plan", lambda: [[rank, of] for rank, of in enumerate(payloads) if of is not None])
    with agreement.stage("digests", meaning=NOTHING_CHANGED) as stage:
        needs = {
            rank: [ReadItem(leaf, Box(tuple(start), tuple(stop))) for leaf, start, stop in items]
            for rank, items in listed
        }
        parcels = plan_parcels({leaf: dtype.itemsize for leaf, dtype in state.dtypes.items()}, state.held, needs)
        stage.payload = None if elements is None else elements.digests(parcels, agreement.rank)
    reported: Sequence[Any] = stage.payloads
    compared: Any = agreement.lead("compared", lambda: _compare(state, parcels, reported))
    joined, excluded = compared
    return Agreed(parcels, _split(bytes.fromhex(joined)), dict(excluded))


def _compare(state: JobState, parcels: Sequence[Parcel], payloads: Sequence[bytes | None]) -> list[JSON]:
    """Return the digest of each parcel, and the witnesses that differ from it."""
    reported = [iter(_split(payload or b"")) for payload in payloads]
    chosen: list[bytes] = []
    excluded: list[JSON] = []
    undecided: list[tuple[Parcel, Mapping[int, bytes]]] = []
    for number, parcel in enumerate(parcels):
        by_rank = {rank: next(reported[rank]) for rank in parcel.witnesses}
        ((digest, votes),) = Counter(by_rank.values()).most_common(1)
        chosen.append(digest)
        others: list[JSON] = [rank for rank, own in by_rank.items() if own != digest]
        if others and 2 * votes <= len(by_rank):
            undecided.append((parcel, by_rank))
        elif others:
            excluded.append([number, others])
    if undecided:
        raise _no_majority(state, undecided)
    return [b"".join(chosen).hex(), excluded]


def _no_majority(state: JobState, undecided: Sequence[tuple[Parcel, Mapping[int, bytes]]]) -> ReplicasDifferError:
    ranks: dict[str, set[int]] = {}
    for parcel, by_rank in undecided:
        for path in paths_of(state, parcel):
            ranks.setdefault(path, set()).update(by_rank)
    lines = [f"{path}: ranks {', '.join(map(str, sorted(having)))}" for path, having in ranks.items()]
    more = f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return ReplicasDifferError(
        "processes that should hold the same elements hold different ones, and there is no majority:\n  "
        + "\n  ".join(lines[:_SHOWN])
        + f"{more}\nMemory was corrupted, the processes are not at the same step, or each has its own elements: wrap "
        "these in PerProcess(...). Otherwise load a checkpoint. Nothing was changed"
    )


def paths_of(state: JobState, parcel: Parcel) -> list[str]:
    """Return the paths of the arrays that have elements in a parcel, each once."""
    return [format_path(state.tree.paths[leaf]) for leaf in dict.fromkeys([piece.leaf for piece in parcel.pieces])]


def _split(joined: bytes) -> list[bytes]:
    return [joined[start : start + DIGEST_BYTES] for start in range(0, len(joined), DIGEST_BYTES)]
