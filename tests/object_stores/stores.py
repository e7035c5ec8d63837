"""The object stores of the tests: services on this machine, with settings for clients and proxies."""

from __future__ import annotations

import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias
from xml.etree import ElementTree

from ckptcore_testing import ProxiedRequest, StoreDialect

import ckptcore
from ckptcore.model import JSON

LAYOUTS: Final = ("safetensors", "dcp", "ocdbt", "zarr3", "zarr")
"""Every layout that saves."""

_TRIES: Final[Mapping[str, JSON]] = {"part_bytes": 5 << 20, "retries": 8, "first_wait": 0.005}
"""Options with which a client retries quickly and uploads small objects in parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStore:
    """A running service.

    Attributes:
        scheme: the scheme of its URLs.
        upstream: the HTTP URL of the service.
        bucket: the URL of an empty bucket.
        dialect: properties of its protocol.
        config: returns the options of clients for an endpoint. Clients retry a few times.
        begin_upload: begins an upload in pieces to a URL, and abandons it.
        list_uploads: returns the keys of unfinished uploads below a URL.
    """

    scheme: str
    upstream: str
    bucket: str
    dialect: StoreDialect
    config: Callable[[str], Mapping[str, JSON]]
    begin_upload: Callable[[str], object]
    list_uploads: Callable[[str], Sequence[str]]

    def new_place(self, name: str) -> str:
        """Return a directory that does not exist."""
        return f"{self.bucket}/{name}-{uuid.uuid4().hex[:8]}"

    def options(self, url: str) -> Mapping[str, Mapping[str, JSON]]:
        """Return the options of a `Context` for the service at this URL, which may be the URL of a proxy."""
        return {self.scheme: self.config(url)}

    @property
    def direct(self) -> ckptcore.Context:
        """Return a Context that connects to the service without a proxy."""
        return ckptcore.Context(storage=self.options(self.upstream), io=ckptcore.context.IOOptions(threads=2))


Headers: TypeAlias = Callable[[str, str], Mapping[str, str]]
"""Returns the headers of a request, for its method and URL."""


class _Uploads:
    """Multipart uploads with the protocol of S3, which GCS also supports."""

    def __init__(self, bucket_url: str, place: str, headers: Headers) -> None:
        self._bucket_url = bucket_url
        self._place = place + "/"
        self._headers = headers

    def begin(self, url: str) -> None:
        """See `ObjectStore`."""
        self._ask("POST", f"/{urllib.parse.quote(url.removeprefix(self._place))}?uploads")

    def list(self, url: str) -> Sequence[str]:
        """See `ObjectStore`."""
        prefix = urllib.parse.quote(url.removeprefix(self._place), safe="")
        root = ElementTree.fromstring(self._ask("GET", f"?uploads&prefix={prefix}"))
        return [str(key.text) for key in root.iterfind(".//{*}Upload/{*}Key")]

    def _ask(self, method: str, path: str) -> bytes:
        url = self._bucket_url + path
        request = urllib.request.Request(url, method=method, headers=dict(self._headers(method, url)))
        with urllib.request.urlopen(request) as answer:
            body: bytes = answer.read()
        return body


def _signed(options: Mapping[str, JSON]) -> Headers:
    """Return a function for headers with the S3 signature, which some servers require."""
    from botocore.auth import S3SigV4Auth  # type: ignore[import-untyped]  # botocore has no types
    from botocore.awsrequest import AWSRequest  # type: ignore[import-untyped]
    from botocore.credentials import Credentials  # type: ignore[import-untyped]

    credentials = Credentials(str(options["access_key_id"]), str(options["secret_access_key"]))

    def headers(method: str, url: str) -> Mapping[str, str]:
        request = AWSRequest(method=method, url=url)
        S3SigV4Auth(credentials, "s3", str(options["region"])).add_auth(request)
        return dict(request.headers.items())

    return headers


def _unsigned(method: str, url: str) -> Mapping[str, str]:
    return {}


@contextmanager
def _s3(directory: Path) -> Iterator[ObjectStore]:
    from ckptcore_s3.testing import DIALECT, s3_server

    with s3_server(directory) as server:
        bucket = server.create_bucket()
        yield _store("s3", server.server.url, bucket, DIALECT, server.options, _signed(server.options))


@contextmanager
def _gs(directory: Path) -> Iterator[ObjectStore]:
    from ckptcore_testing.gcs_servers import DIALECT, gcs_server

    with gcs_server(directory) as server:
        bucket = server.create_bucket()
        yield _store("gs", server.server.url, bucket, DIALECT, server.options, _unsigned)


@contextmanager
def _az(directory: Path) -> Iterator[ObjectStore]:
    from ckptcore_azure.containers import AzureContainer, list_blobs
    from ckptcore_azure.service import AzureService
    from ckptcore_azure.settings import settings_of
    from ckptcore_azure.testing import DIALECT, azurite

    with azurite(directory) as server:
        name = server.create_bucket()
        container, place = AzureContainer(AzureService(settings_of(name, server.options))), f"az://{name}/"

        def begin(url: str) -> None:
            container.begin_upload(url.removeprefix(place), if_absent=False).put_part(1, b"of a dead save")

        def uncommitted(url: str) -> Sequence[str]:
            prefix = url.removeprefix(place)
            keys = {key for page in list_blobs(container, prefix, uncommitted=True) for key in page.keys}
            return sorted(keys.difference(*[page.keys for page in list_blobs(container, prefix)]))

        yield ObjectStore(
            scheme="az",
            upstream=server.server.url,
            bucket=f"az://{name}",
            dialect=DIALECT,
            config=lambda url: {**server.options, "endpoint": f"{url}/{server.options['account_name']}", **_TRIES},
            begin_upload=begin,
            list_uploads=uncommitted,
        )


def _store(
    scheme: str, upstream: str, bucket: str, dialect: StoreDialect, options: Mapping[str, JSON], headers: Headers
) -> ObjectStore:
    uploads = _Uploads(f"{upstream}/{bucket}", f"{scheme}://{bucket}", headers)
    return ObjectStore(
        scheme=scheme,
        upstream=upstream,
        bucket=f"{scheme}://{bucket}",
        dialect=dialect,
        config=lambda url: {**options, "endpoint": url, **_TRIES},
        begin_upload=uploads.begin,
        list_uploads=uploads.list,
    )


STORES: Final[Mapping[str, Callable[[Path], AbstractContextManager[ObjectStore]]]] = {"az": _az, "gs": _gs, "s3": _s3}
"""By scheme: a function of a working directory that returns a context manager of the running service."""


def may_come_late(request: ProxiedRequest) -> bool:
    """Return True if the store may receive this request again later without data loss.

    A late deletion may lose a later save. Not every store has conditional deletions: see
    docs/design/commits-on-object-stores.md.
    """
    deletes = request.method == "DELETE" or "delete" in request.query or request.path.startswith("/batch/")
    deletes = deletes or request.query.get("comp") == "batch"
    return not deletes
