"""Streams over one object of a storage, for libraries that read and write files."""

from __future__ import annotations

import errno
import io
from types import TracebackType
from typing import Any, Final

from ckptcore.protocols import ObjectWriter, RangeReader

_BUFFER_BYTES: Final = 8 << 20
"""Smaller writes are buffered up to this size."""


class InputStream(io.RawIOBase):
    """A file that is open for reading ranges."""

    def __init__(self, reader: RangeReader, size: int) -> None:
        self._reader = reader
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}.get(whence)
        if start is None or start + offset < 0:
            raise OSError(errno.EINVAL, f"cannot seek to {offset} (whence={whence})")
        self._position = start + offset
        return self._position

    def readall(self) -> bytes:
        """Read the rest with one request."""
        data = bytearray(max(0, self._size - self._position))
        self.readinto(data)
        return bytes(data)

    def readinto(self, buffer: Any) -> int:
        if self.closed:
            raise ValueError("read of a closed file")
        target = memoryview(buffer).cast("B")
        nbytes = max(0, min(len(target), self._size - self._position))
        if nbytes:
            self._reader.get_into([(self._position, target[:nbytes])])
        self._position += nbytes
        return nbytes


class OutputStream(io.BufferedIOBase):
    """A file that is written from its beginning to its end. It exists once it is closed without an error."""

    def __init__(self, writer: ObjectWriter) -> None:
        self._writer: ObjectWriter | None = writer
        self._buffer = bytearray()
        self._offset = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._offset + len(self._buffer)

    def write(self, data: Any) -> int:
        if self._writer is None:
            raise ValueError("write to a closed file")
        view = memoryview(data)
        view = view.cast("B") if view.c_contiguous and view.nbytes else memoryview(view.tobytes())
        if len(self._buffer) + len(view) >= _BUFFER_BYTES:
            self.flush()
        if len(view) >= _BUFFER_BYTES:
            self._writer.write_at(self._offset, view)
            self._offset += len(view)
        else:
            self._buffer += view
        return len(view)

    def flush(self) -> None:
        if self._writer is not None and self._buffer:
            self._writer.write_at(self._offset, self._buffer)
            self._offset += len(self._buffer)
            self._buffer = bytearray()

    def close(self) -> None:
        """Complete the file. After an error the file does not exist, and closing again raises no second error."""
        if self._writer is not None:
            try:
                self.flush()
                self._writer.finish()
            except BaseException:
                self.abort()
                raise
            self._writer = None
        super().close()

    def abort(self) -> None:
        """Stop writing, so that the file will not exist."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.abort()
        super().close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Complete the file. After an error, do not create it."""
        if error is None:
            self.close()
        else:
            self.abort()

    def __del__(self) -> None:
        """Abort a file that was not closed."""
        self.abort()
