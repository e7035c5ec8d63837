"""S3 for tests: local servers (MiniStack, moto, a Ceph gateway), and samples for the matrix of all storages."""

from __future__ import annotations

import functools
import os
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias, get_args

from ckptcore_obstore.bucket_requests import PlainRequests
from ckptcore_testing import HTTPAnswer, StorageSample, StoreDialect
from ckptcore_testing.servers import Server, ServerCommand, serve
from ckptcore_testing.shared_buckets import SharedBucket

from ckptcore.model import JSON
from ckptcore_s3.service import S3Service
from ckptcore_s3.settings import settings_of
from ckptcore_s3.testing.ceph import serve_ceph

__all__ = ["ACCESS_KEY_ID", "DIALECT", "MOTO", "SAMPLE", "SECRET_ACCESS_KEY", "S3Server", "s3_server", "server_kind"]

ServerKind: TypeAlias = Literal["ministack", "moto", "ceph"]
"""Kinds of server that `s3_server` can run."""

_KINDS: Final[tuple[ServerKind, ...]] = get_args(ServerKind)
_VARIABLE: Final = "CKPTCORE_S3_SERVER"

ACCESS_KEY_ID: Final = "testing"
SECRET_ACCESS_KEY: Final = "testing-secret"
"""Credentials of the servers. Only Ceph checks signatures."""

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
"""List requests and throttling responses of S3.

See https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html.
"""


@dataclass(frozen=True, slots=True)
class S3Server:
    """A local S3 server.

    Attributes:
        server: the process.
    """

    server: Server

    @property
    def options(self) -> Mapping[str, JSON]:
        """Options of ``Context(storage={"s3": ...})`` for this server."""
        return {
            "endpoint": self.server.url,
            "region": "us-east-1",
            "access_key_id": ACCESS_KEY_ID,
            "secret_access_key": SECRET_ACCESS_KEY,
        }

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables for this server."""
        return {
            "AWS_ENDPOINT_URL": self.server.url,
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": ACCESS_KEY_ID,
            "AWS_SECRET_ACCESS_KEY": SECRET_ACCESS_KEY,
        }

    def create_bucket(self, name: str = "") -> str:
        """Create a bucket, and return its name. The default is a new random name."""
        name = name or f"bucket-{uuid.uuid4().hex[:12]}"
        PlainRequests(S3Service(settings_of(name, self.options))).send("PUT")
        return name


@contextmanager
def s3_server(directory: Path, kind: ServerKind | None = None) -> Iterator[S3Server]:
    """Run a server while the context is entered.

    Args:
        directory: an existing directory for the log and the objects. Ceph needs an empty directory.
            Only MiniStack keeps its objects when a new server starts in the same directory.
        kind: MiniStack stores objects in files; moto stores them in memory; Ceph checks signatures
            and takes half a minute to start. None for the kind in the variable ``CKPTCORE_S3_SERVER``, or MiniStack.

    Raises:
        RuntimeError: if the server does not start.
    """
    kind = kind or server_kind()
    serving: AbstractContextManager[Server]
    if kind == "ceph":
        serving = serve_ceph(directory, ACCESS_KEY_ID, SECRET_ACCESS_KEY)
    else:
        serving = serve(lambda port: _command(kind, directory, port), directory)
    with serving as server:
        yield S3Server(server)


def server_kind() -> ServerKind:
    """Return the kind of server in ``CKPTCORE_S3_SERVER``, or the default.

    Raises:
        ValueError: if the variable has an unknown kind.
    """
    named = os.environ.get(_VARIABLE, _KINDS[0])
    for kind in _KINDS:
        if kind == named:
            return kind
    raise ValueError(f"{_VARIABLE}={named!r}: expected one of {', '.join(_KINDS)}")


def _command(kind: ServerKind, directory: Path, port: int) -> ServerCommand:
    if kind == "moto":
        return ServerCommand([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], {})
    data = directory / "s3"
    data.mkdir(exist_ok=True)
    settings = {"BIND_HOST": "127.0.0.1", "GATEWAY_PORT": str(port), "S3_PERSIST": "1", "S3_DATA_DIR": str(data)}
    return ServerCommand([sys.executable, "-m", "ministack"], settings)


SAMPLE: Final = StorageSample(scheme="s3", open=SharedBucket("s3", s3_server).open, costly=True)
"""S3 on the default test server; see `s3_server`."""

MOTO: Final = StorageSample(
    scheme="s3", open=SharedBucket("s3", functools.partial(s3_server, kind="moto")).open, costly=True
)
"""S3 on moto, an independent implementation."""
