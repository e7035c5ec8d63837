"""A bucket that the tests of a process share, on a server which is started with the first location."""

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

__all__ = ["BucketServer", "SharedBucket"]


class BucketServer(Protocol):
    """A server that speaks the protocol of an object store."""

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables by which programs use it."""
        ...

    def create_bucket(self, name: str = "") -> str:
        """Create a bucket; its name, a new one where none is given."""
        ...


class SharedBucket:
    """A bucket on a server that ends with this process. Any thread."""

    def __init__(self, scheme: str, serve: Callable[[Path], AbstractContextManager[BucketServer]]) -> None:
        """Start nothing yet.

        Args:
            scheme: of its URLs.
            serve: given an empty directory, runs the server while what it returns is entered.
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
                # Not among those of pytest, whose names are too long for sockets.
                directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ckptcore-")))
                server = stack.enter_context(self._serve(directory))
                self._found = server, server.create_bucket()
            return self._found

    @contextmanager
    def open(self, directory: Path) -> Iterator[str]:
        """A location of its own, found by the variables of the environment: `StorageSample.open`."""
        server, bucket = self._bucket()
        with pytest.MonkeyPatch.context() as patch:
            for name, value in server.environment.items():
                patch.setenv(name, value)
            yield f"{self._scheme}://{bucket}/{uuid.uuid4().hex}/checkpoint"
