"""Locations: a path or URL of a user as a storage and a name in it."""

from __future__ import annotations

import functools
import os
import re
import urllib.parse
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from ckptcore.builtin.local_calls import real_path
from ckptcore.commit.method import CommitMethod
from ckptcore.commit.rename import RenameMethod
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.errors import InvalidLocationError, ObjectNotFoundError
from ckptcore.model.tree import JSON
from ckptcore.plugins import Plugins, expect_inherits
from ckptcore.protocols import AtomicDirectories, StorageBackend, StorageOptions
from ckptcore.redaction import redacted

__all__ = [
    "IndirectPlace",
    "Location",
    "LocationAddress",
    "LocationLike",
    "Place",
    "Within",
    "absolute_location",
    "commit_method",
    "open_address",
    "open_directory",
    "resolve_location",
]

LocationLike: TypeAlias = str | os.PathLike[str]
"""A path, or a URL such as ``memory://name/step_1``."""

_URL: Final = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://(.*)", re.DOTALL)

_BROKEN_URL: Final = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+):/(.*)", re.DOTALL)
"""A URL that went through `pathlib.Path`. As a path it would begin with a directory whose name ends with a colon."""


@dataclass(frozen=True, slots=True)
class Within:
    """A directory within a location.

    Attributes:
        location: a path or URL, or a directory within one.
        directory: a relative key.
    """

    location: Place
    directory: str

    def __str__(self) -> str:
        around = self.location if isinstance(self.location, Within | IndirectPlace) else os.fspath(self.location)
        return f"{redacted(str(around)).rstrip('/')}/{self.directory}"


class IndirectPlace(ABC):
    """A checkpoint that has its own storage, such as one that falls back to a copy."""

    @property
    @abstractmethod
    def place(self) -> Within:
        """The directory of the checkpoint."""

    @abstractmethod
    def resolve(self, plugins: Plugins, *, durable: bool, config: Mapping[str, Mapping[str, JSON]]) -> Location:
        """Open it; see `resolve_location`."""

    def __str__(self) -> str:
        return str(self.place)


Place: TypeAlias = LocationLike | Within | IndirectPlace
"""A path or URL, a directory within one, or an object that resolves itself."""


@dataclass(frozen=True, slots=True)
class LocationAddress:
    """A location that can be sent to another process; it has no open storage.

    Attributes:
        display: the location as the user knows it, without secrets.
        scheme: the scheme of the storage.
        parent: the address that the storage opens: an absolute path, or the whole URL.
        name: the name of the checkpoint in it.
    """

    display: str
    scheme: str
    parent: str
    name: str


@dataclass(frozen=True, slots=True)
class Location:
    """The location of a checkpoint, which may not exist.

    Attributes:
        display: the location as the user knows it, without secrets.
        parent: the storage, opened at the directory around the checkpoint.
        name: the name of the checkpoint in it, without ``/``.
        identity: equal for two spellings of one location, as far as they can be recognised.
        of_host: True if it is on a disk of one host of a job, and may have copies for that host.
    """

    display: str
    parent: StorageBackend
    name: str
    identity: str = ""
    of_host: bool = False

    @property
    def store(self) -> StorageBackend:
        """The storage, opened at the checkpoint."""
        return subdirectory(self.parent, self.name)

    @property
    def commits(self) -> CommitMethod:
        """The commit method of the directory around the checkpoint."""
        return commit_method(self.parent)

    @property
    def absolute(self) -> str:
        """The location from any working directory: a local path without links, or a URL."""
        return self.identity.partition(":")[2] or self.display

    @property
    def parent_name(self) -> str:
        """The name of the directory around the checkpoint; empty if it is unknown."""
        return self.identity.rpartition("/")[0].rpartition("/")[2]

    def lies_in(self, other: Location) -> bool:
        """Return True if it is another location or inside it, as far as that can be recognised."""
        return f"{self.identity}/".startswith(f"{other.identity}/")

    @property
    def to_open(self) -> LocationAddress:
        """The address, for another process."""
        scheme, _, within = self.identity.partition(":")
        return LocationAddress(self.display, scheme, within.removesuffix(f"/{self.name}"), self.name)

    @property
    def is_object(self) -> bool:
        """True if the location is one object (file), and no directory."""
        try:
            self.parent.size(self.name)
        except ObjectNotFoundError:
            return False
        return True


def commit_method(directory: StorageBackend) -> CommitMethod:
    """Return the commit method of a directory of checkpoints.

    Args:
        directory: a storage, opened at the directory.
    """
    return _method_of(type(directory))(directory)


@functools.lru_cache(maxsize=64)
def _method_of(kind: type[StorageBackend]) -> type[CommitMethod]:
    """Return the commit method of a type of storage. Cached: the check is slow."""
    if issubclass(kind, AtomicDirectories):
        return RenameMethod
    from ckptcore.commit.conditional_put import ConditionalPutMethod  # only object stores need it

    return ConditionalPutMethod


def _open_storage(plugins: Plugins, scheme: str, url: str, options: StorageOptions) -> StorageBackend:
    storage = plugins.storage(scheme)(url, options)
    expect_inherits(type(storage), StorageBackend)
    return storage


def resolve_location(
    location: Place, plugins: Plugins, *, durable: bool, config: Mapping[str, Mapping[str, JSON]]
) -> Location:
    """Open the directory that a location is in.

    Args:
        location: a path or URL, or a directory within one.
        plugins: find the storage by scheme.
        durable: True if writes must survive a loss of power.
        config: options of storages, by scheme.

    Raises:
        InvalidLocationError: it is neither, or cannot be a checkpoint.
        UnknownPluginError: no plugin opens such a URL.
    """
    if isinstance(location, IndirectPlace):
        return location.resolve(plugins, durable=durable, config=config)
    if isinstance(location, Within):
        return _within(location, plugins, durable, config)
    scheme, address = _address(location)
    options = StorageOptions(durable=durable, config=config.get(scheme, {}))
    if scheme == "file":
        # The address has no links: renaming must replace the target of a link, not the link.
        parent, name = os.path.split(address)
    else:
        parent, _, name = address.rpartition("/")
    text = os.fspath(location)
    if not name or name in (".", "..") or parent.endswith(":/"):
        raise InvalidLocationError(
            f"{text!r} names the root of a storage; a checkpoint needs a directory of its own below it"
        )
    return Location(redacted(text), _open_storage(plugins, scheme, parent, options), name, f"{scheme}:{parent}/{name}")


def _within(place: Within, plugins: Plugins, durable: bool, config: Mapping[str, Mapping[str, JSON]]) -> Location:
    if isinstance(place.location, IndirectPlace):
        around = resolve_location(place.location, plugins, durable=durable, config=config)
        identity = f"{around.identity}/{place.directory}"
        return Location(str(place), around.store, place.directory, identity, of_host=around.of_host)
    scheme, address = _address(place.location)
    options = StorageOptions(durable=durable, config=config.get(scheme, {}))
    store = _open_storage(plugins, scheme, address, options)
    return Location(str(place), store, place.directory, f"{scheme}:{address}/{place.directory}")


def open_address(
    address: LocationAddress, plugins: Plugins, *, durable: bool, config: Mapping[str, Mapping[str, JSON]]
) -> Location:
    """Open a location that another process resolved.

    Args:
        address: the address of the location.
        plugins, durable, config: as for `resolve_location`.

    Raises:
        UnknownPluginError: no plugin here opens such a URL.
    """
    options = StorageOptions(durable=durable, config=config.get(address.scheme, {}))
    store = _open_storage(plugins, address.scheme, address.parent, options)
    return Location(address.display, store, address.name, f"{address.scheme}:{address.parent}/{address.name}")


def absolute_location(location: LocationLike) -> str:
    """Return a location from any working directory: a local path without links, or the URL.

    Raises:
        InvalidLocationError: it is neither a path nor a URL.
    """
    return _address(location)[1]


def open_directory(
    directory: LocationLike, plugins: Plugins, *, durable: bool, config: Mapping[str, Mapping[str, JSON]]
) -> StorageBackend:
    """Open a directory of checkpoints.

    Args:
        directory: a path or URL; may be the root of a storage.
        plugins, durable, config: as for `resolve_location`.

    Raises:
        InvalidLocationError: it is neither.
        UnknownPluginError: no plugin opens such a URL.
    """
    return _within(Within(directory, "-"), plugins, durable, config).parent


def _address(location: Place) -> tuple[str, str]:
    """Return the scheme of a location and the address that its storage opens.

    Raises:
        InvalidLocationError: it is neither a path nor a URL.
    """
    if isinstance(location, IndirectPlace):
        return _address(location.place)
    if isinstance(location, Within):
        scheme, address = _address(location.location)
        return scheme, f"{address.rstrip('/')}/{location.directory}"
    try:
        text = os.fspath(location)
    except TypeError as error:
        raise InvalidLocationError(
            f"expected a path or a URL as the location, found an object of type {type(location).__name__}; "
            "the location is the first argument, and the state the second"
        ) from error
    if not isinstance(text, str) or not text or "\0" in text:
        raise InvalidLocationError(f"{text!r} is no location; give a path or a URL such as 'memory://name/step_1'")
    matched = _URL.fullmatch(text)
    if matched is None and (broken := _BROKEN_URL.fullmatch(text)) is not None:
        raise InvalidLocationError(
            f"{text!r} is a URL with one slash, as pathlib.Path makes it; give '{broken[1]}://{broken[2]}' as a str, "
            "or the absolute path of a local directory that has this name"
        )
    scheme = matched[1].lower() if matched else "file"
    if scheme == "file":
        return scheme, real_path(_local_path(text) if matched else text)
    return scheme, text.rstrip("/")


def _local_path(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
        raise InvalidLocationError(f"{url!r} is no local file; write file:///path, with ? and # as %3F and %23")
    return urllib.parse.unquote(parts.path)
