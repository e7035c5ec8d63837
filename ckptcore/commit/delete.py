"""Deletion of a checkpoint, unless other checkpoints refer to it.

An update pins its base, waits while a deletion of the base is announced, checks that the base exists, and commits. A
deletion is announced first. Then it looks for pins and for checkpoints that refer to the base. It removes the base only
if it finds none. So at least one of two concurrent operations sees the other (see `ckptcore.commit.locks`).
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from ckptcore.commit.leases import SYSTEM_CLOCK
from ckptcore.commit.location import Location
from ckptcore.commit.locks import Lock, Locks
from ckptcore.commit.method import find_partial
from ckptcore.commit.names import INTERNAL_DIRECTORY, is_hidden_name, refuse_other_spelling
from ckptcore.commit.root import ROOT_KEY, AnyRoot, Base, Claim, CompositeRoot, PartialSave, Root
from ckptcore.commit.root_json import bases_of_root
from ckptcore.commit.stored_root import LocationVersion, deletion_mark, read_root, read_version, root_bytes
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointReferredError,
    CorruptCheckpointError,
    InvalidLocationError,
    ObjectNotFoundError,
    ObjectUnavailableError,
    StorageError,
    StorageFullError,
    UnsupportedVersionError,
)
from ckptcore.events import logger_named
from ckptcore.io.threads import IOThreads, map_ordered, requests_of
from ckptcore.protocols import StorageBackend

logger = logger_named("ckptcore.commit")

_PIN_SECONDS: Final = 90.0
"""Seconds that a deletion waits for a leased pin. The lease of a killed process expires earlier."""

_LAST_POLL_SECONDS: Final = 2.0

_NOTES: Final = f"{INTERNAL_DIRECTORY}/bases"
"""Directory of empty objects ``<checkpoint>/<base>``. Each records that a checkpoint needs a base next to it."""

_OF_ONE_ENTRY: Final = frozenset({
    errno.EACCES, errno.EPERM, errno.ENOTCONN, errno.EHOSTDOWN, errno.ELOOP,
})  # fmt: skip
"""Error numbers of a directory without permission, a loop of links, and a mount point whose file system is gone.

``ESTALE`` and ``EIO`` are not among them: the entry may be readable in a moment, and without it a run would resume from
an older step."""


def concerns_one_entry(error: StorageError) -> bool:
    """Return True if an error concerns one entry of a directory, and not the storage as a whole or the network.

    Examples are ``lost+found``, the directory of another user, and an object in archive storage or with a disabled
    encryption key. Such an entry must not block the others.
    """
    return isinstance(error, PermissionError | ObjectUnavailableError) or error.errno in _OF_ONE_ENTRY


def delete_checkpoint(location: Location, threads: IOThreads, *, other_files: bool = False) -> None:
    """See `ckptcore.delete`."""
    try:
        location.commit_method.refuse_place(location)
    except InvalidLocationError as error:
        raise InvalidLocationError(f"{error}. To delete it, rename or remove it with your own tools") from error
    location.commit_method.restore(location.name)
    root: AnyRoot | None = None
    try:
        root = read_root(location.store)
        is_ours = root is not None
    except (CorruptCheckpointError, UnsupportedVersionError, ObjectUnavailableError):
        is_ours = True  # an object in archive storage can be deleted, although it cannot be read
    if not is_ours:
        if not _delete_sessions(location):
            delete_checkpoint(location, threads, other_files=other_files)
            return
    elif isinstance(root, Claim | PartialSave):
        location.commit_method.remove(location, other_files=other_files)
    else:
        with _announced_deletion(location) as announced:
            _refuse_referred(location, None if root is None else root.save_id, threads)
            # If this process was suspended for long, its lease is lost, and an update may refer to the checkpoint now.
            announced.check()
            may_be_member = root is None or (isinstance(root, Root) and root.role == "member")
            mark = _mark_in_composite(location) if may_be_member else None
            # Put the mark before the removal, so that no reader mistakes the missing directory for a lost one.
            marked = mark is not None and _put_mark(location, mark)
            try:
                location.commit_method.remove(location, other_files=other_files)
            except BaseException:
                if mark is not None and root_bytes(location.store) is not None:
                    # Remove the mark, because the checkpoint still exists: if it is lost later, that must be reported.
                    location.parent.delete([mark])
                raise
            if mark is not None and not marked and not _put_mark(location, mark):
                logger.warning(
                    "%s is deleted, but the disk is too full to record that: verify will report it as missing",
                    location.display,
                )
    location.commit_method.sweep(location)
    if isinstance(root, Root) and root.references.bases:
        forget_bases(location)


def _mark_in_composite(location: Location) -> str | None:
    """Return the key that marks a location as deleted in its composite; None if it is in no composite."""
    try:
        above = read_root(location.parent)
    except (CorruptCheckpointError, UnsupportedVersionError):
        return None
    is_member = isinstance(above, CompositeRoot) and above.has_directory(f"{location.name}/")
    return deletion_mark(above.save_id, location.name) if above is not None and is_member else None


def _put_mark(location: Location, mark: str) -> bool:
    """Put the mark of a deletion. Return False if the disk is full: the deletion frees the space."""
    try:
        location.parent.put(mark, b"")
    except StorageFullError:
        return False
    return True


def _mark_lost(location: Location) -> bool:
    """Mark a lost directory of a composite as deleted. Return False if it has the mark, or is in no composite."""
    mark = _mark_in_composite(location)
    if mark is None:
        return False
    with suppress(ObjectNotFoundError):
        location.parent.size(mark)
        return False
    location.parent.put(mark, b"")
    return True


def _delete_sessions(location: Location) -> bool:
    """Delete the partial save to a location without a root. Return False if the location changed meanwhile.

    If there is no partial save, and the location is a lost directory of a composite, marks it as deleted.

    Raises:
        CheckpointExistsError: the location has files of other software.
        CheckpointNotFoundError: there is no partial save.
    """
    version = read_version(location)
    if version.root is not None or (version != LocationVersion(None) and not version.is_current(location)):
        return False
    if version != LocationVersion(None):
        raise CheckpointExistsError(
            f"{location.display} was not written by ckptcore and is left alone; remove it with your own tools"
        )
    try:
        has_sessions = find_partial(location) is not None
    except (CorruptCheckpointError, UnsupportedVersionError):
        has_sessions = True
    if not has_sessions:
        if _mark_lost(location):
            return True
        raise CheckpointNotFoundError(f"there is nothing at {location.display} to delete")
    return location.commit_method.remove_sessions(location)


def _refuse_referred(location: Location, save_id: str | None, threads: IOThreads) -> None:
    """Refuse to delete a checkpoint that another checkpoint in the same directory refers to.

    Args:
        location: the location of the checkpoint.
        save_id: its save id; None if it cannot be read.
        threads: threads for the requests.

    Raises:
        CheckpointReferredError: another checkpoint refers to it.
        NameCollisionError: the checkpoint has another name, which the file system treats as equal.
        StorageError: the parent directory cannot be listed or read.
    """
    try:
        refuse_other_spelling(location, "delete")
        bases = find_bases(location.parent, threads, without=location.name)
    except StorageError as error:
        error.add_note(
            f"Nothing was deleted: to find checkpoints that refer to {location.display}, its parent directory must be "
            "listed and read"
        )
        raise
    names = referring_to(location.name, save_id, bases)
    if names:
        which = "it" if len(names) == 1 else "them"
        raise CheckpointReferredError(
            f"{location.display} cannot be deleted, because {', '.join(names[:20])} in the same directory refer to its "
            f"arrays: delete {which} first. A copy by ckptcore.copy needs no base. Nothing was deleted"
        )


@contextmanager
def _announced_deletion(location: Location) -> Iterator[Lock]:
    """Announce the deletion of a checkpoint inside the block, so that new updates of it wait.

    The checkpoint stays visible.

    Args:
        location: the location of the checkpoint.

    Raises:
        CheckpointReferredError: an update that refers to the checkpoint is being saved.
        StorageError: the storage failed, or the directory that contains the checkpoint cannot be written.
    """
    locks = base_locks(location)
    pin = pin_name(location)
    deadline = SYSTEM_CLOCK.now() + _PIN_SECONDS
    while (announced := location.commit_method.announce_deletion(location, locks, pin)) is None:
        if SYSTEM_CLOCK.now() >= deadline or not locks.may_expire(pin):
            raise CheckpointReferredError(
                f"an update that refers to {location.display} is being saved: wait until it is committed, and delete "
                "it first. Nothing was deleted"
            )
        SYSTEM_CLOCK.sleep(_LAST_POLL_SECONDS)
    with announced:
        yield announced


def base_locks(location: Location) -> Locks:
    """Return the locks of the directory that contains a base. Updates pin the base there."""
    return location.commit_method.locks(location.display)


def pin_name(base: Location) -> str:
    """Return the name under which an update pins its base. `ckptcore.delete` ignores the pins of readers."""
    return f"{base.name}.base"


def bases_in(directory: StorageBackend, name: str) -> Sequence[Base]:
    """Return the bases of a checkpoint in a directory; empty if it has no readable root. Reads every format version.

    Links out of the directory are not followed: the bases of a linked checkpoint are in another directory.
    """
    try:
        return bases_of_root(subdirectory(directory, name).get(ROOT_KEY))
    except (ObjectNotFoundError, CorruptCheckpointError, InvalidLocationError):
        return ()


def find_bases(
    directory: StorageBackend,
    threads: IOThreads,
    bases_of: Callable[[StorageBackend, str], Sequence[Base]] = bases_in,
    *,
    without: str = "",
    warn: Callable[..., None] = logger.warning,
) -> Mapping[str, Sequence[Base]]:
    """Return the bases of the checkpoints in a directory, by name. Lists it once, and reads one root for each name.

    A checkpoint with a damaged root has no bases, because it cannot be loaded. If this process may not read a root, it
    logs that, and uses the bases that `note_bases` recorded.

    Args:
        directory: the storage, opened at the directory.
        threads: threads for the requests.
        bases_of: returns the bases of one checkpoint; must be thread-safe.
        without: a name to leave out.
        warn: logs a message with its arguments.
    """

    def known_bases(name: str) -> Sequence[Base]:
        try:
            return bases_of(directory, name)
        except StorageError as error:
            if not concerns_one_entry(error):
                raise
            noted = directory.list_names(f"{_NOTES}/{name}/")
            stay = f"what it needs stays: {', '.join(noted)}" if noted else "it is not known to need others"
            warn("%s in the same directory cannot be read; %s: %s", name, stay, error)
            return [Base(base, "") for base in noted]

    directories = [entry[:-1] for entry in directory.list_names() if entry.endswith("/")]
    names = [name for name in directories if name not in (without, INTERNAL_DIRECTORY) and not is_hidden_name(name)]
    parallelism = requests_of(directory).concurrency
    bases = map_ordered(threads, names, known_bases, parallelism=parallelism)
    return dict(zip(names, bases, strict=True))


def note_bases(location: Location, bases: Sequence[Base]) -> None:
    """Record which checkpoints in the same directory a checkpoint needs, for deletions that cannot read its root.

    Errors of the storage are ignored.
    """
    for name in {base.path.partition("/")[0] for base in bases} - {".."}:
        with suppress(StorageError):
            location.parent.put(f"{_NOTES}/{location.name}/{name}", b"")


def forget_bases(location: Location) -> None:
    """Remove the records of `note_bases` for a deleted checkpoint. Errors of the storage are ignored."""
    with suppress(StorageError):
        location.parent.delete(list(location.parent.list(f"{_NOTES}/{location.name}/")))


def referring_to(name: str, save_id: str | None, bases: Mapping[str, Sequence[Base]]) -> Sequence[str]:
    """Return the names of the checkpoints that refer to a given checkpoint, or to a member of it.

    Args:
        name: the name of the checkpoint.
        save_id: its save id; None if it is unknown: then references with any save id match.
        bases: the bases by name, as `find_bases` returns them.
    """
    return [
        other
        for other, of in bases.items()
        if other != name
        and any(
            (base.path == name and (not base.save_id or save_id in (None, base.save_id)))
            or base.path.startswith(f"{name}/")
            for base in of
        )
    ]
