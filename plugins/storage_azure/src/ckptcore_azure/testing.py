"""Azurite for tests: Microsoft's emulator, a program for Node.js. The first location of `SAMPLE` starts it."""

from __future__ import annotations

import os
import shutil
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
from ckptcore_testing import HTTPAnswer, StorageSample, StoreDialect
from ckptcore_testing.servers import Server, ServerCommand, serve
from ckptcore_testing.shared_buckets import SharedBucket

from ckptcore.model import JSON
from ckptcore_azure.containers import AzureRequests
from ckptcore_azure.service import AzureService
from ckptcore_azure.settings import EMULATOR_ACCOUNT, EMULATOR_KEY, settings_of

_PROGRAM: Final = "azurite-blob"
_INSTALLED: Final = Path(sys.prefix, "azurite", "node_modules", ".bin")
"""The directory into which `make azurite` installs Azurite."""

DIALECT: Final = StoreDialect(
    is_list=lambda request: request.method == "GET" and request.query.get("comp") == "list",
    throttled=HTTPAnswer.make(
        503,
        "Server Busy",
        "application/xml",
        b'\xef\xbb\xbf<?xml version="1.0" encoding="utf-8"?><Error><Code>ServerBusy</Code><Message>The server is busy.'
        b"</Message></Error>",
    ),
)
"""List requests and throttling answers of Azure.

See https://learn.microsoft.com/rest/api/storageservices/blob-service-error-codes.
"""


@dataclass(frozen=True, slots=True)
class Azurite:
    """A running Azurite.

    Attributes:
        server: the process.
    """

    server: Server

    @property
    def endpoint(self) -> str:
        """URL of the account's blob service."""
        return f"{self.server.url}/{EMULATOR_ACCOUNT}"

    @property
    def options(self) -> Mapping[str, JSON]:
        """Options of ``Context(storage={"az": ...})`` for this server."""
        return {"account_name": EMULATOR_ACCOUNT, "account_key": EMULATOR_KEY, "endpoint": self.endpoint}

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables for this server."""
        return {
            "AZURE_STORAGE_CONNECTION_STRING": f"DefaultEndpointsProtocol=http;AccountName={EMULATOR_ACCOUNT};"
            f"AccountKey={EMULATOR_KEY};BlobEndpoint={self.endpoint};"
        }

    def create_bucket(self, name: str = "") -> str:
        """Create a container, and return its name. The default is a new random name."""
        name = name or f"container-{uuid.uuid4().hex[:12]}"
        service = AzureService(settings_of(name, self.options))
        AzureRequests(service).send_to("PUT", service.bucket_url, query={"restype": "container"})
        return name


@contextmanager
def azurite(directory: Path) -> Iterator[Azurite]:
    """Run Azurite while the context is entered. Skip the test if Azurite is not installed.

    Args:
        directory: an existing directory for the log and the blobs.

    Raises:
        RuntimeError: if Azurite does not start.
    """
    program = shutil.which(_PROGRAM, path=os.pathsep.join([str(_INSTALLED), os.environ.get("PATH", os.defpath)]))
    if program is None:
        pytest.skip(f"{_PROGRAM} is not installed: run `make azurite`, which needs Node.js and npm")

    def command(port: int) -> ServerCommand:
        arguments = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(directory / f"blobs-{port}")]
        return ServerCommand(
            [
                program,
                *arguments,
                "--blobKeepAliveTimeout",
                "60",
                "--silent",
                "--disableTelemetry",
                "--skipApiVersionCheck",
            ],
            {},
        )

    with serve(command, directory) as server:
        yield Azurite(server)


SAMPLE: Final = StorageSample(
    scheme="az", open=SharedBucket("az", azurite).open, costly=True, aliases=("abfs", "abfss", "azure")
)
"""Azure on Azurite."""
