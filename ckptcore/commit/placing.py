"""Commits in a directory with other files: objects move into the directory of the checkpoint that they replace.

The directory stays, so that other processes can write into it at any time. Objects have names that no other file has.
Nothing refers to them until the root is replaced by one rename, which is the commit. Then the index is replaced, by
which other software finds the objects, and the objects of the old checkpoint are deleted.

Before it moves anything, a save writes a journal into its hidden directory. If the process is killed, another process
that finds the hidden directory unlocked completes the commit, or removes the objects of a save that is not committed.
The journal has a stamp of each file, so that no file is deleted that was written since.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

import xxhash

from ckptcore.commit.names import is_save_of
from ckptcore.commit.root import ROOT_KEY, CompositeRoot, Root
from ckptcore.commit.stored_root import read_root, root_bytes
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.errors import (
    CheckpointExistsError,
    ConditionFailedError,
    CorruptCheckpointError,
    InvalidLocationError,
    ObjectNotFoundError,
    SaveLostError,
    UnsupportedVersionError,
)
from ckptcore.events import logger_named
from ckptcore.model.metadata import check_key
from ckptcore.protocols import AtomicDirectories, StorageBackend

logger = logger_named("ckptcore.commit")

_JOURNAL: Final = "checkpoint.journal.json"

_SHOWN: Final = 5


class _Journal(NamedTuple):
    """The record of a commit.

    Attributes:
        hidden: the name of the hidden directory, which has a random number. A file of an old checkpoint cannot have it.
        root: a digest of the new root.
        index_key: the index that other software reads; empty if there is none.
        index_stamp: the stamp of the old index; None if there was none.
        added: the stamps of the new objects, by key.
        removed: the stamps of the objects that the commit replaces, by key.
    """

    hidden: str
    root: str
    index_key: str
    index_stamp: str | None
    added: Mapping[str, str]
    removed: Mapping[str, str]


class PlacedObjects:
    """The objects of a save in a hidden directory, and the directory of the checkpoint that they replace."""

    def __init__(self, parent: StorageBackend, directories: AtomicDirectories, name: str, hidden: str) -> None:
        """Change nothing.

        Args:
            parent: the storage, opened at the parent directory.
            directories: the same storage.
            name: the name of the checkpoint.
            hidden: the name of the hidden directory of the save, which this process has locked.
        """
        self._parent = parent
        self._directories = directories
        self._name = name
        self._hidden = hidden
        self._old = subdirectory(parent, name)
        self._new = subdirectory(parent, hidden)

    def commit(self, root: bytes, index: str, save_id: str, display: str, foreign: Collection[str] = ()) -> None:
        """Move the objects, and replace the root.

        Args:
            root: the new root.
            index: the key of the index of the layout; empty if it has none.
            save_id: the save id, which is part of names of their own.
            display: the location, for errors.
            foreign: the files of a checkpoint of other software, which the commit replaces.

        Raises:
            CheckpointExistsError: a file has the name of an object. Nothing was changed.
            SaveLostError: another save replaced the root, or the directory was removed. Nothing was committed.
            StorageError: nothing was committed.
        """
        # Only the save whose root has this stamp can still replace the index, so it is completed before the index is
        # stamped. Otherwise its index could come later, and stay with the names of objects that this save deletes.
        before = self._stamps(self._name, [ROOT_KEY])
        self._complete_others()
        before.update(self._stamps(self._name, [index] if index else []))
        keys = [key for key in self._new.list() if key not in (ROOT_KEY, _JOURNAL, index)]
        existing = sorted(self._stamps(self._name, keys))
        if existing:
            raise fixed_names(display, existing)
        replaced = {ROOT_KEY: ROOT_KEY, **{key.replace(f".{save_id}", ""): key for key in keys}}
        owned = _own_files(self._old)
        # Also those of other software: what only its owner could read stays private.
        for key in sorted(self._stamps(self._name, sorted(replaced.keys() - {ROOT_KEY, index}))):
            self._directories.keep_attributes(f"{self._name}/{key}", f"{self._hidden}/{replaced[key]}")
        removed = (owned | replaced.keys() | {*foreign}) - {ROOT_KEY, index}
        journal = _Journal(
            self._hidden,
            _digest(root),
            index,
            before.get(index),
            self._stamps(self._hidden, keys),
            # Other software must not find an index of files that are gone, so metadata is deleted first.
            self._stamps(
                self._name,
                sorted(removed, key=lambda key: (key[0] not in "._" and not key.endswith((".json", ".ocdbt")), key)),
            ),
        )
        self._new.put(_JOURNAL, json.dumps(journal._asdict()).encode())
        try:
            self._directories.place(self._hidden, self._name, keys)
            self._directories.replace(f"{self._hidden}/{ROOT_KEY}", f"{self._name}/{ROOT_KEY}", before.get(ROOT_KEY))
        except (ConditionFailedError, ObjectNotFoundError) as error:
            raise SaveLostError(
                f"cannot commit {display}: another process saved there or removed it during the commit; save again. "
                f"Other files were kept: {error}"
            ) from error

    def complete(self) -> None:
        """Complete the commit of this process, which has replaced the root.

        Another save may have completed it, and may have replaced the root again.

        Raises:
            StorageError
        """
        journal = self._journal()
        if journal is not None:
            self._complete(journal)

    def settle(self) -> None:
        """Complete the commit if the root is in its place. Otherwise remove the objects that were moved.

        The process of the save may still run, if it has lost its lock. Then it can no longer commit.

        Raises:
            StorageError
        """
        journal = self._journal()
        if journal is None:
            return
        # Either the commit has moved the root away before, or it fails.
        self._new.delete([ROOT_KEY])
        if self._is_committed(journal):
            self._complete(journal)
        elif self._journal() is not None:  # otherwise another save has completed it, and then replaced the root
            self._delete(journal.added)

    def _complete_others(self) -> None:
        """Complete the commit of the save that wrote the current root, if its process has not."""
        for entry in self._parent.list_names():
            hidden = entry.removesuffix("/")
            if hidden in (entry, self._hidden) or not is_save_of(self._name, hidden):
                continue
            other = PlacedObjects(self._parent, self._directories, self._name, hidden)
            journal = other._journal()
            if journal is not None and other._is_committed(journal):
                other._complete(journal)
                # Before the root is replaced again, because the commit would look like one that never happened.
                other._new.delete([_JOURNAL])

    def _journal(self) -> _Journal | None:
        try:
            journal = _decode(self._new.get(_JOURNAL))
        except ObjectNotFoundError:
            return None
        return None if journal is None or journal.hidden != self._hidden else journal

    def _is_committed(self, journal: _Journal) -> bool:
        root = root_bytes(self._old)
        return root is not None and _digest(root) == journal.root

    def _complete(self, journal: _Journal) -> None:
        """Replace the index, unless other software has, and delete the old objects, if no index names them."""
        if journal.index_key:
            try:
                self._directories.replace(
                    f"{self._hidden}/{journal.index_key}", f"{self._name}/{journal.index_key}", journal.index_stamp
                )
            except ObjectNotFoundError:
                pass  # it was replaced before
            except ConditionFailedError as error:
                if self._stamps(self._hidden, [journal.index_key]):  # otherwise another process has just replaced it
                    logger.warning(
                        "other software has replaced or removed an index meanwhile. It stays, with the objects of the "
                        "old checkpoint, which it may name: %s",
                        error,
                    )
                    return
        self._delete(journal.removed)

    def _delete(self, stamps: Mapping[str, str]) -> None:
        """Delete the files that are unchanged, and that the root does not name."""
        owned = _own_files(self._old)
        unowned = {f"{self._name}/{key}": stamp for key, stamp in stamps.items() if key not in owned}
        if unowned:
            self._directories.delete_unchanged(unowned)

    def _stamps(self, directory: str, keys: Sequence[str]) -> dict[str, str]:
        found = self._directories.stamps([f"{directory}/{key}" for key in keys])
        return {key.removeprefix(f"{directory}/"): stamp for key, stamp in found.items()}


def _decode(data: bytes) -> _Journal | None:
    """Return a journal; None if the file is something else, such as a file of a hostile checkpoint."""
    try:
        journal = _Journal(**json.loads(data))
        texts = [journal.hidden, journal.root, journal.index_key, journal.index_stamp or ""]
        texts += [*journal.added.values(), *journal.removed.values()]
        for key in (*journal.added, *journal.removed, *filter(None, [journal.index_key])):
            check_key(key)
    except (AttributeError, TypeError, ValueError, RecursionError, InvalidLocationError):
        return None
    return journal if all(isinstance(text, str) for text in texts) else None


def _digest(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def _own_files(store: StorageBackend) -> set[str]:
    """Return the files of the checkpoint in a directory: only the root itself, if that cannot be read."""
    try:
        root = read_root(store)
    except (CorruptCheckpointError, UnsupportedVersionError):
        root = None
    files = {ROOT_KEY}
    if isinstance(root, Root | CompositeRoot):
        files.update(root.parts)
    if isinstance(root, CompositeRoot):
        files.update(root.files or ())
    if isinstance(root, Root):
        files.update(root.objects, filter(None, [root.index]))
    elif isinstance(root, CompositeRoot):
        for entry in filter(root.has_directory, store.list_names()):
            files.update([entry + key for key in _own_files(subdirectory(store, entry.removesuffix("/")))])
    return files


def fixed_names(display: str, names: Sequence[str]) -> CheckpointExistsError:
    """Return the error for files that a save cannot replace while other files stay."""
    return CheckpointExistsError(
        f"{display} has files or directories with the names of the new checkpoint ({', '.join(names[:_SHOWN])}), which "
        "overwrite='keep-other-files' cannot replace: other software reads them by these names, so no single rename "
        "replaces all of them. Save one tree with the layout dcp or safetensors, save elsewhere, or pass "
        "overwrite='with-other-files' to delete the other files too. Nothing was changed"
    )
