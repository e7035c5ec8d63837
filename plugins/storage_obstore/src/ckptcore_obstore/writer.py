"""Writers: an object in pieces, whose parts are uploaded while later ones are still written."""

from __future__ import annotations

import logging
import threading
from typing import Final

import numpy as np
import numpy.typing as npt

from ckptcore.errors import StorageError
from ckptcore.protocols import IF_ABSENT, Buffer
from ckptcore_obstore.buckets import Bucket
from ckptcore_obstore.failures import RequestFailed
from ckptcore_obstore.part_sizes import Part, PartSizes
from ckptcore_obstore.translating import telling
from ckptcore_obstore.uploads import PartUpload

__all__ = ["PartWriter"]

_LOG: Final = logging.getLogger("ckptcore.storage")


class _Filling:
    """A part that is not whole yet."""

    __slots__ = ("data", "filled")

    def __init__(self, size: int) -> None:
        self.data: npt.NDArray[np.uint8] = np.empty(size, np.uint8)
        self.filled = 0


class PartWriter:
    """Writes one object. Any thread.

    A piece that covers a part is uploaded from where it lies, by the thread that writes it, while others write on. Other pieces
    are copied into parts, and the thread that fills one uploads it: what is held are the parts that have a part of their
    bytes. An object that fits one part is put by one request.
    """

    def __init__(self, bucket: Bucket, key: str, size: int | None, *, only_new: bool) -> None:
        """Begin nothing yet.

        Args:
            bucket, key: of the object.
            size: in bytes, where it is known.
            only_new: fail at the end where there is an object by then.
        """
        self._bucket = bucket
        self._key = key
        self._size = size
        self._only_new = only_new
        self._sizes = PartSizes(size, bucket.service.tuning.part_bytes)
        self._lock = threading.Lock()
        self._upload_lock = threading.Lock()
        self._parts: dict[int, _Filling] = {}
        self._tags: dict[int, str] = {}
        self._upload: PartUpload | None = None
        self._written = 0
        self._end = 0
        self._done = False
        self._url = f"{bucket.service.url}/{key}"

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that hold parts which are not whole yet."""
        with self._lock:
            return sum([part.data.nbytes for part in self._parts.values()])

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write bytes at an offset; the memory can be reused when this returns.

        Raises:
            ValueError: outside the object's size, or after `finish` or `abort`.
            StorageError
        """
        stop = offset + len(data)
        if offset < 0 or (self._size is not None and stop > self._size):
            raise ValueError(f"cannot write bytes {offset} to {stop} of {self._url}: it has {self._size}")
        if self._done:
            raise ValueError(f"{self._url} is complete or given up; nothing more can be written")
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
        """Upload what is left, and make the object of its parts.

        Raises:
            ConditionFailedError: if an object is there and only a new one was to be written.
            StorageError: also if bytes are missing.
            ValueError: after `finish` or `abort`.
        """
        if self._done:
            raise ValueError(f"{self._url} is complete or given up already")
        size = self._end if self._size is None else self._size
        if self._written != size:
            raise StorageError(
                f"cannot complete {self._url}: expected {size} bytes, found {self._written} written. Save again"
            )
        if self._upload is None and len(self._parts) <= 1:
            part = self._parts.get(1)
            data = b"" if part is None else part.data[:size].data
            with telling(self._bucket.service, f"write {self._url}"):
                self._bucket.put(self._key, data, IF_ABSENT if self._only_new else None)
        else:
            for number in sorted(self._parts):
                self._put_part(number, self._parts[number].data[: self._parts[number].filled].data)
                del self._parts[number]  # it is there when this is called again
            upload = self._begun()
            with telling(self._bucket.service, f"complete {self._url}"):
                upload.complete(self._tags, if_absent=self._only_new)
        self._done = True
        self._parts.clear()

    def abort(self) -> None:
        """Give up: nothing is left of it at the service, unless that cannot be reached."""
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
                # Nobody can do anything about it here: the next save at this place gives up what is left.
                _LOG.info("an upload to %s is left over: %s", self._url, error)

    def _fill(self, part: Part, start: int, piece: memoryview) -> memoryview | None:
        """Copy bytes into a part; the part if it is whole now and to be uploaded."""
        size = part.stop - part.start
        with self._lock:
            filling = self._parts.get(part.number)
            if filling is None:
                filling = self._parts[part.number] = _Filling(size)
        # Without the lock: every byte is written once, so no two threads copy to one place.
        filling.data[start : start + len(piece)] = np.frombuffer(piece, np.uint8)
        with self._lock:
            filling.filled += len(piece)
            if filling.filled < size or self._sizes.is_one:
                return None
            del self._parts[part.number]
        return filling.data.data

    def _put_part(self, number: int, data: Buffer) -> None:
        upload = self._begun()
        with telling(self._bucket.service, f"write {self._url}"):
            self._tags[number] = upload.put_part(number, data)

    def _begun(self) -> PartUpload:
        with self._upload_lock:
            if self._upload is None:
                if self._done:
                    raise ValueError(f"{self._url} is given up; nothing more can be written")
                with telling(self._bucket.service, f"begin to write {self._url}"):
                    self._upload = self._bucket.begin_upload(self._key, if_absent=self._only_new)
            return self._upload
