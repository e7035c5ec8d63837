"""Open buckets are shared, and their number is bounded."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
from ckptcore_gcs.buckets import GcsBuckets
from ckptcore_obstore.storage import ObjectStoreDirectory, OpenBuckets
from ckptcore_s3.service import S3Buckets

from ckptcore.protocols import StorageOptions


def test_the_most_recently_used_buckets_are_kept() -> None:
    buckets = OpenBuckets[str, object](max_buckets=2)
    first, second = buckets.get("first", object), buckets.get("second", object)
    assert buckets.get("first", object) is first
    buckets.get("third", object)
    assert buckets.get("first", object) is first
    assert buckets.get("second", object) is not second


def _s3() -> Callable[[int], ObjectStoreDirectory]:
    buckets = S3Buckets()
    return lambda number: buckets.open(
        "s3://bucket/run",
        StorageOptions(config={"access_key_id": f"key-{number}", "secret_access_key": "secret", "region": "eu-west-1"}),
    )


def _gs() -> Callable[[int], ObjectStoreDirectory]:
    buckets = GcsBuckets()
    return lambda number: buckets.open("gs://bucket/run", StorageOptions(config={"access_token": f"token-{number}"}))


@pytest.mark.parametrize("opener", [_s3, _gs])
def test_buckets_with_old_credentials_are_released(
    opener: Callable[[], Callable[[int], ObjectStoreDirectory]],
) -> None:
    open_with = opener()
    assert open_with(0).bucket is open_with(0).bucket
    seen = [weakref.ref(open_with(number).bucket) for number in range(200)]
    gc.collect()
    assert sum(bucket() is not None for bucket in seen) < 100
