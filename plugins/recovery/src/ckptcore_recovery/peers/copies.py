"""Copies of blobs whose holders were lost are made again when a job starts, so that it can lose as many hosts again."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from ckptcore.errors import CheckpointError, ConditionFailedError
from ckptcore.events import logger_named
from ckptcore.job.agreement import Agreement
from ckptcore.model.tree import JSON
from ckptcore_recovery.peers.session import Session
from ckptcore_recovery.peers.storage import BlobReader, write_local_blob

logger = logger_named("ckptcore.recovery")


def restore_copies(session: Session, agreement: Agreement, *, is_first: bool) -> None:
    """Copy each blob that has too few holders to other hosts. Called on every rank, before anything is written.

    The process that acts for a host fetches the blobs that the host is to hold, so hosts work at the same time.

    Args:
        session: the session of this process.
        agreement: an exchange between the processes of the job.
        is_first: True in the process that acts for its host.
    """
    plan: Any = agreement.lead("missing copies", lambda: _plan(session))
    with agreement.stage("copies") as stage:
        stage.payload = _fetch(session, plan) if is_first and plan else {}
    fetched = stage.payloads
    with agreement.stage("holders"):
        if agreement.rank == 0:
            _record(session, fetched)


def _plan(session: Session) -> JSON:
    """Return the keys whose blobs each member has to fetch, by the id of the member."""
    view = session.view
    plan: dict[str, JSON] = {}
    writers = itertools.cycle([member.id for member in view.members if not member.is_reader])
    for key in session.keys(""):
        entry = session.find(key)
        holders = [view.by_id[name] for name in entry.holders if name in view.by_id]
        if not entry.blob or not holders:
            continue  # a lost object: a load reports it
        # Hosts that left the job do not count: nothing keeps them.
        kept = [member for member in holders if not member.is_reader]
        wanted = view.holders(kept[0].id if kept else next(writers))
        missing = len(wanted) - len(kept)
        domains = {member.domain for member in kept}
        for name in wanted:
            member = view.by_id[name]
            if missing > 0 and name not in entry.holders and member.domain not in domains:
                keys = plan.setdefault(name, [])
                assert isinstance(keys, list)
                keys.append(key)
                domains.add(member.domain)
                missing -= 1
    return plan


def _fetch(session: Session, plan: Mapping[str, Sequence[str]]) -> dict[str, JSON]:
    """Fetch the blobs of this host. Return the keys that were fetched, with the versions of their entries."""
    assert session.local is not None
    fetched: list[JSON] = []
    for key in plan.get(session.local.id, ()):
        entry = session.find(key)
        reader = BlobReader(session, "", key, entry)
        try:
            write_local_blob(session, entry.blob, entry.size, reader)
        except CheckpointError as error:
            logger.warning("%s has too few copies in memory, and another one cannot be made: %s", key, error)
            continue
        fetched.append([key, entry.version])
    return {session.local.id: fetched}


def _record(session: Session, fetched: Sequence[Any]) -> None:
    """Add the hosts that fetched blobs to the holders of their entries."""
    more: dict[str, list[str]] = {}
    versions: dict[str, int] = {}
    for by_member in fetched:
        for name, keys in by_member.items():
            for key, version in keys:
                more.setdefault(key, []).append(name)
                versions[key] = version
    for key, names in more.items():
        entry = session.find(key)
        live = [name for name in entry.holders if name in session.view.by_id]
        try:
            session.replace(key, entry._replace(holders=(*live, *names)), str(versions[key]))
        except ConditionFailedError:
            logger.debug("%s was replaced meanwhile", key)
