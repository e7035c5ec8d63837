"""A failed save deletes its objects, while another save commits.

The service throttles the first delete request. The retry comes after the commit.
"""

from __future__ import annotations

import numpy as np
import pytest
from ckptcore_obstore.buckets import Bucket
from ckptcore_obstore.failures import Failure, FailureKind, RequestFailed
from ckptcore_s3.testing import S3Server

import ckptcore
from ckptcore.saving import writing


def test_a_concurrently_committed_checkpoint_is_kept(ministack: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    location = f"s3://{ministack.create_bucket()}/run/step_1"
    context = ckptcore.Context(storage={"s3": ministack.options})
    delete = Bucket._delete
    told = []

    def throttled_while_another_saves(bucket: Bucket, keys: list[str]) -> None:
        if told:
            delete(bucket, keys)
            return
        told.append(keys)
        ckptcore.save(location, {"w": np.ones(10)}, context=ckptcore.Context(storage={"s3": ministack.options}))
        raise RequestFailed(Failure(FailureKind.THROTTLED, 503, "SlowDown", "Please reduce your request rate."))

    def fail(*_: object) -> None:
        monkeypatch.undo()
        monkeypatch.setattr(Bucket, "_delete", throttled_while_another_saves)
        raise RuntimeError("the save gives up when all is written")

    monkeypatch.setattr(writing, "timeline_to_json", fail)
    with pytest.raises(RuntimeError, match="gives up"):
        ckptcore.save(location, {"w": np.zeros(10)}, context=context)
    monkeypatch.undo()
    assert told
    np.testing.assert_array_equal(ckptcore.load(location, context=context)["w"], np.ones(10))
