"""A URL and options, as a storage."""

from __future__ import annotations

import json
from typing import Final

import fsspec  # type: ignore[import-untyped]  # it has no types

from ckptcore.errors import InvalidLocationError
from ckptcore.protocols import StorageBackend, StorageOptions
from ckptcore_fsspec.file_systems import Connection
from ckptcore_fsspec.read_only import ReadOnlyStorage
from ckptcore_fsspec.storage import FsspecStorage
from ckptcore_fsspec.web import WebStorage

__all__ = ["PREFIX", "open_url", "opens"]

PREFIX: Final = "fsspec+"
"""Before a scheme: fsspec opens it, also where another plugin opens the scheme itself."""

_WEB: Final = ("http", "https")

_READ_ONLY: Final = ("data", "git", "github", "gist", "hf")
"""File systems that take nothing, or each object as a version of the whole."""


def opens(scheme: str) -> bool:
    """Whether fsspec knows what opens a scheme; it may need a package that is not installed."""
    return scheme.removeprefix(PREFIX) in fsspec.available_protocols()


def open_url(url: str, options: StorageOptions) -> StorageBackend:
    """Open a directory by fsspec; nothing is asked of the file system yet.

    Args:
        url: ``SCHEME://...`` or ``fsspec+SCHEME://...``; what follows is as fsspec has it, without escapes but on the web.
        options: its `config` holds the ``storage_options`` of fsspec.

    Raises:
        InvalidLocationError: the URL names no directory, or the options are no JSON.
        UnknownPluginError: what the scheme needs is not installed.
    """
    scheme, separator, rest = url.partition("://")
    protocol = scheme.lower().removeprefix(PREFIX)
    if not separator or "::" in url:
        raise InvalidLocationError(
            f"expected a URL such as {PREFIX}memory://directory, found {url!r}; URLs that are chained with '::' name single files"
        )
    try:
        json.dumps(dict(options.config))
    except (TypeError, ValueError) as error:
        raise InvalidLocationError(f"the options for {scheme}:// are no JSON: {error}") from error
    connection = Connection(protocol, f"{protocol}://{rest}", options.config)
    if protocol in _WEB:
        return WebStorage(connection, url)
    if protocol in _READ_ONLY:
        return ReadOnlyStorage(connection, url)
    return FsspecStorage(connection, url)
