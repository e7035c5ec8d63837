"""Buckets: the objects of the service by name. Every change is atomic."""

from __future__ import annotations

import bisect
import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from ckptcore_gcs_server.conditions import Conditions
from ckptcore_gcs_server.objects import Properties, StoredObject, crc32c, md5
from ckptcore_gcs_server.refusals import bucket_conflict, invalid, no_bucket, no_object
from ckptcore_gcs_server.uploads import PartUpload, ResumableSession

_LONGEST_NAME = 1024


@dataclass(frozen=True, slots=True)
class Listing:
    """A page of a listing.

    Attributes:
        objects: the objects, sorted by name.
        prefixes: the common prefixes up to the delimiter, sorted.
        next_name: the first name of the next page, or None.
    """

    objects: Sequence[StoredObject]
    prefixes: Sequence[str]
    next_name: str | None


@dataclass(slots=True)
class _Bucket:
    """The objects of one bucket. `names` are their names, sorted as UTF-8."""

    created: datetime
    objects: dict[str, StoredObject] = field(default_factory=dict)
    names: list[bytes] = field(default_factory=list)


class Buckets:
    """All buckets and unfinished uploads of the service. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buckets: dict[str, _Bucket] = {}
        self._generation = 0
        self._ids = itertools.count(1)
        self.part_uploads: dict[str, PartUpload] = {}
        self.sessions: dict[str, ResumableSession] = {}

    def new_id(self, kind: str) -> str:
        """Return a new upload id."""
        return f"{kind}-{next(self._ids):08x}"

    # --- buckets ------------------------------------------------------------------------------------------------------

    def create_bucket(self, bucket: str) -> None:
        """Create a bucket."""
        if not (3 <= len(bucket) <= 222) or set(bucket) - set("abcdefghijklmnopqrstuvwxyz0123456789-_."):
            raise invalid(f"Invalid bucket name: {bucket!r}", "InvalidBucketName")
        with self._lock:
            if bucket in self._buckets:
                raise bucket_conflict(
                    "Your previous request to create the named bucket succeeded and you already own it."
                )
            self._buckets[bucket] = _Bucket(datetime.now(UTC))

    def delete_bucket(self, bucket: str) -> None:
        """Delete an empty bucket."""
        with self._lock:
            if self._found(bucket).objects:
                raise bucket_conflict("The bucket you tried to delete is not empty.")
            del self._buckets[bucket]

    def buckets(self) -> Mapping[str, datetime]:
        """Return the names of all buckets with their creation times."""
        with self._lock:
            return {name: bucket.created for name, bucket in sorted(self._buckets.items())}

    # --- reading ------------------------------------------------------------------------------------------------------

    def get(self, bucket: str, name: str, generation: int | None = None) -> StoredObject:
        """Return an object, optionally of a given generation."""
        with self._lock:
            stored = self._found(bucket).objects.get(name)
        if stored is None or generation not in (None, stored.generation):
            raise no_object(bucket, name)
        return stored

    def list(
        self,
        bucket: str,
        *,
        prefix: str = "",
        delimiter: str = "",
        start: str = "",
        stop: str | None = None,
        limit: int,
    ) -> Listing:
        """Return the first `limit` names and common prefixes from `start` to `stop` (exclusive), sorted as UTF-8.

        Only names that begin with `prefix` are listed. A common prefix replaces all names that are
        equal up to the first `delimiter` after `prefix`. An empty `delimiter` gives no common prefixes.
        """
        objects: list[StoredObject] = []
        prefixes: list[str] = []
        with self._lock:
            stored_bucket = self._found(bucket)
            position = bisect.bisect_left(stored_bucket.names, max(prefix.encode(), start.encode()))
            while position < len(stored_bucket.names):
                name = stored_bucket.names[position].decode()
                if not name.startswith(prefix) or (stop is not None and name.encode() >= stop.encode()):
                    break
                if len(objects) + len(prefixes) == limit:
                    return Listing(objects, prefixes, name)
                head, found_delimiter, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
                if found_delimiter:
                    prefixes.append(prefix + head + delimiter)
                    # Skip all names with this prefix. They sort before the prefix with 0xFF, which no UTF-8 text has.
                    position = bisect.bisect_left(stored_bucket.names, prefixes[-1].encode() + b"\xff")
                else:
                    objects.append(stored_bucket.objects[name])
                    position += 1
        return Listing(objects, prefixes, None)

    # --- writing ------------------------------------------------------------------------------------------------------

    def put(
        self,
        bucket: str,
        name: str,
        data: bytes,
        properties: Properties,
        conditions: Conditions,
        *,
        composed: bool = False,
        components: int | None = None,
    ) -> StoredObject:
        """Create or replace an object, if the conditions hold for the existing one."""
        encoded = name.encode()
        if not encoded or len(encoded) > _LONGEST_NAME or name in (".", "..") or "\r" in name or "\n" in name:
            raise invalid(f"Invalid object name: {name!r}", "InvalidObjectName")
        # Compute checksums without the lock, because they take time.
        checksums = crc32c(data), None if composed else md5(data)
        with self._lock:
            stored_bucket = self._found(bucket)
            conditions.check_write(stored_bucket.objects.get(name))
            now = datetime.now(UTC)
            # As in the service, a generation is a time in microseconds. It increases even if the clock does not.
            self._generation = max(self._generation + 1, time.time_ns() // 1000)
            stored = StoredObject(
                bucket, name, data, self._generation, properties, *checksums, now, now, components=components
            )
            if name not in stored_bucket.objects:
                bisect.insort(stored_bucket.names, encoded)
            stored_bucket.objects[name] = stored
        return stored

    def change_properties(self, bucket: str, name: str, properties: Properties, conditions: Conditions) -> StoredObject:
        """Replace the properties of an object. Its generation does not change."""
        with self._lock:
            stored_bucket = self._found(bucket)
            live = stored_bucket.objects.get(name)
            if live is None:
                raise no_object(bucket, name)
            conditions.check_write(live)
            changed = replace(
                live, properties=properties, metageneration=live.metageneration + 1, updated=datetime.now(UTC)
            )
            stored_bucket.objects[name] = changed
        return changed

    def delete(self, bucket: str, name: str, conditions: Conditions, generation: int | None = None) -> None:
        """Delete an object, if the conditions hold."""
        with self._lock:
            stored_bucket = self._found(bucket)
            live = stored_bucket.objects.get(name)
            if live is None or generation not in (None, live.generation):
                raise no_object(bucket, name)
            conditions.check_write(live)
            del stored_bucket.objects[name]
            del stored_bucket.names[bisect.bisect_left(stored_bucket.names, name.encode())]

    def require(self, bucket: str) -> None:
        """Raise a refusal if a bucket does not exist."""
        with self._lock:
            self._found(bucket)

    def _found(self, bucket: str) -> _Bucket:
        try:
            return self._buckets[bucket]
        except KeyError:
            raise no_bucket(bucket) from None
