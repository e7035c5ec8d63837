"""Object stores on this machine, and their clients."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import fsspec  # type: ignore[import-untyped]  # it comes without types
import pytest
from ckptcore_s3.testing import S3Server
from ckptcore_testing.gcs_servers import gcs_server
from ckptcore_testing.servers import ServerCommand, serve
from obstore.store import GCSStore, S3Store

import ckptcore
from ckptcore.model import JSON

_BUCKET: Final = "bucket"


@dataclass(frozen=True, slots=True)
class ObjectService:
    """A running server with a bucket.

    Attributes:
        scheme: scheme of locations in the bucket.
        bucket: name of the bucket.
        url: URL of the server.
        options: options of ckptcore's storage for this server.
        store: the bucket as a store of obstore.
        files: the service as a file system of fsspec.
        library: the library of this file system.
    """

    scheme: str
    bucket: str
    url: str
    options: Mapping[str, JSON]
    store: Any
    files: Any
    library: str

    @property
    def context(self) -> ckptcore.Context:
        """A Context with the options of the server."""
        return ckptcore.Context(storage={self.scheme: dict(self.options)})


@contextmanager
def s3(directory: Path) -> Iterator[ObjectService]:
    """A small S3 in memory (`benchmarks.quick_s3`)."""
    script = str(Path(__file__).with_name("quick_s3.py"))
    with serve(lambda port: ServerCommand([sys.executable, script, str(port)], {}), directory) as server:
        s3_service = S3Server(server)
        store = S3Store(
            _BUCKET,
            endpoint=str(s3_service.options["endpoint"]),
            region=str(s3_service.options["region"]),
            access_key_id=str(s3_service.options["access_key_id"]),
            secret_access_key=str(s3_service.options["secret_access_key"]),
            client_options={"allow_http": True},
        )
        with _environment(s3_service.environment):
            files = fsspec.filesystem("s3", endpoint_url=server.url, skip_instance_cache=True)
            yield ObjectService("s3", _BUCKET, server.url, s3_service.options, store, files, "s3fs")


@contextmanager
def gs(directory: Path) -> Iterator[ObjectService]:
    """The strict GCS server of the tests, in memory."""
    # gcsfs reads this variable when it is imported. Otherwise it asks by gRPC for the kind of each bucket.
    with gcs_server(directory) as server, _environment({"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}):
        server.create_bucket(_BUCKET)
        url = server.server.url
        key = {"gcs_base_url": url, "disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
        store = GCSStore(_BUCKET, service_account_key=json.dumps(key), client_options={"allow_http": True})
        files = fsspec.filesystem("gs", token="anon", endpoint_url=url, skip_instance_cache=True)
        yield ObjectService("gs", _BUCKET, url, server.options, store, files, "gcsfs")


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield
