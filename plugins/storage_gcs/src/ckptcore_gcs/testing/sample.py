"""The sample that puts GCS into the matrix of all storages: the strict server, started with the first location."""

from __future__ import annotations

import atexit
import os
import tempfile
import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from ckptcore.testing import StorageSample
from ckptcore_gcs.testing.servers import GcsServer, gcs_server

__all__ = ["SAMPLE"]


class _SharedServer:
    """A server that is started with the first location, and ends with this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: tuple[GcsServer, str] | None = None

    def _bucket(self) -> tuple[GcsServer, str]:
        with self._lock:
            if self._found is None:
                stack = ExitStack()
                atexit.register(stack.close)
                directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ckptcore-gcs-")))
                server = stack.enter_context(gcs_server(directory))
                self._found = server, server.create_bucket()
            return self._found

    @contextmanager
    def open(self, directory: Path) -> Iterator[str]:
        """A location of its own, found by the variables of the environment."""
        server, bucket = self._bucket()
        before = {name: os.environ.get(name) for name in server.environment}
        os.environ.update(server.environment)
        try:
            yield f"gs://{bucket}/{uuid.uuid4().hex}/checkpoint"
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


SAMPLE: Final = StorageSample(scheme="gs", open=_SharedServer().open, costly=True)
"""GCS on the strict server."""
