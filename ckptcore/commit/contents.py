"""The contents of the directory of a checkpoint: other checkpoints inside it, and files that no checkpoint wrote."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from ckptcore.commit.root import PARTIAL_KEY, ROOT_KEY, Root, RootSummary, split_rank
from ckptcore.commit.root_json import decode_root, read_head, summarize_root
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.errors import (
    CheckpointExistsError,
    CorruptCheckpointError,
    ObjectNotFoundError,
    ObjectUnavailableError,
    UnsupportedVersionError,
)
from ckptcore.events import logger_named
from ckptcore.protocols import StorageBackend

if TYPE_CHECKING:
    from ckptcore.commit.location import Location
    from ckptcore.commit.stored_root import FindForeign, OwnKeys

logger = logger_named("ckptcore.commit")

_SHOWN: Final = 5

_DELETE_FILES: Final = "move them elsewhere, or delete them too with ckptcore.delete({!r}, other_files=True)"
"""The advice to delete a checkpoint with files that no checkpoint wrote."""

_RESERVED: Final = (
    rf"(?s){re.escape(ROOT_KEY)}|{re.escape(PARTIAL_KEY)}"
    r"|checkpoint\.(journal\.json|replaces|copies|[0-9a-f]{16}\..*)"
)
"""The names of files and directories that only ckptcore writes next to a root. ``checkpoint.pt`` is not such a name."""

_TEMPORARY: Final = (
    r"(?s)\.ckptcore.*|\..+\.ckptcore|\.nfs[0-9a-f]+|\.fuse_hidden.*|\._.*|\.DS_Store|[Tt]humbs\.db|[Dd]esktop\.ini|@eaDir"
    r"|\.AppleDouble|\.fseventsd|\.Spotlight-V100|\.Trash.*|\.snapshot|lost\+found|\.directory|\.~lock\..*#"
    r"|\.ipynb_checkpoints"
)
"""The names of temporary files of ckptcore, and of files that file systems, file managers and editors create."""

_OBJECT: Final = (
    r"(?s)[^/]*\.safetensors(\.index\.json)?|\.metadata|__[0-9]+[^/]*\.(metadata|distcp)"
    r"|([^/]+/)?(_CHECKPOINT_METADATA|_METADATA|_sharding|_strings\.json|commit_success\.txt|orbax\.checkpoint"
    r"|manifest\.ocdbt|\.zgroup|zarr\.json|(ocdbt\.process_[0-9]+|d)/.*)"
    r"|(.*/)?[^/]*\.[0-9a-f]{16}\.[^/]*"
)
"""The keys of files that saves write: those of our layouts, and names with a save id between dots, of any layout.

A checkpoint may have files with other keys, which only its root lists."""

_OF_ARRAYS: Final = ("/.zarray", "/zarr.json")
"""The ends of keys of Zarr metadata. All files in the directories of such keys count as files of Zarr arrays."""


def expect_removable(
    location: Location, *, other_files: bool, remedy: str = _DELETE_FILES, owns: OwnKeys | None = None
) -> None:
    """Refuse to remove a checkpoint if its directory contains more than the checkpoint. Lists the directory.

    Args:
        location: the location of the checkpoint.
        other_files: True to remove files that no checkpoint wrote, too.
        remedy: how to keep or remove such files, for the error; ``{!r}`` stands for the location.
        owns: recognises the files of a checkpoint of other software; None if ckptcore wrote it.

    Raises:
        CheckpointExistsError
        StorageError
    """
    contents = _Contents(location.store)
    if names := list(contents.nested()):
        inside = ", ".join([f"{location.display.rstrip('/')}/{name}" for name in names[:_SHOWN]])
        raise CheckpointExistsError(
            f"{location.display} has another checkpoint in its directory ({inside}), which would be removed with it: "
            "move or delete that one first. Nothing was changed"
        )
    if other_files:
        return
    if contents.others(owns):
        location.commit_method.sweep(location)  # a killed save may have moved objects into the directory
        contents = _Contents(location.store)
    if others := contents.others(owns):
        raise CheckpointExistsError(
            f"{location.display} has files that no checkpoint wrote ({_shown(others)}), which would be deleted with "
            f"it: {remedy.format(location.display)}. Nothing was changed"
        )


def warn_of_other_files(location: Location, find_foreign: FindForeign) -> None:
    """Log the files that no checkpoint wrote, before a save deletes them with the old checkpoint. Lists the directory.

    Args:
        location: the location of the checkpoint.
        find_foreign: finds a checkpoint of other software.
    """
    contents = _Contents(location.store)
    if others := contents.others(None if ROOT_KEY in contents.keys else find_foreign(location)):
        logger.warning(
            "%s has files that no checkpoint wrote (%s), which are deleted with the checkpoint that is replaced",
            location.display,
            _shown(others),
        )


def _shown(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return f"{', '.join(keys[:_SHOWN])}{more}"


def find_other_files(store: StorageBackend) -> Sequence[str]:
    """Return the files in the directory of a checkpoint of ckptcore that no checkpoint wrote, sorted."""
    return _Contents(store).others()


def _is_known(key: str) -> bool:
    """Return True for the key of a temporary file, or of a file in the hidden directory of a save."""
    return any(re.fullmatch(_TEMPORARY, name) for name in key.split("/"))


class _Contents:
    """The keys in a directory, and the roots in its subdirectories. Each root is read once.

    Attributes:
        keys: the keys of all objects, sorted.
    """

    def __init__(self, store: StorageBackend) -> None:
        """List the directory."""
        self.keys = list(store.list())
        self._store = store
        self._roots: dict[str, bytes | None] = {}

    def nested(self) -> Iterator[str]:
        """Yield the directories of nested checkpoints that are not members, files or exports of this checkpoint.

        Reads only their roots. If a member contains a nested checkpoint, also reads the member's table of objects: the
        saved Python object may have written the nested checkpoint as its own files.
        """
        names = [key.removesuffix(f"/{ROOT_KEY}") for key in self.keys if key.endswith(f"/{ROOT_KEY}")]
        heads = {name: read_head(self._read(name) or b"") for name in names}
        members = [name for name, head in heads.items() if head is not None and head.role == "member"]
        for name, head in heads.items():
            is_other = head is not None and head.state == "committed" and head.role == "checkpoint"
            if is_other and not any(self._stores(member, name) for member in members):
                yield name

    def others(self, owns: OwnKeys | None = None) -> list[str]:
        """Return the keys that no checkpoint wrote, sorted. Files whose owner is unknown are left out.

        If the root is missing or cannot be read, the result contains the files with names that no save writes. If the
        root is the claim of a failed save, such files are left out if they are in a subdirectory, because an object may
        have written them there. If the root of a subdirectory cannot be read, all its files are left out.

        Args:
            owns: recognises the files of a checkpoint of other software; None if ckptcore wrote it.
        """
        keys = [key for key in self.keys if not _is_known(key)]
        if owns is None:
            return sorted(self._others("", keys))
        # A composite that lost its root may match as a checkpoint of other software. Its members show that it is a
        # composite.
        is_composite = any(key.endswith(f"/{ROOT_KEY}") for key in keys)
        return sorted(set(self._others("", keys) if is_composite else keys).difference(owns(self.keys)))

    def _others(self, directory: str, keys: Sequence[str]) -> Iterator[str]:
        """Yield the keys below a directory that its root does not name."""
        prefix = f"{directory}/" if directory else ""
        summary = self._summary(directory)
        is_claimed = summary is not None and not summary.committed
        if is_claimed:
            summary = None
        named: set[str] = set()
        if summary is not None:
            own = (*(summary.objects or ()), *summary.parts, *summary.files, summary.index_key)
            named.update([prefix + key for key in own])
        elif directory:
            return
        inner = _outermost([
            key.removesuffix(f"/{ROOT_KEY}") for key in keys if key.endswith(f"/{ROOT_KEY}") and key not in named
            and key != prefix + ROOT_KEY
        ])  # fmt: skip
        arrays = {key.rpartition("/")[0] for key in keys if key.endswith(_OF_ARRAYS)} if summary is None else set()
        below: dict[str, list[str]] = {name: [] for name in inner}
        for key in keys:
            within = key.removeprefix(prefix)
            top, _, rest = within.partition("/")
            above = set(_directories(key))
            owner = next((name for name in above if name in below), None)
            if owner is not None:
                below[owner].append(key)
            elif key in named or re.fullmatch(_RESERVED, top):
                continue
            elif summary is None:
                if not (re.fullmatch(_OBJECT, key) or above & arrays or (is_claimed and rest)):
                    yield key
            elif rest and _is_member(summary, top):
                continue  # in a checkpointable without a root, whose files are unknown
            else:
                yield key
        for name, inside in below.items():
            yield from self._others(name, inside)

    def _summary(self, directory: str) -> RootSummary | None:
        """Return the summary of the root in a directory, with all objects; None if there is no readable root."""
        if (data := self._read(directory)) is None:
            return None
        try:
            summary = summarize_root(data)
            if summary.objects is not None:
                return summary
            store = subdirectory(self._store, directory)
            root = decode_root(data, lambda key, size: store.get(key, 0, size))
        except (CorruptCheckpointError, UnsupportedVersionError, ObjectNotFoundError):
            return None
        return summary._replace(objects=dict.fromkeys(root.objects, 0)) if isinstance(root, Root) else None

    def _stores(self, member: str, name: str) -> bool:
        """Return True if the root in directory `name` is a file of a member: an object may store a checkpoint."""
        if not name.startswith(f"{member}/"):
            return False
        summary = self._summary(member)  # None: unknown, so the member is removed as a whole
        return summary is None or f"{name.removeprefix(f'{member}/')}/{ROOT_KEY}" in (summary.objects or ())

    def _read(self, directory: str) -> bytes | None:
        if directory not in self._roots:
            try:
                self._roots[directory] = subdirectory(self._store, directory).get(ROOT_KEY)
            except (ObjectNotFoundError, ObjectUnavailableError):  # unavailable: in archive storage
                self._roots[directory] = None
        return self._roots[directory]


def _is_member(summary: RootSummary, directory: str) -> bool:
    members = summary.members or {}
    name, rank = split_rank(directory) or (directory, 0)
    return directory in members or (name in members and rank < (members[name].processes or 1))


def _outermost(names: Iterable[str]) -> list[str]:
    """Return the directories that are not inside another of the given directories."""
    every = set(names)
    return [name for name in sorted(every) if every.isdisjoint(_directories(name))]


def _directories(key: str) -> Iterator[str]:
    """Yield the directories around a key, from the outermost to the innermost."""
    return (key[:index] for index, character in enumerate(key) if character == "/")
