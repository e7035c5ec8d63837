"""Agreement of all processes before elements are sent: the tree, the plan, and the digests."""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from ckptcore.job.agreement import Agreement
from ckptcore.model.metadata import TreeMetadata
from ckptcore.model.transfer import ReadItem
from ckptcore.model.tree import JSON, format_path
from ckptcore_recovery.replicas.fetching import Address
from ckptcore_recovery.replicas.job_state import (
    NoReplicaError,
    ReplicasDifferError,
    box_from_json,
    dtypes_of,
    merge_reports,
)
from ckptcore_recovery.replicas.sending import DIGEST_BYTES, HeldElements
from ckptcore_recovery.replicas.transfers import Held, HeldBox, HeldIndex, Parcel, missing_boxes, plan_parcels

NOTHING_CHANGED: Final = "nothing was changed"

_SHOWN: Final = 20

_MOST_COMPARED: Final = 256
"""Maximum number of parcels that are searched for the arrays in which processes differ."""

_REASON: Final = 200
"""Maximum length of a reported reason, in characters."""

Connect: TypeAlias = Callable[[Mapping[int, Address]], Mapping[int, str]]
"""Connects to the holders at these addresses. Returns the reason for each holder that failed."""


class Start(NamedTuple):
    """The first decision of the leader.

    Attributes:
        lost: the ranks that lost their state.
        groups: the ranks that have equal reports about their states. The first of each group sends its report.
        token: the secret of this recovery, hexadecimal.
    """

    lost: Sequence[int]
    groups: Sequence[Sequence[int]]
    token: str


class Reports(NamedTuple):
    """The processes that have their state, as the leader knows them. On other ranks, only the tree.

    Attributes:
        tree: the encoded tree of the job.
        held: the boxes that each process holds.
        addresses: where each process listens.
    """

    tree: str
    held: Held
    addresses: Mapping[int, Address]


class Agreed(NamedTuple):
    """The common knowledge of all processes before elements are sent.

    Attributes:
        parcels: the plan.
        digests: the digest of each parcel.
        excluded: by number of a parcel, the witnesses with another digest than the majority.
        differing: by rank, the paths of arrays in which it differs from the majority.
        unreached: by rank that lost its state, the holders to which it cannot connect.
    """

    parcels: Sequence[Parcel]
    digests: Sequence[bytes]
    excluded: Mapping[int, Sequence[int]]
    differing: Mapping[int, Sequence[str]]
    unreached: Mapping[int, Sequence[int]]


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


def agree_on_tree(agreement: Agreement, start: Start, payloads: Sequence[Any]) -> Reports:
    """Merge the reports of the processes that have their state.

    Args:
        agreement: the exchanges of the recovery.
        start: the result of `agree_on_start`.
        payloads: on the leader, by rank: host, port, and for the first rank of a group its report; None for a process
            that lost its state.

    Raises:
        ReplicasDifferError: on all ranks; see `merge_reports`.
    """
    held: Held = {}

    def merge() -> JSON:
        nonlocal held
        reports = [payloads[group[0]][2] for group in start.groups]
        tree, held = merge_reports(reports, start.groups, start.lost)
        return json.dumps(tree.to_json())

    tree = _lead(agreement, "tree", merge)
    return Reports(tree, held, {rank: given[:2] for rank, given in enumerate(payloads) if given is not None})


def needs_payload(items: Iterable[ReadItem]) -> JSON:
    """Return the boxes that this process needs, for the payload of its stage."""
    return [[item.leaf, item.box.start, item.box.stop] for item in items]


def agree_on_parcels(
    agreement: Agreement,
    tree: TreeMetadata,
    reports: Reports,
    payloads: Sequence[Any],
    side: HeldElements | Connect,
) -> Agreed:
    """Plan the parcels, compute their digests, and compare the digests of different processes.

    Meanwhile, the processes that lost their state connect to the holders.

    Args:
        agreement: the exchanges of the recovery.
        tree: the tree of the job.
        reports: the result of `agree_on_tree`.
        payloads: on the leader, by rank, the result of `needs_payload`; a str if no other process has some values of
            the process; None for a process that has its state.
        side: the elements of this process. If it lost its state, a function that connects to holders.

    Raises:
        NoReplicaError: on all ranks, if no process holds a box that another one needs, or none to which it can connect.
        ReplicasDifferError: on all ranks, if processes hold different elements, and there is no majority.
    """
    planned: Any = json.loads(_lead(agreement, "plan", lambda: json.dumps(_matched_needs(tree, reports, payloads))))
    with agreement.stage("digests", meaning=NOTHING_CHANGED) as stage:
        needs = {rank: [ReadItem(leaf, box_from_json(box)) for leaf, *box in items] for rank, items in planned["needs"]}
        sets = [tuple(ranks) for ranks in planned["ranks"]]
        held = {
            leaf: [HeldBox(box_from_json(box), sets[number]) for number, *box in boxes]
            for leaf, boxes in planned["held"]
        }
        parcels = plan_parcels({leaf: dtype.itemsize for leaf, dtype in dtypes_of(tree).items()}, held, needs)
        if isinstance(side, HeldElements):
            stage.payload = side.digests(parcels, agreement.rank)
        else:
            addresses = {rank: (host, port) for rank, host, port in planned["addresses"]}
            own = [parcel for parcel in parcels if agreement.rank in parcel.senders]
            holders = {holder for parcel in own for holder in parcel.holders}
            failed = side({holder: addresses[holder] for holder in holders})
            stage.payload = [[holder, reason[:_REASON]] for holder, reason in failed.items()]
    reported: Sequence[Any] = stage.payloads

    def compare() -> JSON:
        digests = {rank: payload for rank, payload in enumerate(reported) if isinstance(payload, bytes)}
        failed = {rank: dict(payload) for rank, payload in enumerate(reported) if payload and rank not in digests}
        joined, excluded, undecided = _compare(parcels, digests)
        _check_reached(tree, parcels, dict(excluded), failed)
        return [joined, excluded, undecided, [[rank, list(holders)] for rank, holders in failed.items()]]

    joined, excluded, undecided, unreached = _lead(agreement, "compared", compare)
    elements = side if isinstance(side, HeldElements) else None
    differing = _find_differing(agreement, tree, parcels, [number for number, _ in excluded], undecided, elements)
    return Agreed(parcels, _split(bytes.fromhex(joined)), dict(excluded), differing, dict(unreached))


def _lead(agreement: Agreement, name: str, decide: Callable[[], JSON]) -> Any:
    """Return the decision of the leader. Its errors about replicas are raised on all ranks."""

    def decide_or_fail() -> JSON:
        try:
            return [None, decide()]
        except (NoReplicaError, ReplicasDifferError) as error:
            return [type(error).__name__, str(error)]

    answer: Any = agreement.lead(name, decide_or_fail)
    kind, decision = answer
    if kind is not None:
        raise (NoReplicaError if kind == NoReplicaError.__name__ else ReplicasDifferError)(decision)
    return decision


def _matched_needs(tree: TreeMetadata, reports: Reports, payloads: Sequence[Any]) -> dict[str, JSON]:
    """Return the needed boxes, and the boxes that processes hold of them. Sets of ranks are listed once."""
    needs: list[JSON] = []
    items: dict[ReadItem, None] = {}
    missing: list[str] = []
    index = HeldIndex(reports.held)
    for rank, payload in enumerate(payloads):
        if payload is None:
            continue
        if isinstance(payload, str):
            missing.append(f"rank {rank}: {payload}")
            continue
        needs.append([rank, payload])
        needed = [ReadItem(leaf, box_from_json(box)) for leaf, *box in payload]
        items.update(dict.fromkeys(needed))
        lines = [
            f"{format_path(tree.paths[leaf])}[{', '.join(f'{a}:{b}' for a, b in zip(*box, strict=True))}]"
            for leaf, box in missing_boxes(needed, index)
        ]
        if lines:
            missing.append(f"rank {rank}: {listed(lines)}: no process that has its state holds these elements")
    if missing:
        raise NoReplicaError(f"{'; '.join(missing)}. Load a checkpoint. Nothing was changed")
    boxes: dict[int, dict[HeldBox, None]] = {}
    for item in items:
        boxes.setdefault(item.leaf, {}).update(dict.fromkeys(index.overlapping(item)))
    sets: dict[tuple[int, ...], int] = {}
    held: list[JSON] = [
        [leaf, [[sets.setdefault(ranks, len(sets)), *box] for box, ranks in of_leaf]] for leaf, of_leaf in boxes.items()
    ]
    holders = sorted({rank for ranks in sets for rank in ranks})
    addresses: list[JSON] = [[rank, *reports.addresses[rank]] for rank in holders]
    return {"needs": needs, "held": held, "ranks": list(sets), "addresses": addresses}


def _compare(parcels: Sequence[Parcel], digests: Mapping[int, bytes]) -> Any:
    """Compare the digests of parcels.

    Returns:
        The digest of each parcel, the witnesses that differ from a majority by number of the parcel, and the numbers of
        the parcels without a majority.
    """
    reported = {rank: iter(_split(joined)) for rank, joined in digests.items()}
    chosen: list[bytes] = []
    excluded: list[JSON] = []
    undecided: list[JSON] = []
    for number, parcel in enumerate(parcels):
        by_rank = {rank: next(reported[rank]) for rank in parcel.witnesses}
        ((digest, votes),) = Counter(by_rank.values()).most_common(1)
        chosen.append(digest)
        others: list[JSON] = [rank for rank, own in by_rank.items() if own != digest]
        if others and 2 * votes <= len(by_rank):
            undecided.append(number)
        elif others:
            excluded.append([number, others])
    return [b"".join(chosen).hex(), excluded, undecided]


def _check_reached(
    tree: TreeMetadata,
    parcels: Sequence[Parcel],
    excluded: Mapping[int, Sequence[int]],
    failed: Mapping[int, Mapping[int, str]],
) -> None:
    """Check that each process that lost its state is connected to a holder of each of its parcels.

    Args:
        tree: the tree of the job.
        parcels: the plan.
        excluded: by number of a parcel, the holders that differ from a majority.
        failed: by rank, the holders to which it cannot connect, with the reasons.

    Raises:
        NoReplicaError: names the first parcel for which it is not.
    """
    for number, parcel in enumerate(parcels):
        for rank in parcel.senders.keys() & failed.keys():
            reasons = failed[rank]
            if not set(parcel.holders).difference(reasons, excluded.get(number, ())):
                shown = listed([f"rank {holder} at {reason}" for holder, reason in sorted(reasons.items())])
                raise NoReplicaError(
                    f"{format_path(tree.paths[parcel.pieces[0].leaf])}: rank {rank} cannot connect to a process that "
                    f"holds it ({shown}). Pass interface= with the address of each host that the other hosts of the "
                    "job reach. Nothing was changed"
                )


def _find_differing(
    agreement: Agreement,
    tree: TreeMetadata,
    parcels: Sequence[Parcel],
    excluded: Sequence[int],
    undecided: Sequence[int],
    elements: HeldElements | None,
) -> Mapping[int, Sequence[str]]:
    """Find the arrays in which processes differ: a parcel may have elements of several arrays.

    Args:
        agreement: the exchanges of the recovery.
        tree: the tree of the job.
        parcels: the plan.
        excluded, undecided: the numbers of parcels whose digests differ, with a majority and without one.
        elements: the elements of this process; None if it lost its state.

    Returns:
        By rank, the paths of the arrays in which it differs from a majority.

    Raises:
        ReplicasDifferError: on all ranks, if there are parcels without a majority.
    """
    numbers = [*undecided, *excluded][:_MOST_COMPARED]
    if not numbers:
        return {}
    with agreement.stage("pieces", meaning=NOTHING_CHANGED) as stage:
        witnessed = [parcels[number] for number in numbers if agreement.rank in parcels[number].witnesses]
        stage.payload = None if elements is None else b"".join([elements.piece_digests(parcel) for parcel in witnessed])
    payloads: Sequence[Any] = stage.payloads

    def find() -> JSON:
        reported = [iter(_split(payload or b"")) for payload in payloads]
        ranks_of: dict[str, dict[int, None]] = {}
        for number in numbers:
            witnesses = parcels[number].witnesses
            for piece in parcels[number].pieces:
                by_rank = {rank: next(reported[rank]) for rank in witnesses}
                ((digest, votes),) = Counter(by_rank.values()).most_common(1)
                differ = [rank for rank, own in by_rank.items() if own != digest or 2 * votes <= len(by_rank)]
                if differ:
                    ranks_of.setdefault(format_path(tree.paths[piece.leaf]), {}).update(dict.fromkeys(differ))
        if undecided:
            lines = [f"{path}: ranks {', '.join(map(str, sorted(ranks)))}" for path, ranks in ranks_of.items()]
            more = f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
            raise ReplicasDifferError(
                "processes that should hold the same elements hold different ones, and there is no majority:\n  "
                + "\n  ".join(lines[:_SHOWN])
                + f"{more}\nMemory is corrupt, the processes are not at the same step, or each has its own elements; "
                "wrap these in PerProcess(...). Otherwise load a checkpoint. Nothing was changed"
            )
        return [[path, list(ranks)] for path, ranks in ranks_of.items()]

    differing: dict[int, list[str]] = {}
    for path, ranks in _lead(agreement, "differing", find):
        for rank in ranks:
            differing.setdefault(rank, []).append(path)
    return differing


def listed(names: Sequence[str]) -> str:
    """Return names for a message; limits their number."""
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _split(joined: bytes) -> list[bytes]:
    return [joined[start : start + DIGEST_BYTES] for start in range(0, len(joined), DIGEST_BYTES)]
