"""The root that is stored at a location, whether a save may replace it, and whether it has changed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Final, Generic, Literal, NamedTuple, TypeAlias, TypeVar

from ckptcore.commit.names import is_hidden_name
from ckptcore.commit.root import ROOT_KEY, AnyRoot, Root, SaveOrder
from ckptcore.commit.root_json import (
    CHECKSUM_TAIL_BYTES,
    HEAD_BYTES,
    decode_root,
    is_claim,
    is_partial,
    read_head,
    summarize_root,
)
from ckptcore.errors import (
    CheckpointExistsError,
    CorruptCheckpointError,
    InvalidLocationError,
    ObjectNotFoundError,
    StorageError,
    StoragePermissionError,
    UnsupportedVersionError,
)
from ckptcore.model.metadata import ArrayRecord, ValueRecord
from ckptcore.protocols import StorageBackend

if TYPE_CHECKING:
    from ckptcore.commit.location import Location

T = TypeVar("T")

OwnKeys: TypeAlias = Callable[[Sequence[str]], Collection[str]]
"""A function that takes all keys in a directory, and returns the keys of a checkpoint of other software."""

Overwrite: TypeAlias = bool | Literal["best-effort", "non-atomic", "keep-other-files", "with-other-files"]
"""Treatment of a checkpoint at the location of a save. True: replace it atomically. False: raise an error. See
`ckptcore.save`."""

OVERWRITES: Final = (True, False, "best-effort", "non-atomic", "keep-other-files", "with-other-files")

FindForeign: TypeAlias = "Callable[[Location], OwnKeys | None]"
"""A function that looks for a checkpoint of other software. Returns a function that recognises its files, or None."""

ExistingTarget: TypeAlias = Literal["nothing", "claim", "checkpoint"]
"""The content of a location. "checkpoint" also includes other files that a save replaces."""

_MAX_MEMBERS: Final = 1000
"""Maximum number of names in a directory that are searched for members. Composites have few members."""

_KEEP_FILES: Final = "pass overwrite='keep-other-files' to keep them (one tree in the layout dcp or safetensors), or "
_WITH_FILES: Final = "pass overwrite='with-other-files' to delete them too, or "
_DELETE_FIRST: Final = "delete the directory first with ckptcore.delete({!r}, other_files=True), or "


def deletion_mark(save_id: str, directory: str) -> str:
    """Return the key of the empty object that marks a directory of a composite as deleted on purpose.

    A missing directory without a mark was lost, or never downloaded. The key contains the save id, so that the mark of
    an old checkpoint does not apply to its successor.
    """
    return f"checkpoint.{save_id}.deleted.{directory}"


def read_root(store: StorageBackend) -> AnyRoot | None:
    """Return the root of a checkpoint; None if there is none.

    Raises:
        CorruptCheckpointError: the root or a part of it is damaged.
        UnsupportedVersionError: a newer version wrote it.
    """
    data = root_bytes(store)
    return None if data is None else parse_root(store, data)


def root_bytes(store: StorageBackend, start: int = 0) -> bytes | None:
    """Return the bytes of the root from `start` on; None without a root.

    If they include the checksum of the root, they differ between any two saves.
    """
    try:
        return store.get(ROOT_KEY, start)
    except ObjectNotFoundError:
        return None


def is_claimed_by(data: bytes | None, save_id: str) -> bool:
    """Return True if the bytes of a root are the claim of a save. Never True on storage that commits by rename."""
    head = None if data is None or not is_claim(data) else read_head(data)
    return head is not None and head.save_id == save_id


def parse_root(store: StorageBackend, data: bytes, display: str = "") -> AnyRoot:
    """Parse a root. Its parts are read from the storage.

    Args:
        store: the storage, opened at the checkpoint.
        data: the bytes of the root.
        display: the location, for errors; empty if the caller adds it to the errors.

    Raises:
        CorruptCheckpointError, UnsupportedVersionError: see `read_root`.
    """

    def read_part(key: str, size: int) -> bytes:
        try:
            return store.get(key, 0, size)
        except ObjectNotFoundError as error:
            raise CorruptCheckpointError(f"{key}, a part of the root, is missing: {error}", key=key) from error

    try:
        return decode_root(data, read_part)
    except UnsupportedVersionError as error:
        raise UnsupportedVersionError(f"{display}: {error}" if display else str(error)) from error
    except CorruptCheckpointError as error:
        if not display:
            raise
        raise type(error)(f"{display}: {error}", key=error.key, start=error.start, stop=error.stop) from error


def none_foreign(location: Location) -> OwnKeys | None:
    """Return None: see `FindForeign`."""
    return None


def refuse_to_replace(
    location: Location, overwrite: Overwrite, find_foreign: FindForeign = none_foreign
) -> ExistingTarget:
    """Check that a save may write to a location. Return what it replaces.

    Args:
        location: the location of the save.
        overwrite: how an existing checkpoint is replaced, if at all: see `Overwrite`.
        find_foreign: finds checkpoints of other software; called if the location has files but no root.

    Raises:
        CheckpointExistsError: the save must not replace what exists.
        InvalidLocationError: no checkpoint can have this name.
        ValueError: `overwrite` is invalid.
    """
    if location.is_object:
        raise CheckpointExistsError(
            f"{location.display} is a file; a checkpoint is a directory: save to another location, or remove the file"
        )
    return find_existing(location, root_bytes(location.store), overwrite, find_foreign)


def find_existing(
    location: Location, root: bytes | None, overwrite: Overwrite, find_foreign: FindForeign = none_foreign
) -> ExistingTarget:
    """Return what a save to a location replaces.

    Args:
        location: the location of the save.
        root: the bytes of the root; None if there is none.
        overwrite, find_foreign: as for `refuse_to_replace`.

    Raises:
        CheckpointExistsError, InvalidLocationError, ValueError: as by `refuse_to_replace`.
    """
    if location.is_hidden:
        raise InvalidLocationError(
            f"{location.display} has the name of an uncommitted save: loads ignore such directories, and saves remove "
            "them. Save to a name that does not begin with a dot"
        )
    if overwrite not in OVERWRITES:
        raise unknown_overwrite(overwrite)
    owns: OwnKeys | None = None
    if root is not None:
        if is_partial(root):
            raise partial_exists(location)
        # An unreadable root counts as a checkpoint: it is replaced only with `overwrite`.
        existing: ExistingTarget = "claim" if is_claim(root) else "checkpoint"
    elif not (names := location.store.list_names()):
        return "nothing"
    elif (
        overwrite == "keep-other-files"
        # A composite that lost its root may match here: it also has files by which other software finds it.
        or (owns := find_foreign(location)) is not None
        or has_members(location.store, names)
    ):
        existing = "checkpoint"  # or a composite that lost its root, or files of other software
    else:
        raise CheckpointExistsError(
            f"{location.display} contains files that do not belong to a checkpoint ({', '.join(names[:5])}), and "
            "a save does not replace them; save to another location, or remove them"
        )
    if existing == "checkpoint" and not overwrite:
        raise CheckpointExistsError(
            f"{location.display} holds a checkpoint already; save to another location, or pass overwrite=True"
        )
    from ckptcore.commit.contents import expect_removable  # a save to an empty location does not need it

    keeps = overwrite in ("keep-other-files", "with-other-files")
    remedy = _KEEP_FILES if location.commit_method.replaces_atomically else ""
    remedy += _WITH_FILES + ("" if root is None else _DELETE_FIRST)  # files without a root are not deleted
    expect_removable(location, other_files=keeps, remedy=f"{remedy}save elsewhere", owns=owns)
    return existing


def next_order(location: Location, overwrite: Overwrite) -> SaveOrder:
    """Return the order of a save. It is higher than the order of the checkpoint that the save replaces.

    Args:
        location: the location of the save.
        overwrite: how an existing checkpoint is replaced, if at all: see `Overwrite`.
    """
    data = root_bytes(location.store) if overwrite else None
    if data is None:
        return SaveOrder()
    try:
        return summarize_root(data).order.next
    except (CorruptCheckpointError, UnsupportedVersionError):
        return SaveOrder().next


def unknown_overwrite(overwrite: object) -> ValueError:
    """Return the error for an argument ``overwrite`` that is not one of `OVERWRITES`."""
    return ValueError(
        f"overwrite={overwrite!r}: expected True, False, 'best-effort', 'non-atomic', 'keep-other-files' or "
        "'with-other-files'"
    )


def partial_exists(location: Location) -> CheckpointExistsError:
    """Return the error for a save to the location of a partial save."""
    return CheckpointExistsError(
        f"{location.display} has a partial save that is not finalized: finalize it with "
        "ckptcore.partial(...).finalize, or delete it with ckptcore.delete, before saving there"
    )


def refuse_inside(location: Location) -> None:
    """Refuse a location inside a checkpoint or claim. Checks only the parent directory, with one small request.

    Raises:
        InvalidLocationError
    """
    try:
        location.parent.size(ROOT_KEY)
    except ObjectNotFoundError:
        return
    above = location.display.rstrip("/").rpartition("/")[0]
    raise InvalidLocationError(
        f"cannot save to {location.display}: it is inside {above}, which is a checkpoint or an unfinished save. A "
        "checkpoint owns its directory: save outside it. Nothing was written"
    )


def has_members(store: StorageBackend, names: Sequence[str]) -> bool:
    """Return True if the names in a directory without a root include members of a composite."""
    for entry in names[:_MAX_MEMBERS]:
        if not entry.endswith("/") or entry.startswith("."):
            continue
        try:
            head = read_head(store.get(f"{entry}{ROOT_KEY}", 0, HEAD_BYTES))
        except StorageError:
            continue
        if head is not None and head.role == "member":
            return True
    return False


class LocationVersion(NamedTuple):
    """The version of the content of a location. Changes if a checkpoint is committed, replaced or deleted.

    Checkpoints of other software have no root. Their version changes only if a root appears, or the names change.

    Attributes:
        root: the bytes of the root, which differ between any two saves; None without a root. If the root cannot be
            read, the reason as a str.
        composite_root: the root of the composite that the checkpoint is a member of, or its digest, see `digested`;
            None if it is not a member.
        names: the names in a directory without a root, except hidden directories of saves.
        nbytes: the size of an object in bytes; None for a directory.
    """

    root: bytes | str | None
    composite_root: bytes | str | None = None
    names: tuple[str, ...] = ()
    nbytes: int | None = None

    @property
    def is_object(self) -> bool:
        """True if the location is one object (file), not a directory."""
        return self.nbytes is not None

    def digested(self) -> LocationVersion:
        """Return the version with a digest in place of the composite's root, which may be large."""
        if not isinstance(self.composite_root, bytes):
            return self
        import hashlib  # only members of composites need it

        return self._replace(composite_root=hashlib.sha256(self.composite_root).hexdigest())

    def is_current(self, location: Location) -> bool:
        """Return True if the location has not changed. Then a read error means damage, not a concurrent change.

        Raises:
            StorageError
        """
        return self._read_again(location) == self

    def still_exists(self, location: Location) -> bool:
        """Return True if everything in this version still exists, so that all data that was read is from one save.

        New names are ignored, because the data does not depend on them.

        Raises:
            StorageError
        """
        now = self._read_again(location)
        return now._replace(names=()) == self._replace(names=()) and set(self.names) <= set(now.names)

    def has_current_root(self, location: Location) -> bool:
        """Return True if the root has not changed, so that all data that was read is from one save. Sends one request.

        For a member, the root of its composite is not read again. Names are not listed again, because a listing of a
        checkpoint of other software can be long.

        Raises:
            StorageError
        """
        # Its end has the checksum of all of it. The end of a longer or shorter root is elsewhere.
        start = max(0, len(self.root) - CHECKSUM_TAIL_BYTES) if isinstance(self.root, bytes) else 0
        return root_version(location.store, start) == (self.root and self.root[start:])

    def _read_again(self, location: Location) -> LocationVersion:
        now = read_version(location)
        return now.digested() if isinstance(self.composite_root, str) else now


def read_version(location: Location, composite_root: bytes | str | None = None) -> LocationVersion:
    """Read the version of a location: the root first, and names only without a root.

    Args:
        location: the location.
        composite_root: for a member, the root of its composite as the caller read it; None: read it.

    Raises:
        StorageError
    """
    try:
        root = root_version(location.store)
    except StoragePermissionError:
        # Without the permission to list, Amazon S3 also denies access to a missing object. A file has no root.
        with contextlib.suppress(StorageError):
            return LocationVersion(None, nbytes=location.parent.size(location.name))
        raise
    if isinstance(root, str):
        return LocationVersion(root)
    if root is not None:
        head = read_head(root)
        is_member = head is not None and head.role == "member"
        if not is_member:
            return LocationVersion(root)
        return LocationVersion(root, composite_root=composite_root or root_version(location.parent))
    try:
        nbytes = location.parent.size(location.name)
    except ObjectNotFoundError:
        names = [name for name in location.store.list_names() if not is_hidden_name(name.removesuffix("/"))]
        return LocationVersion(None, names=tuple(names))
    return LocationVersion(None, nbytes=nbytes)


def root_version(store: StorageBackend, start: int = 0) -> bytes | str | None:
    """Return the bytes of the root from `start` on; None without a root; the reason as a str if it cannot be read.

    If a directory is exchanged while its root is opened, the root looks like a link out of the directory. The storage
    refuses such a link with `InvalidLocationError`.
    """
    try:
        return root_bytes(store, start)
    except InvalidLocationError as error:
        return str(error)


_MAX_CACHED: Final = 4
"""Maximum number of roots in the cache."""

_MAX_CACHED_BYTES: Final = 1 << 20
"""Maximum size of a cached root in bytes."""


class ParsedRoots(Generic[T]):
    """Cache of the last parsed roots, each with an object that its reader derived from it. Thread-safe.

    The bytes of a root are the key: they are read and compared each time. A root with parts is not cached, because its
    parts must be read and verified again. A root whose tree has mutable values is not cached, because callers could
    change them.
    """

    def __init__(self) -> None:
        """Create an empty cache."""
        self._known: tuple[tuple[bytes, Root, T], ...] = ()
        self._lock = threading.Lock()

    def root(self, data: bytes, parse: Callable[[], AnyRoot]) -> AnyRoot:
        """Return the root with the given bytes.

        Args:
            data: the bytes.
            parse: parses the bytes; called if they are not in the cache.
        """
        # Needs no lock: the tuple is replaced as a whole, never changed.
        for known, root, _ in self._known:
            if known == data:
                return root
        return parse()

    def keep(self, data: bytes, root: Root, make: Callable[[], T]) -> T:
        """Return the object that belongs to a root, and cache both.

        Args:
            data: the bytes of the root.
            root: the root.
            make: creates the object; called if the root is not in the cache.
        """
        for _, known, kept in self._known:
            if known is root:
                return kept
        kept = make()
        if not root.parts and len(data) <= _MAX_CACHED_BYTES and not _has_containers(root):
            with self._lock:
                others = [other for other in self._known if other[0] != data]
                self._known = ((data, root, kept), *others[: _MAX_CACHED - 1])
        return kept


def _has_containers(root: Root) -> bool:
    """Return True if a value of the tree is a list or dict, which its handler may return without a copy."""
    leaves = root.tree.leaves
    if {*map(type, leaves)} == {ArrayRecord}:  # fast path
        return False
    return any(isinstance(record, ValueRecord) and isinstance(record.value, list | dict) for record in leaves)
