"""Writers of objects. They receive pieces, and upload parts meanwhile."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ckptcore.errors import StorageError
from ckptcore.events import logger_named
from ckptcore.protocols import IF_ABSENT, Buffer
from ckptcore_obstore.bucket_requests import converted_errors
from ckptcore_obstore.buckets import Bucket
from ckptcore_obstore.failures import RequestFailed
from ckptcore_obstore.uploads import MAX_PARTS, PendingUpload

_PARTS_PER_SIZE: Final = 1000
"""Number of parts of equal size in an object of unknown size.

After each thousand parts the part size doubles, because an object can have at most ten thousand parts.
"""


@dataclass(frozen=True, slots=True)
class Part:
    """Part of an object.

    Attributes:
        number: counted from 1.
        start, stop: byte range. If the size of the object is unknown, the last part may end
            earlier.
    """

    number: int
    start: int
    stop: int


class PartSizes:
    """Division of an object into parts."""

    def __init__(self, size: int | None, least: int) -> None:
        """Divide an object.

        Args:
            size: size in bytes; None if unknown.
            least: smallest part size in bytes. Larger part sizes are multiples of it.
        """
        self._size = size
        self._bytes = least * max(1, -(-(size or 0) // (MAX_PARTS * least)))

    @property
    def is_one(self) -> bool:
        """True if the object is known to fit in one part."""
        return self._size is not None and self._size <= self._bytes

    def at(self, position: int) -> Part:
        """Return the part that contains a byte."""
        size = self._bytes
        if self._size is not None:
            index = position // size
            return Part(index + 1, index * size, min((index + 1) * size, self._size))
        first, index = 0, 0
        while position >= first + size * _PARTS_PER_SIZE:
            first += size * _PARTS_PER_SIZE
            index += _PARTS_PER_SIZE
            size *= 2
        steps = (position - first) // size
        start = first + steps * size
        return Part(index + steps + 1, start, start + size)


_LOG: Final = logger_named("ckptcore.storage")


class _PartBuffer:
    """Buffer of an incomplete part."""

    __slots__ = ("data", "filled")

    def __init__(self, size: int) -> None:
        self.data: npt.NDArray[np.uint8] = np.empty(size, np.uint8)
        self.filled = 0


class PartWriter:
    """Writer of one object. Thread-safe.

    A piece that covers a whole part is uploaded directly from the caller's memory, by the calling
    thread. Other pieces are copied into part buffers, and the thread that completes a part uploads
    it. Only incomplete parts, and parts that are being uploaded, use memory. An object that fits in
    one part is put in one request.
    """

    def __init__(self, bucket: Bucket, key: str, size: int | None, *, only_new: bool) -> None:
        """Initialise without sending a request.

        Args:
            bucket, key: bucket and key of the object.
            size: size in bytes; None if unknown.
            only_new: fail in `finish` if the object exists.
        """
        self._bucket = bucket
        self._key = key
        self._size = size
        self._only_new = only_new
        self._sizes = PartSizes(size, bucket.service.tuning.part_bytes)
        self._lock = threading.Lock()
        self._upload_lock = threading.Lock()
        self._parts: dict[int, _PartBuffer] = {}
        self._tags: dict[int, str] = {}
        self._upload: PendingUpload | None = None
        self._written = 0
        self._end = 0
        self._done = False
        self._url = f"{bucket.service.url}/{key}"

    @property
    def held_bytes(self) -> int:
        """Memory of incomplete parts, in bytes."""
        with self._lock:
            return sum([part.data.nbytes for part in self._parts.values()])

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write bytes at an offset. The memory can be reused afterwards.

        Raises:
            ValueError: if the range is outside the object's size, or after `finish` or `abort`.
            StorageError: if a part cannot be uploaded.
        """
        stop = offset + len(data)
        if offset < 0 or (self._size is not None and stop > self._size):
            raise ValueError(f"cannot write bytes {offset} to {stop} of {self._url}: its size is {self._size}")
        if self._done:
            raise ValueError(f"cannot write to {self._url}: the writer is finished or aborted")
        view = memoryview(data)
        position = offset
        while position < stop:
            part = self._sizes.at(position)
            end = min(stop, part.stop)
            piece = view[position - offset : end - offset]
            if (position, end) == (part.start, part.stop) and not self._sizes.is_one:
                self._put_part(part.number, piece)
            elif (filled := self._fill(part, position - part.start, piece)) is not None:
                self._put_part(part.number, filled)
            position = end
        with self._lock:
            self._written += len(data)
            self._end = max(self._end, stop)

    def finish(self) -> None:
        """Upload the remaining data, and create the object.

        Raises:
            ConditionFailedError: if the object exists but must be new.
            StorageError: if bytes are missing, or if a request fails.
            ValueError: after `finish` or `abort`.
        """
        if self._done:
            raise ValueError(f"cannot finish {self._url}: the writer is finished or aborted")
        size = self._end if self._size is None else self._size
        if self._written != size:
            raise StorageError(f"cannot complete {self._url}: {self._written} of {size} bytes were written")
        if self._upload is None and len(self._parts) <= 1:
            part = self._parts.get(1)
            data = b"" if part is None else part.data[:size].data
            with converted_errors(self._bucket.service, f"write {self._url}"):
                self._bucket.put(self._key, data, IF_ABSENT if self._only_new else None)
        else:
            for number in sorted(self._parts):
                self._put_part(number, self._parts[number].data[: self._parts[number].filled].data)
                del self._parts[number]  # do not upload it again if `finish` is called again
            upload = self._ensure_upload()
            with converted_errors(self._bucket.service, f"complete {self._url}"):
                upload.complete(self._tags, if_absent=self._only_new)
        self._done = True
        self._parts.clear()

    def abort(self) -> None:
        """Abort the upload. Nothing remains in the bucket, unless the request to abort it fails."""
        with self._upload_lock:
            upload, self._upload = self._upload, None
        if self._done:
            return
        self._done = True
        self._parts.clear()
        if upload is not None:
            try:
                upload.abort()
            except (RequestFailed, StorageError) as error:
                # The next save at this location aborts the upload.
                _LOG.info("cannot abort an upload to %s: %s", self._url, error)

    def _fill(self, part: Part, start: int, piece: memoryview) -> memoryview | None:
        """Copy bytes into a part. Return its data if it is now complete and must be uploaded."""
        size = part.stop - part.start
        with self._lock:
            buffer = self._parts.get(part.number)
            if buffer is None:
                buffer = self._parts[part.number] = _PartBuffer(size)
        # No lock is needed: every byte is written once, so the ranges of two threads never overlap.
        buffer.data[start : start + len(piece)] = np.frombuffer(piece, np.uint8)
        with self._lock:
            buffer.filled += len(piece)
            if buffer.filled < size or self._sizes.is_one:
                return None
            del self._parts[part.number]
        return buffer.data.data

    def _put_part(self, number: int, data: Buffer) -> None:
        upload = self._ensure_upload()
        with converted_errors(self._bucket.service, f"write {self._url}"):
            self._tags[number] = upload.put_part(number, data)

    def _ensure_upload(self) -> PendingUpload:
        with self._upload_lock:
            if self._upload is None:
                if self._done:
                    raise ValueError(f"cannot write to {self._url}: the writer is aborted")
                with converted_errors(self._bucket.service, f"begin an upload to {self._url}"):
                    self._upload = self._bucket.begin_upload(self._key, if_absent=self._only_new)
            return self._upload
