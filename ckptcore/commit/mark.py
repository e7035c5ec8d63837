"""The mark of a location: what is compared to find out if its checkpoint was replaced or deleted."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ckptcore.commit.location import Location
from ckptcore.commit.occupants import is_hidden_name, root_bytes
from ckptcore.commit.root_json import read_head
from ckptcore.errors import InvalidLocationError, ObjectNotFoundError
from ckptcore.protocols import StorageBackend

__all__ = ["Mark", "read_mark", "root_mark"]


@dataclass(frozen=True, slots=True)
class Mark:
    """The state of a location at one time. Differs after a checkpoint is committed, replaced or deleted there.

    Checkpoints of other software have no root. For them it differs only after a root appears, or the names change.

    Attributes:
        root: the bytes of the root, which differ between any two saves; None without a root; as str, the reason why it
            cannot be read.
        around: the root of the composite, for a member of one.
        names: the names in a directory without a root, except hidden directories of saves.
        nbytes: the size of an object; None of a directory.
    """

    root: bytes | str | None
    around: bytes | str | None = None
    names: tuple[str, ...] = ()
    nbytes: int | None = None

    @property
    def is_object(self) -> bool:
        """True if the location is one object (file), and no directory."""
        return self.nbytes is not None

    def is_at(self, location: Location) -> bool:
        """Return True if the location has not changed, so that an error is about the checkpoint itself.

        Raises:
            StorageError
        """
        return read_mark(location) == self

    def is_part_of(self, location: Location) -> bool:
        """Return True if all of it is at a location still, so that what was read without an error is of one save.

        Other names may have appeared: what was read does not depend on them.

        Raises:
            StorageError
        """
        now = read_mark(location)
        return replace(now, names=()) == replace(self, names=()) and set(self.names) <= set(now.names)

    def has_stayed_at(self, location: Location) -> bool:
        """Return True if the root has not changed, so that data read without an error is of one save. One request.

        A composite that was committed is not read again for its members. Names are not listed again either, because
        checkpoints of other software may need many reads and long listings.

        Raises:
            StorageError
        """
        return root_mark(location.store) == self.root


def read_mark(location: Location) -> Mark:
    """Read the mark of a location: its root first, and names only where there is no root.

    Raises:
        StorageError
    """
    root = root_mark(location.store)
    if isinstance(root, str):
        return Mark(root)
    if root is not None:
        head = read_head(root)
        is_member = head is not None and head.role == "member"
        return Mark(root, around=root_mark(location.parent) if is_member else None)
    try:
        nbytes = location.parent.size(location.name)
    except ObjectNotFoundError:
        names = [name for name in location.store.list_names() if not is_hidden_name(name.removesuffix("/"))]
        return Mark(None, names=tuple(names))
    return Mark(None, nbytes=nbytes)


def root_mark(store: StorageBackend) -> bytes | str | None:
    """The bytes of a root; None where there is none, and a text where it cannot be read.

    A directory that is exchanged while its root is opened looks like a link that leads out of it.
    """
    try:
        return root_bytes(store)
    except InvalidLocationError as error:
        return str(error)
