"""The object stores that are tried: a service on this machine, and what clients and proxies have to know of it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import ckptcore
from ckptcore.model import JSON
from ckptcore.testing import ProxiedRequest, StoreDialect

__all__ = ["LAYOUTS", "STORES", "ObjectStore", "may_come_late"]

LAYOUTS: Final = ("safetensors", "dcp", "ocdbt", "zarr3", "zarr")
"""Every layout that saves."""

_TRIES: Final[Mapping[str, JSON]] = {"part_bytes": 5 << 20, "retries": 8, "first_wait": 0.005}
"""Options that let a client try again at once, and upload small objects in parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStore:
    """A service that runs.

    Attributes:
        scheme: of its URLs.
        upstream: its URL over HTTP.
        bucket: a URL below which there is nothing.
        dialect: how it speaks.
        config: given where it is reached, the options by which clients do; they try again a few times.
        begin_upload: begins an upload in pieces to a URL, and forgets it.
        list_uploads: the keys of uploads below a URL that are not finished.
    """

    scheme: str
    upstream: str
    bucket: str
    dialect: StoreDialect
    config: Callable[[str], Mapping[str, JSON]]
    begin_upload: Callable[[str], object]
    list_uploads: Callable[[str], Sequence[str]]

    def new_place(self, name: str) -> str:
        """A directory at which nothing stands."""
        return f"{self.bucket}/{name}-{uuid.uuid4().hex[:8]}"

    def options(self, url: str) -> Mapping[str, Mapping[str, JSON]]:
        """What a `Context` takes to find the service at this URL: its own, or a proxy's."""
        return {self.scheme: self.config(url)}

    @property
    def direct(self) -> ckptcore.Context:
        """A context that reaches it with nothing between."""
        return ckptcore.Context(storage=self.options(self.upstream), threads=2)


@contextmanager
def _s3(directory: Path) -> Iterator[ObjectStore]:
    import boto3  # type: ignore[import-untyped]  # it has no types of its own
    from ckptcore_s3.testing import DIALECT, s3_server

    with s3_server(directory) as server:
        bucket = server.create_bucket()
        client = boto3.client(
            "s3",
            endpoint_url=server.server.url,
            region_name="us-east-1",
            aws_access_key_id=server.options["access_key_id"],
            aws_secret_access_key=server.options["secret_access_key"],
        )

        def key(url: str) -> str:
            return url.removeprefix(f"s3://{bucket}/")

        def list_uploads(url: str) -> Sequence[str]:
            listed = client.list_multipart_uploads(Bucket=bucket, Prefix=key(url))
            return [upload["Key"] for upload in listed.get("Uploads", [])]

        try:
            yield ObjectStore(
                scheme="s3",
                upstream=server.server.url,
                bucket=f"s3://{bucket}",
                dialect=DIALECT,
                config=lambda url: {**server.options, "endpoint": url, **_TRIES},
                begin_upload=lambda url: client.create_multipart_upload(Bucket=bucket, Key=key(url)),
                list_uploads=list_uploads,
            )
        finally:
            client.close()


STORES: Final[Mapping[str, Callable[[Path], AbstractContextManager[ObjectStore]]]] = {"s3": _s3}
"""By scheme: given a directory for what it needs, runs it for a while."""


def may_come_late(request: ProxiedRequest) -> bool:
    """Whether nothing is lost if the store gets a request once more, later. It is if a deletion comes after what was saved since.

    No store makes deletions conditional for every client. That window is written of in docs/design.
    """
    deletes = request.method == "DELETE" or "delete" in request.query or request.path.startswith("/batch/")
    return not deletes
