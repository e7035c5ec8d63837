"""Opening of a storage from a URL and options."""

from __future__ import annotations

import json
import os
from typing import Final

import fsspec  # type: ignore[import-untyped]  # it has no types
import fsspec.asyn  # type: ignore[import-untyped]

from ckptcore.errors import InvalidLocationError
from ckptcore.protocols import StorageBackend, StorageOptions
from ckptcore.redaction import redacted_location
from ckptcore_fsspec.file_systems import PREFIX, Connection
from ckptcore_fsspec.storage import FsspecStorage, ReadOnlyStorage
from ckptcore_fsspec.web import WebStorage

_WEB: Final = ("http", "https")

_READ_ONLY: Final = ("data", "git", "github", "gist", "hf")
"""File systems that are read-only, or that create a new version of the whole repository for each written object."""


def _reset_after_fork() -> None:
    fsspec.asyn.loop[0] = fsspec.asyn.iothread[0] = None
    fsspec.asyn.reset_lock()


if not hasattr(fsspec.asyn, "reset_after_fork"):
    # Before version 2025.5 of fsspec, a forked child would wait forever for a thread of its parent.
    os.register_at_fork(after_in_child=_reset_after_fork)


def opens(scheme: str) -> bool:
    """Return True if fsspec knows a scheme. The package that it needs for the scheme may be missing."""
    return scheme.removeprefix(PREFIX) in fsspec.available_protocols()


def open_url(url: str, options: StorageOptions) -> StorageBackend:
    """Open a directory with fsspec, without a request.

    Args:
        url: ``SCHEME://...`` or ``fsspec+SCHEME://...``. The rest has fsspec's form, without
            escapes except on the web.
        options: options of the storage. Their `config` contains fsspec's ``storage_options``.

    Raises:
        InvalidLocationError: if the URL is invalid, or the options are not JSON.
        UnknownPluginError: if a package for the scheme is not installed.
    """
    scheme, separator, _ = url.partition("://")
    protocol = scheme.lower().removeprefix(PREFIX)
    if not separator or "::" in url:
        raise InvalidLocationError(
            f"cannot open {redacted_location(url)!r}: expected a URL such as {PREFIX}memory://directory; chained "
            "URLs with '::' are not supported"
        )
    try:
        json.dumps(dict(options.config))
    except (TypeError, ValueError) as error:
        raise InvalidLocationError(f"the options of {scheme}:// are not JSON: {error}") from error
    connection = Connection(url, options.config)
    if protocol in _WEB:
        return WebStorage(connection, url)
    if protocol in _READ_ONLY:
        return ReadOnlyStorage(connection, url)
    return FsspecStorage(connection, url)
