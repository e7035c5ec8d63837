"""S3 for tests: servers on this machine, and the sample that puts S3 into the matrix of all storages."""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from ckptcore_obstore.plain_requests import PlainRequests

from ckptcore.model import JSON
from ckptcore.testing import HTTPAnswer, StorageSample, StoreDialect
from ckptcore.testing.servers import Server, ServerCommand, serve
from ckptcore_s3.service import S3Service
from ckptcore_s3.settings import settings_of

__all__ = ["ACCESS_KEY_ID", "DIALECT", "SAMPLE", "SECRET_ACCESS_KEY", "S3Server", "s3_server"]

ACCESS_KEY_ID: Final = "testing"
SECRET_ACCESS_KEY: Final = "testing-secret"
"""What the servers take; they look at no signature."""

DIALECT: Final = StoreDialect(
    is_list=lambda request: request.method == "GET" and "list-type" in request.query,
    throttled=HTTPAnswer.make(
        503,
        "Slow Down",
        "application/xml",
        b'<?xml version="1.0" encoding="UTF-8"?>\n'
        b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>",
    ),
)
"""How S3 lists, and says that it has too much to do: https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html"""


@dataclass(frozen=True, slots=True)
class S3Server:
    """An S3 server of this machine.

    Attributes:
        server: the process.
    """

    server: Server

    @property
    def options(self) -> Mapping[str, JSON]:
        """What ``Context(storage={"s3": ...})`` takes to use it."""
        return {
            "endpoint": self.server.url,
            "region": "us-east-1",
            "access_key_id": ACCESS_KEY_ID,
            "secret_access_key": SECRET_ACCESS_KEY,
        }

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables by which programs use it."""
        return {
            "AWS_ENDPOINT_URL": self.server.url,
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": ACCESS_KEY_ID,
            "AWS_SECRET_ACCESS_KEY": SECRET_ACCESS_KEY,
        }

    def create_bucket(self, name: str = "") -> str:
        """Create a bucket; its name, a new one where none is given."""
        name = name or f"bucket-{uuid.uuid4().hex[:12]}"
        PlainRequests(S3Service(settings_of(name, self.options, {}))).send("PUT")
        return name


@contextmanager
def s3_server(directory: Path, kind: Literal["ministack", "moto"] = "ministack") -> Iterator[S3Server]:
    """Run a server while the context is entered.

    Args:
        directory: an existing one, for its log and, of MiniStack, for the objects, which survive it.
        kind: MiniStack, which writes objects to files, or moto, which keeps them in memory.
    """

    def command(port: int) -> ServerCommand:
        if kind == "moto":
            return ServerCommand([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], {})
        data = directory / "s3"
        data.mkdir(exist_ok=True)
        settings = {
            "BIND_HOST": "127.0.0.1",
            "GATEWAY_PORT": str(port),
            "S3_PERSIST": "1",
            "S3_DATA_DIR": str(data),
        }
        return ServerCommand([sys.executable, "-m", "ministack"], settings)

    with serve(command, directory) as server:
        yield S3Server(server)


class _SharedServer:
    """A server that is started with the first location, and ends with this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: tuple[S3Server, str] | None = None

    def _bucket(self) -> tuple[S3Server, str]:
        with self._lock:
            if self._found is None:
                stack = ExitStack()
                atexit.register(stack.close)
                directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ckptcore-s3-")))
                server = stack.enter_context(s3_server(directory))
                self._found = server, server.create_bucket()
            return self._found

    @contextmanager
    def open(self, directory: Path) -> Iterator[str]:
        """A location of its own, found by the variables of the environment."""
        server, bucket = self._bucket()
        before = {name: os.environ.get(name) for name in server.environment}
        os.environ.update(server.environment)
        try:
            yield f"s3://{bucket}/{uuid.uuid4().hex}/checkpoint"
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


SAMPLE: Final = StorageSample(scheme="s3", open=_SharedServer().open, costly=True)
"""S3 on MiniStack."""
