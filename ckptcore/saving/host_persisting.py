"""Making a save durable on hosts that do not see each other's files: each writes what its processes hold, and all get one root.

Nothing is committed on any host before every process of the job has written. Then the leader makes the root, every host gets it, and
the first process of each commits it there. If a host dies in between, the step is on some hosts and not on all: it does not count.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptcore.commit.commit import Claim, claimed_store
from ckptcore.commit.root import Claimed
from ckptcore.context import Context
from ckptcore.errors import CheckpointError
from ckptcore.events import Recording
from ckptcore.io.background import SaveHandle
from ckptcore.job.hosts import OnHosts
from ckptcore.job.visibility import expect_claim, show_claim
from ckptcore.model.tree import JSON
from ckptcore.protocols import StorageBackend
from ckptcore.runtime import runtime_of
from ckptcore.saving.parts import Captured
from ckptcore.saving.persisting import (
    NOTHING_COMMITTED,
    Described,
    claim_for,
    commit_whole,
    decode_written,
    encode_written,
    write_parts,
)

__all__ = ["persist_on_hosts"]


@dataclass(slots=True)
class _Composed:
    """Takes the place of a claim where the leader makes the root, which every host then commits."""

    store: StorageBackend
    root: bytes = b""
    parts: Mapping[str, bytes] | None = None

    def commit(self, root: bytes | None, parts: Mapping[str, bytes]) -> None:
        """Keep what was made."""
        self.root, self.parts = root or b"", parts

    def abort(self) -> None:
        """Nothing: it claims nothing."""

    def leave(self) -> None:
        """Nothing: it claims nothing."""


def persist_on_hosts(
    described: Described,
    captured: Sequence[Captured],
    context: Context,
    recording: Recording,
    handle: SaveHandle | None,
    on_hosts: OnHosts,
) -> None:
    """Claim the location on each host, write, and commit on each. On every rank; returns once all hosts have committed.

    Args:
        described: the save; its location is that of this host.
        captured: what each of its parts holds.
        context: options.
        recording: is told the phases.
        handle: counts the bytes written.
        on_hosts: who is where.

    Raises:
        CheckpointError: why it is not committed on every host. A host that had committed keeps what it has, and it counts for nobody.
    """
    agreement, hosts = described.agreement, on_hosts.hosts
    claimed = Claimed(described.save_id, described.created)
    claim: Claim | None = None
    try:
        with agreement.stage("claim", meaning=NOTHING_COMMITTED):
            if agreement.rank == hosts.first_of(agreement.rank):
                with recording.phase("claim"):
                    claim = claim_for(described, claimed, context)
                    show_claim(claim, claimed, described.location)
        store = (
            claim.store
            if claim is not None
            else claimed_store(described.location, described.save_id, runtime_of(context).conditions)
        )
        with agreement.stage("write", meaning=NOTHING_COMMITTED) as stage:
            if claim is None:
                expect_claim(claimed, described.location)
            with recording.phase("write") as phase:
                written = write_parts(described, captured, store, context, handle, None)
                phase.nbytes = sum(record.size for part in written for receipt in part for record in receipt.objects)
            own = [receipts for part, receipts in zip(described.parts, written, strict=True) if not part.own]
            stage.payload = encode_written(described, [receipt for (receipt,) in own])
        payloads = stage.payloads

        def make_whole() -> JSON:
            composed = _Composed(store)
            before = set(store.list())
            parts = [part for part in described.parts if not part.own]
            commit_whole(described, composed, parts, decode_written(described, payloads), context, recording)
            made = {key: store.get(key) for key in store.list() if key not in before}
            return {
                "root": _text(composed.root),
                "parts": {key: _text(data) for key, data in (composed.parts or {}).items()},
                "objects": {key: _text(data) for key, data in made.items()},
                "told": on_hosts.tell(),
            }

        whole: Any = agreement.lead("root", make_whole)
        with agreement.stage("commit", meaning="the step is not on all hosts, and does not count"):
            if claim is not None:
                if agreement.rank != 0:
                    for key, text in whole["objects"].items():
                        claim.store.put(key, _bytes(text))
                if described.before_commit is not None:
                    described.before_commit()
                claim.commit(_bytes(whole["root"]), {key: _bytes(text) for key, text in whole["parts"].items()})
        on_hosts.hear(whole["told"])
    except BaseException as error:
        try:
            if claim is not None:
                claim.abort()
        except CheckpointError as failure:
            # The error that stopped the save says more; the next save removes what is left.
            error.add_note(f"removing what was written failed too: {failure}")
        raise


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
