"""Multipart uploads that a save does not need. They are aborted, because services keep them and charge for them."""

from __future__ import annotations

import uuid

from ckptcore.commit.conditional_put import ConditionalPutTransaction
from ckptcore.commit.fenced_store import FencedStore
from ckptcore.commit.location import resolve_location
from ckptcore.commit.root import Claim, new_save_id
from ckptcore.context import Context
from ckptcore.runtime import runtime_of

_DATA = bytes(range(256)) * (5 << 12)


def test_an_existing_object_leaves_no_upload() -> None:
    """The object may come from another copy of the same save, or from a failed save with the same bytes."""
    place = f"memory://{uuid.uuid4().hex}/step_1"
    location = resolve_location(place, runtime_of(Context()).storages)
    claimed = Claim(new_save_id(), "2026-01-01T00:00:00+00:00")
    claim = ConditionalPutTransaction(location, claimed, None)
    writer = claim.store.open_writer("data", len(_DATA))
    writer.write_at(0, _DATA)
    location.store.put("data", _DATA)
    writer.finish()
    assert isinstance(claim.store, FencedStore)
    assert claim.store.abort_uploads() == 0
    assert claim.store.get("data") == _DATA
