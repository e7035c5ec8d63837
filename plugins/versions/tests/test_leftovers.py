"""Objects that a killed publish left on an object store do not stop the next publish of the same number."""

from __future__ import annotations

import numpy as np
from ckptcore_versions import Publisher

import ckptcore
from ckptcore.commit.location import open_directory
from ckptcore.commit.root import ROOT_KEY, Claim
from ckptcore.commit.root_json import encode_claim
from ckptcore.runtime import runtime_of


def test_objects_of_a_killed_publish_are_replaced() -> None:
    location = "memory://killed-publish/weights"
    with Publisher(location) as publisher:
        publisher.publish(0, {"w": np.zeros(1000)})
        storage = open_directory(location, runtime_of(ckptcore.Context()).storages, to_write=True)
        claim = encode_claim(Claim("0123456789abcdef", "2026-01-01T00:00:00.000+00:00"))
        storage.put(f"v000001/{ROOT_KEY}", claim)
        storage.put("v000001/deltas.0123456789abcdef.00000", b"of a killed process")
        publisher.publish(1, {"w": np.ones(1000)})
    assert (ckptcore.load(f"{location}/v000001")["w"] == 1).all()
    assert "v000001/deltas.0123456789abcdef.00000" not in list(storage.list())
