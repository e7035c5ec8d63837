"""Uploads in parts that a save turns out not to need are aborted: services keep and charge them."""

from __future__ import annotations

import uuid

from ckptcore.commit.conditional_put import ConditionalPutTransaction
from ckptcore.commit.conditions import Conditions
from ckptcore.commit.fences import FencedStore
from ckptcore.commit.location import resolve_location
from ckptcore.commit.root import Claimed, new_save_id
from ckptcore.plugins import installed_plugins

_DATA = bytes(range(256)) * (5 << 12)


def test_an_object_that_is_there_already_leaves_no_upload() -> None:
    """Another copy of the same save may have completed it, or a failed save with the same bytes."""
    place = f"memory://{uuid.uuid4().hex}/step_1"
    location = resolve_location(place, installed_plugins(), durable=False, config={})
    claimed = Claimed(new_save_id(), "2026-01-01T00:00:00+00:00")
    claim = ConditionalPutTransaction(location, claimed, None, Conditions())
    writer = claim.store.open_writer("data", len(_DATA))
    writer.write_at(0, _DATA)
    location.store.put("data", _DATA)
    writer.finish()
    assert isinstance(claim.store, FencedStore)
    assert claim.store.abort_uploads() == 0
    assert claim.store.get("data") == _DATA
