"""A bucket that all tests of a process share. Its server starts when the first location is opened."""

from __future__ import annotations

import atexit
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

import pytest


class BucketServer(Protocol):
    """A server of an object store."""

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables for this server."""
        ...

    def create_bucket(self, name: str = "") -> str:
        """Create a bucket with this name, by default a new unique name. Return the name."""
        ...


class SharedBucket:
    """A bucket on a server that stops with this process. Thread-safe."""

    def __init__(self, scheme: str, serve: Callable[[Path], AbstractContextManager[BucketServer]]) -> None:
        """Initialise without starting the server.

        Args:
            scheme: scheme of the bucket's URLs.
            serve: takes an empty directory, and returns a context manager that runs the server.
        """
        self._scheme = scheme
        self._serve = serve
        self._lock = threading.Lock()
        self._found: tuple[BucketServer, str] | None = None

    def _bucket(self) -> tuple[BucketServer, str]:
        with self._lock:
            if self._found is None:
                stack = ExitStack()
                atexit.register(stack.close)
                # Do not use a directory of pytest, because its path can be too long for a Unix socket.
                directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ckptcore-")))
                server = stack.enter_context(self._serve(directory))
                self._found = server, server.create_bucket()
            return self._found

    @contextmanager
    def open(self, directory: Path) -> Iterator[str]:
        """Yield a new location, and set the server's environment variables until the end of the context.

        See `StorageSample.open`. `directory` is not used.
        """
        server, bucket = self._bucket()
        with pytest.MonkeyPatch.context() as patch:
            for name, value in server.environment.items():
                patch.setenv(name, value)
            yield f"{self._scheme}://{bucket}/{uuid.uuid4().hex}/checkpoint"
