"""Copies and fragments whose holders were lost are made again after a start, so that the job can lose as many again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from ckptcore.errors import CheckpointError, ConditionFailedError, ObjectNotFoundError
from ckptcore.events import logger_named
from ckptcore.model.tree import JSON
from ckptcore_recovery.peers.blobs import fetch_blob
from ckptcore_recovery.peers.host_memory import Entry
from ckptcore_recovery.peers.session import Session
from ckptcore_recovery.peers.views import View

logger = logger_named("ckptcore.recovery")


class Repair(NamedTuple):
    """A blob that a member has to make again.

    Attributes:
        member_id: the member.
        place: its place among the holders.
    """

    member_id: str
    place: int


def restore_blobs(session: Session, plan: Mapping[str, Any], *, acts: bool) -> None:
    """Begin to make blobs again that were on lost hosts. Called on every rank, before anything is written.

    Each host fetches what it is to hold, so hosts work at the same time. What the leader gathers and sends grows with
    what was lost, not with the job.

    Args:
        session: the session of this process.
        plan: what `merge_plans` returned on the leader.
        acts: True in the process that acts for its host.
    """
    if acts and session.local is not None and (keys := plan.get(session.local.id)):
        session.start_copying(partial(_fetch_all, session, keys))


def install_view(session: Session) -> dict[str, JSON]:
    """Make the server of this host use the view of the session. Return what members have to make again.

    The result is about the objects that this server decides about. It has keys, with the places among their holders, by
    the id of the member.
    """
    assert session.local is not None
    own = session.server(session.view.by_id[session.local.id])
    plan: dict[str, list[JSON]] = {}
    answer, page = own.call({"op": "install", "epoch": session.view.epoch})
    while True:
        after = ""
        for after, encoded in json.loads(bytes(page)):
            for repair in repairs(session.view, after, Entry.decode(encoded)):
                plan.setdefault(repair.member_id, []).append([after, repair.place])
        if not answer["more"]:
            return dict(plan)
        answer, page = own.call({"op": "decided", "after": after})


def merge_plans(plans: Sequence[Any]) -> dict[str, JSON]:
    """On the leader, put together what `install_view` returned on each rank; None on ranks that do not act."""
    merged: dict[str, list[JSON]] = {}
    for plan in filter(None, plans):
        for name, keys in plan.items():
            merged.setdefault(name, []).extend(keys)
    return dict(merged)


def repairs(view: View, key: str, entry: Entry) -> Sequence[Repair]:
    """Return the blobs of an object that have to be made again, in failure domains that have none.

    Hosts that left the job can be read now, but do not count, because nothing keeps them.
    """
    if len([name for name in entry.holders if name in view.by_id]) < entry.needed:
        return ()  # the object is lost; a load reports it
    kept = [name for name in entry.holders if name in view.by_id and not view.by_id[name].is_reader]
    count = len(entry.holders) if entry.needed > 1 else 1 + view.copies
    free = [place for place, name in enumerate(entry.holders) if name not in kept]
    free += range(len(entry.holders), count)
    domains = {view.by_id[name].domain for name in kept}
    made: list[Repair] = []
    for name in view.holders(kept[0] if kept else view.home(key)[0]):
        if len(kept) + len(made) < count and view.by_id[name].domain not in domains:
            domains.add(view.by_id[name].domain)
            made.append(Repair(name, free[len(made)]))
    return made


def _fetch_all(session: Session, keys: Sequence[tuple[str, int]]) -> None:
    for key, place in keys:
        if not session.reads.wait_for_end():
            return
        _fetch(session, str(key), int(place))


def _fetch(session: Session, key: str, place: int) -> None:
    """Make a blob again on this host, and add this host to the holders of its entry."""
    try:
        entry = session.find(key)
        fetch_blob(session, key, entry, place)
        _add_holder(session, key, entry, place)
    except ObjectNotFoundError:
        logger.debug("%s was deleted or replaced meanwhile", key)
    except CheckpointError as error:
        if session.reads.are_stopped:
            return
        logger.warning("%s has too few copies in memory, and another one cannot be made: %s", key, error)


def _add_holder(session: Session, key: str, fetched: Entry, place: int) -> None:
    """Add this host to the holders of an object. Free its blob if the object was deleted or replaced meanwhile."""
    assert session.local is not None
    entry = fetched
    while entry.blob == fetched.blob:
        try:
            session.replace(key, _with_holder(session, entry, place), str(entry.version))
            return
        except ConditionFailedError:  # it was deleted or replaced, or has another holder more
            try:
                entry = session.find(key)
            except ObjectNotFoundError:
                break
    session.drop_blob(fetched._replace(holders=(session.local.id,)))


def _with_holder(session: Session, entry: Entry, place: int) -> Entry:
    assert session.local is not None
    if entry.needed == 1:  # copies have no order
        holders = [*[name for name in entry.holders if name in session.view.by_id], session.local.id]
    else:
        holders = [*entry.holders[:place], session.local.id, *entry.holders[place + 1 :]]
    return entry._replace(holders=tuple(holders))
