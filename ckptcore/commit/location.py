"""Locations: paths and URLs, resolved to a storage and a name in it. Also opens storages."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, TypeAlias

from ckptcore.builtin.local_calls import real_path
from ckptcore.commit.method import CommitMethod, StorageSupport
from ckptcore.commit.names import is_hidden_name
from ckptcore.commit.rename import RenameMethod
from ckptcore.commit.subdirectory import has_directories, subdirectory
from ckptcore.errors import InvalidLocationError, ObjectNotFoundError
from ckptcore.model.tree import JSON
from ckptcore.plugins import Plugins, expect_inherits
from ckptcore.protocols import (
    StorageBackend,
    StorageOptions,
)
from ckptcore.redaction import redacted_location

LocationLike: TypeAlias = str | os.PathLike[str]
"""A path, or a URL such as ``memory://name/step_1``."""

_URL: Final = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://(.*)", re.DOTALL)

_BROKEN_URL: Final = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+):/(.*)", re.DOTALL)
"""A URL that lost a slash in `pathlib.Path`. As a path it would begin with a directory named ``scheme:``."""

_ARCHIVE: Final = re.compile(r"!(?=/|$)")
"""The ``!`` that ends the name of an archive. The name of a file in the archive may follow."""

_VARIABLE: Final = re.compile(r"\$([A-Za-z_]\w*|\{[^}/]*\})")
"""A variable that should have been replaced by a shell or a configuration."""


class Storages(NamedTuple):
    """The options with which a Context opens storages.

    Attributes:
        plugins: find the storage of a URL scheme.
        config: options of storages, by scheme.
        is_durable: True if written data must survive a loss of power.
        support: remembers what each storage supports.
    """

    plugins: Plugins
    config: Mapping[str, Mapping[str, JSON]]
    is_durable: bool
    support: StorageSupport

    def open(self, scheme: str, address: str, to_write: bool) -> StorageBackend:
        """Open a storage at an address: an absolute path, or a whole URL.

        An address in an archive, such as ``/data/model.zip!/weights``, opens the archive. See `archive`.

        Raises:
            UnknownPluginError: no plugin supports the scheme.
        """
        for mark in reversed([*_ARCHIVE.finditer(address)]):  # innermost first: an archive may be in another archive
            if (archive := self.archive(scheme, address[: mark.start()], to_write)) is not None:
                _, _, name = address[: mark.end()].rpartition("/")
                return subdirectory(archive, f"{name}{address[mark.end() :]}")
        options = StorageOptions(durable=to_write and self.is_durable, config=self.config.get(scheme, {}))
        storage = self.plugins.storage(scheme)(address, options)
        expect_inherits(type(storage), StorageBackend)
        if self.support.without == "marker" and not has_directories(type(storage)):
            from ckptcore.commit.put_conditions import EmulatedConditionalPuts  # few object stores need it

            return EmulatedConditionalPuts(storage, address, self.support)
        return storage

    def archive(self, scheme: str, address: str, to_write: bool) -> StorageBackend | None:
        """Open a zip or tar file as a storage whose keys begin with ``NAME!/``. Return None if there is no file.

        Raises:
            InvalidLocationError: `to_write` is True.
            MissingDistributionError: the distribution that reads archives is not installed.
        """
        directory, _, name = address.rpartition("/")
        if not name or directory.endswith(":/"):
            return None
        storage = self.open(scheme, directory or "/", False)
        try:
            storage.size(name)
        except ObjectNotFoundError:
            return None
        if f"{name}!/" in storage.list_names():
            return None  # a directory whose name ends in "!"
        display = redacted_location(address)
        if to_write:
            raise InvalidLocationError(f"{display} is an archive, which is only read: save to a directory")
        from ckptcore.distributions import import_name  # only archives need it

        # `Any`, because the function is in a plugin of this project that may not be installed.
        open_archive: Any = import_name("open_archive", purpose=f"a location in the archive {display}")
        archive: StorageBackend = open_archive(storage, name, display)
        return archive


class IndirectLocation:
    """A location that resolves itself: a directory within another, or a checkpoint that falls back to a copy.

    Not an abstract class, because each opening asks four times whether its location is one, which is slow for these.
    """

    @property
    def path(self) -> SubPath:
        """The directory of the checkpoint."""
        raise NotImplementedError

    def resolve(self, storages: Storages, *, to_write: bool) -> Location:
        """Open it; see `resolve_location`."""
        raise NotImplementedError

    def __str__(self) -> str:
        return str(self.path)


@dataclass(frozen=True, slots=True)
class SubPath(IndirectLocation):
    """A directory within a location.

    Attributes:
        location: a path or URL, or a directory within one.
        directory: a relative key.
    """

    location: AnyLocation
    directory: str

    @property
    def path(self) -> SubPath:
        """See `IndirectLocation`."""
        return self

    def resolve(self, storages: Storages, *, to_write: bool) -> Location:
        """See `IndirectLocation`."""
        if isinstance(self.location, IndirectLocation) and not isinstance(self.location, SubPath):
            outer = resolve_location(self.location, storages, to_write=to_write).within(self.directory)
            return replace(outer, display=str(self))
        scheme, address = _address(self.location)
        return open_address(LocationAddress(str(self), scheme, address, self.directory), storages, to_write=to_write)

    def __str__(self) -> str:
        return f"{shown_location(self.location).rstrip('/')}/{self.directory}"


AnyLocation: TypeAlias = LocationLike | IndirectLocation
"""A path or URL, or an object that resolves itself, such as a directory within one."""


@dataclass(frozen=True, slots=True)
class LocationAddress:
    """A location that can be sent to another process; it has no open storage.

    Attributes:
        display: the location as users see it, by `shown_location`.
        scheme: the scheme of the storage.
        parent: the address of its parent directory: an absolute path, or the whole URL.
        name: the name of the checkpoint in the parent directory.
    """

    display: str
    scheme: str
    parent: str
    name: str


@dataclass(frozen=True, slots=True)
class Location:
    """The location of a checkpoint, which may not exist.

    Attributes:
        display: the location as users see it, by `shown_location`.
        parent: the storage, opened at the parent directory.
        name: the name of the checkpoint in the parent directory, without ``/``.
        identity: the normalized location. Spellings of one location have equal identities, if this can be recognised.
        of_host: True for a directory on a local disk of one host of a job. It may contain copies for that host.
        support: remembers what its storage supports.
        store: the storage, opened at the checkpoint.
    """

    display: str
    parent: StorageBackend
    name: str
    identity: str = ""
    of_host: bool = False
    support: StorageSupport = field(default_factory=StorageSupport, compare=False)
    store: StorageBackend = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "store", subdirectory(self.parent, self.name))

    def within(self, directory: str) -> Location:
        """Return the location of a directory in the checkpoint."""
        display = f"{self.display.rstrip('/')}/{directory}"
        identity = f"{self.identity}/{directory}"
        return replace(self, display=display, parent=self.store, name=directory, identity=identity)

    @property
    def commit_method(self) -> CommitMethod:
        """The commit method of the parent directory."""
        return commit_method(self.parent, self.support)

    @property
    def absolute(self) -> str:
        """The absolute location: a local path without links, or a URL."""
        return self.identity.partition(":")[2] or self.display

    @property
    def is_hidden(self) -> bool:
        """True for the hidden directory of a save."""
        return self.name.startswith(".") and is_hidden_name(self.name)

    @property
    def parent_name(self) -> str:
        """The name of the parent directory; empty if it is unknown."""
        return self.identity.rpartition("/")[0].rpartition("/")[2]

    def is_within(self, other: Location) -> bool:
        """Return True if this location is equal to another or inside it, as far as that can be recognised."""
        return f"{self.identity}/".startswith(f"{other.identity}/")

    @property
    def address(self) -> LocationAddress:
        """The address, to send to another process."""
        scheme, _, within = self.identity.partition(":")
        return LocationAddress(self.display, scheme, within.removesuffix(f"/{self.name}"), self.name)

    @property
    def is_object(self) -> bool:
        """True if the location is one object (file), not a directory."""
        try:
            self.parent.size(self.name)
        except ObjectNotFoundError:
            return False
        return True


def commit_method(directory: StorageBackend, support: StorageSupport | None = None) -> CommitMethod:
    """Return the commit method of a directory of checkpoints.

    Args:
        directory: a storage, opened at the directory.
        support: remembers what each storage supports; None: nothing is known yet.
    """
    if has_directories(type(directory)):
        return RenameMethod(directory, StorageSupport() if support is None else support)
    from ckptcore.commit.conditional_put import ConditionalPutMethod  # only object stores need it

    return ConditionalPutMethod(directory)


def resolve_location(location: AnyLocation, storages: Storages, *, to_write: bool = False) -> Location:
    """Open the parent directory of a location.

    Args:
        location: a path or URL, or an object that resolves itself.
        storages: how to open storages.
        to_write: True to write or delete a checkpoint.

    Raises:
        InvalidLocationError: it is neither a path nor a URL, or cannot be a checkpoint.
        UnknownPluginError: no plugin supports the scheme.
    """
    if isinstance(location, IndirectLocation):
        return location.resolve(storages, to_write=to_write)
    scheme, address = _address(location)
    if scheme == "file":
        # The address has no links: renaming must replace the target of a link, not the link.
        parent, name = os.path.split(address)
    else:
        parent, _, name = address.rpartition("/")
    text = os.fspath(location)
    if not name or name in (".", "..") or parent.endswith(":/"):
        raise InvalidLocationError(
            f"{redacted_location(text)!r} is the root of a storage; give a directory below it, because a checkpoint is "
            "a directory"
        )
    return open_address(LocationAddress(shown_location(text), scheme, parent, name), storages, to_write=to_write)


def open_address(address: LocationAddress, storages: Storages, *, to_write: bool = False) -> Location:
    """Open a location from its address, which may come from another process.

    Args:
        address: the address of the location.
        storages, to_write: as for `resolve_location`.

    Raises:
        UnknownPluginError: no plugin supports the scheme.
    """
    display, scheme, parent, name = address.display, address.scheme, address.parent, address.name
    store = storages.archive(scheme, f"{parent}/{name[:-1]}", to_write) if name[-1:] == "!" else None
    if store is None:
        store = storages.open(scheme, parent, to_write)
    identity = f"{scheme}:{parent}/{name}"
    return Location(display, store, name, identity, support=storages.support)


def absolute_location(location: LocationLike) -> str:
    """Return an absolute location: a local path without links, or the URL.

    Raises:
        InvalidLocationError: it is neither a path nor a URL.
    """
    return _address(location)[1]


def open_directory(directory: LocationLike, storages: Storages, *, to_write: bool = False) -> StorageBackend:
    """Open a directory of checkpoints.

    Args:
        directory: a path or URL; may be the root of a storage.
        storages, to_write: as for `resolve_location`.

    Raises:
        InvalidLocationError: it is neither a path nor a URL.
        UnknownPluginError: no plugin supports the scheme.
    """
    return storages.open(*_address(directory), to_write)


def shown_location(location: AnyLocation) -> str:
    """Return a location as users see it: without secrets and final slash, and with the home directory for ``~``."""
    if isinstance(location, IndirectLocation):
        return str(location)
    text = redacted_location(os.path.expanduser(str(location)))
    return text if text.endswith(":///") or len(text) < 2 else text.removesuffix("/")


def expanded_location(location: LocationLike) -> str:
    """Return a path or URL as text, with the home directory in place of ``~`` at the beginning of a path.

    Raises:
        InvalidLocationError: it contains a variable, such as ``$HOME``. A local directory with such a name can be used
            if it exists. In a URL, ``$name`` in lower case does not count as a variable.
    """
    text = os.fspath(location)
    if text.startswith("~"):
        expanded = os.path.expanduser(text)
        if expanded == text and not os.path.lexists(text.partition("/")[0]):
            raise InvalidLocationError(
                f"{redacted_location(text)!r}: cannot find the home directory for {text.partition('/')[0]!r}; give the "
                "absolute path, or './~...' for a directory of that name"
            )
        text = expanded
    is_url = "://" in text.partition("$")[0]
    for variable in _VARIABLE.finditer(text.partition("?")[0] if is_url else text):
        named = text[: variable.end()] + text[variable.end() :].partition("/")[0]
        # In object stores, names with a dollar sign exist: the container `$web` of Azure, objects `_$folder$`.
        is_name = variable[1].islower() and variable[1][0] != "{" if is_url else os.path.lexists(named)
        if is_name:
            continue
        exists = "" if is_url else "; or, if it is the name of a directory, create the directory first"
        raise InvalidLocationError(
            f"{redacted_location(text)!r} has the variable {variable[0]!r}, which was not replaced by its value; "
            f"pass os.path.expandvars(location) if it is an environment variable{exists}"
        )
    return text


def _address(location: AnyLocation) -> tuple[str, str]:
    """Return the scheme of a location, and its address: an absolute path or a URL.

    Raises:
        InvalidLocationError: it is neither a path nor a URL.
    """
    if isinstance(location, IndirectLocation):
        scheme, address = _address(location.path.location)
        return scheme, f"{address.rstrip('/')}/{location.path.directory}"
    try:
        text = os.fspath(location)
    except TypeError as error:
        raise InvalidLocationError(
            f"expected a path or a URL as the location, found an object of type {type(location).__name__}; "
            "the location is the first argument, and the state the second"
        ) from error
    if not isinstance(text, str) or not text or "\0" in text:
        raise InvalidLocationError(f"{text!r} is not a location; give a path or a URL such as 'memory://name/step_1'")
    if text[0] == "~" or "$" in text:
        text = expanded_location(text)
    matched = _URL.fullmatch(text)
    if matched is None and (broken := _BROKEN_URL.fullmatch(text)) is not None:
        raise InvalidLocationError(
            f"{redacted_location(text)!r} is a URL with one slash, perhaps because of pathlib.Path; give "
            f"{redacted_location(f'{broken[1]}://{broken[2]}')!r} as a str, or the "
            "absolute path of a local directory that has this name"
        )
    scheme = matched[1].lower() if matched else "file"
    if scheme == "file":
        return scheme, real_path(_local_path(text) if matched else text)
    if not text.partition("://")[2].strip("/"):
        raise InvalidLocationError(
            f"{text!r} is a URL without a name after '://': give one such as {scheme}://name/run"
        )
    return scheme, text.rstrip("/")


def _local_path(url: str) -> str:
    from urllib.parse import unquote, urlsplit  # slow, and most locations are paths

    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
        raise InvalidLocationError(
            f"{redacted_location(url)!r} is not the URL of a local file; write file:///path, with ? and # as "
            "%3F and %23"
        )
    return unquote(parts.path)


SAFETENSORS: Final = ".safetensors"

_WRITERS: Final[Mapping[str, str]] = {
    SAFETENSORS: "safetensors.torch.save_file or safetensors.numpy.save_file",
    ".pt": "torch.save",
    ".pth": "torch.save",
    ".bin": "torch.save",
    ".ckpt": "torch.save, or the trainer",
    ".pkl": "pickle.dump",
    ".npy": "numpy.save",
    ".npz": "numpy.savez",
    ".h5": "h5py",
    ".hdf5": "h5py",
    ".keras": "keras.Model.save",
    ".msgpack": "flax.serialization.msgpack_serialize",
    ".gguf": "gguf.GGUFWriter",
    ".onnx": "torch.onnx.export",
}
"""Functions of other libraries that write files, by the suffix of the file name."""


def file_suffix(location: AnyLocation) -> str:
    """Return the suffix of a location if other libraries use it for files; empty for the name of a directory.

    A location that ends in ``/`` is a directory, whatever its name.
    """
    if isinstance(location, IndirectLocation):
        return ""  # a step of a run
    try:
        text = os.fspath(location)
    except TypeError:
        return ""  # `resolve_location` refuses it
    suffix = os.path.splitext(text)[1].lower() if isinstance(text, str) else ""
    # A location in an archive is refused with another error.
    return suffix if suffix in _WRITERS and "!/" not in text else ""


def is_safetensors_file(location: AnyLocation) -> bool:
    """Return True for the location of one file of safetensors."""
    return file_suffix(location) == SAFETENSORS


def expect_directory_name(location: AnyLocation) -> None:
    """Refuse to write a directory with the name of a file, such as ``model.pt``.

    Raises:
        InvalidLocationError
    """
    if suffix := file_suffix(location):
        reason = f"a checkpoint is a directory, and other libraries would take a name with {suffix} for a file"
        raise refuse_file_name(location, reason)


def refuse_file_name(location: AnyLocation, reason: str) -> InvalidLocationError:
    """Return the error for a location with the name of a file. It says what to do instead."""
    shown, suffix = shown_location(location), file_suffix(location)
    return InvalidLocationError(
        f"cannot save to {shown}: {reason}. Save to a directory, such as {shown[: -len(suffix)]!r}, or write the file "
        f"with {_WRITERS[suffix]}. To name a directory like a file all the same, pass text that ends in '/', such "
        f"as {shown.rstrip('/') + '/'!r}; a path of pathlib loses the '/'. Nothing was written"
    )
