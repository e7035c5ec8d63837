"""What a layout hands its objects to in a rehearsal: takes their sizes, and opens segments to hear what they would hold."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress

from ckptcore.io.sizes import SIZES
from ckptcore.model.objects import CHECKSUM_BYTES, ObjectRecord
from ckptcore.model.transfer import ArraySegment, Segment
from ckptcore.protocols import StorageAddress, StorageBackend
from ckptcore_tools.dry_run.emptiness import NothingThereError

__all__ = ["SizeRecorder"]


class SizeRecorder:
    """A `ckptcore.protocols.WriteStore` that asks of a storage what `ckptcore.io.recorder.ObjectRecorder` does. Any thread."""

    def __init__(self, storage: StorageBackend, *, checksums: bool) -> None:
        """Hand objects to `storage`; `checksums` tells whether a save would keep some."""
        self._storage = storage
        self._checksums = checksums
        self._records: dict[str, ObjectRecord] = {}
        self._lock = threading.Lock()

    @property
    def address(self) -> StorageAddress | None:
        """None: there is nothing for native I/O."""
        return self._storage.address

    @property
    def objects(self) -> tuple[ObjectRecord, ...]:
        """The objects; their checksums are zeros, as many as there would be."""
        return tuple(self._records.values())

    def put(self, key: str, data: bytes) -> None:
        """See `WriteStore`."""
        self._storage.put(key, data)
        self._record(key, len(data))

    def write(self, key: str, segments: Sequence[Segment]) -> None:
        """See `WriteStore`. Segments are opened in order, each closed before the next: as one thread would write them."""
        nbytes = sum([segment.nbytes for segment in segments])
        writer = self._storage.open_writer(key, nbytes)
        for segment in segments:
            if isinstance(segment, ArraySegment):
                with suppress(NothingThereError):
                    segment.open()
                segment.close()
        if nbytes < SIZES.inline:
            writer.write_at(0, bytes(nbytes))  # who keeps small objects together counts their bytes
        writer.finish()
        self._record(key, nbytes)

    def write_many(self, objects: Iterable[tuple[str, Sequence[Segment]]]) -> None:
        """See `WriteStore`; one after the other."""
        for key, segments in objects:
            self.write(key, segments)

    def _record(self, key: str, nbytes: int) -> None:
        record = ObjectRecord(key, nbytes)
        if self._checksums:
            record = ObjectRecord(key, nbytes, bytes(CHECKSUM_BYTES * record.blocks))
        with self._lock:
            self._records[key] = record
