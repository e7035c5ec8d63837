"""The contents of the directory of a checkpoint, and whether a save or a deletion may remove them.

A directory can contain other checkpoints, and files that no checkpoint wrote.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from ckptcore.commit.names import is_hidden_name
from ckptcore.commit.root import PARTIAL_KEY, ROOT_KEY, Root, RootSummary, SaveOrder, split_rank
from ckptcore.commit.root_json import HEAD_BYTES, is_claim, is_partial, read_head, summarize_root
from ckptcore.commit.stored_root import parse_root, root_bytes
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.errors import (
    CheckpointExistsError,
    CorruptCheckpointError,
    InvalidLocationError,
    ObjectNotFoundError,
    ObjectUnavailableError,
    StorageError,
    UnsupportedVersionError,
)
from ckptcore.events import logger_named
from ckptcore.protocols import StorageBackend

if TYPE_CHECKING:
    from ckptcore.commit.location import Location

logger = logger_named("ckptcore.commit")

OwnKeys: TypeAlias = Callable[[Sequence[str]], Collection[str]]
"""Returns which of all keys in a directory belong to the checkpoint of other software there."""

Overwrite: TypeAlias = bool | Literal["best-effort", "non-atomic", "keep-other-files", "with-other-files"]
"""True if a save replaces a checkpoint at its location atomically. See `ckptcore.save`."""

OVERWRITES: Final = (True, False, "best-effort", "non-atomic", "keep-other-files", "with-other-files")

FindForeign: TypeAlias = "Callable[[Location], OwnKeys | None]"
"""Returns which files belong to the checkpoint at a location that other software wrote; None if there is none."""

ExistingTarget: TypeAlias = Literal["nothing", "claim", "checkpoint"]
"""The content of a location: nothing, the claim of a save, or a checkpoint or other files that are replaced."""

_MAX_MEMBERS: Final = 1000
"""Maximum number of subdirectories whose roots are read. Composites have few members."""

_KEEP_FILES: Final = "pass overwrite='keep-other-files' to keep them (one tree in the layout dcp or safetensors), or "
_WITH_FILES: Final = "pass overwrite='with-other-files' to delete them too, or "
_DELETE_FIRST: Final = "delete the directory first with ckptcore.delete({!r}, other_files=True), or "

_SHOWN: Final = 5

_DELETE_FILES: Final = "move them elsewhere, or delete them too with ckptcore.delete({!r}, other_files=True)"
"""How to delete a checkpoint with files that no checkpoint wrote."""

_RESERVED: Final = (
    rf"(?s){re.escape(ROOT_KEY)}|{re.escape(PARTIAL_KEY)}"
    r"|checkpoint\.(journal\.json|replaces|copies|[0-9a-f]{16}\..*)"
)
"""The names of files and directories that ckptcore alone writes next to a root. Not ``checkpoint.pt``."""

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
)
"""The keys of files that saves write. A checkpoint has others, too, which only its root names."""

_OF_ARRAYS: Final = ("/.zarray", "/zarr.json")


def none_foreign(location: Location) -> OwnKeys | None:
    """Return None: see `FindForeign`."""
    return None


def refuse_to_replace(
    location: Location, overwrite: Overwrite, find_foreign: FindForeign = none_foreign
) -> ExistingTarget:
    """Check that a save may write to a location. Return what it replaces.

    Args:
        location: the location of the save.
        overwrite: whether a checkpoint is replaced.
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
    if is_hidden_name(location.name):
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
        # A composite that lost its root has files of its layout, too: those by which other software finds it.
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
    keeps = overwrite in ("keep-other-files", "with-other-files")
    remedy = _KEEP_FILES if location.commits.replaces_atomically else ""
    remedy += _WITH_FILES + ("" if root is None else _DELETE_FIRST)  # files without a root are not deleted
    expect_removable(location, other_files=keeps, remedy=f"{remedy}save elsewhere", owns=owns)
    return existing


def next_order(location: Location, overwrite: Overwrite) -> SaveOrder:
    """Return the order of a save: above that of the checkpoint that it replaces.

    Args:
        location: the location of the save.
        overwrite: whether a checkpoint is replaced.
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


def expect_removable(
    location: Location, *, other_files: bool, remedy: str = _DELETE_FILES, owns: OwnKeys | None = None
) -> None:
    """Refuse to remove a checkpoint if more than the checkpoint would be removed with its directory. Lists it.

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
        location.commits.sweep(location)  # a killed save may have moved objects into the directory
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
    """Return True for the key of a temporary file, or in a hidden directory of a save."""
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
        """Yield the directories of nested checkpoints that are not members, stored files or exports of this one.

        Reads only the root of each, unless a member may store the nested checkpoint among its files.
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

        Next to a root that cannot be read, or without a root, all files with names that no save writes count as files
        that no checkpoint wrote. Next to the claim of a save that has failed, only such files outside of directories:
        the save may have had an object that writes files of its own. In subdirectories, the owners are unknown.

        Args:
            owns: recognises the files of a checkpoint of other software; None if ckptcore wrote it.
        """
        keys = [key for key in self.keys if not _is_known(key)]
        if owns is None:
            return sorted(self._others("", keys))
        # A composite that lost its root has members, and files of its layout by which other software finds it.
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
            own = (*(summary.objects or ()), *summary.parts, *(summary.files or ()), summary.index_key)
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
                continue  # of a checkpointable without a root, so that nothing says what it had
            elif not rest and summary.members is not None and summary.files is None:
                continue  # an older version did not record these files
            else:
                yield key
        for name, inside in below.items():
            yield from self._others(name, inside)

    def _summary(self, directory: str) -> RootSummary | None:
        """Return the summary of the root in a directory, with all objects; None if there is no readable one."""
        if (data := self._read(directory)) is None:
            return None
        try:
            summary = summarize_root(data)
            if summary.objects is not None:
                return summary
            root = parse_root(subdirectory(self._store, directory), data)
        except (CorruptCheckpointError, UnsupportedVersionError):
            return None
        return summary._replace(objects=dict.fromkeys(root.objects, 0)) if isinstance(root, Root) else None

    def _stores(self, member: str, name: str) -> bool:
        """Return True if the root in a directory is a file of a member: an object may store a checkpoint."""
        if not name.startswith(f"{member}/"):
            return False
        summary = self._summary(member)  # None: unknown, so the member is removed as a whole
        return summary is None or f"{name.removeprefix(f'{member}/')}/{ROOT_KEY}" in (summary.objects or ())

    def _read(self, directory: str) -> bytes | None:
        if directory not in self._roots:
            try:
                self._roots[directory] = subdirectory(self._store, directory).get(ROOT_KEY)
            except (ObjectNotFoundError, ObjectUnavailableError):  # the second: in an archive
                self._roots[directory] = None
        return self._roots[directory]


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


def _is_member(summary: RootSummary, directory: str) -> bool:
    members = summary.members or {}
    name, rank = split_rank(directory) or (directory, 0)
    return directory in members or (name in members and rank < (members[name].processes or 1))


def _outermost(names: Iterable[str]) -> list[str]:
    """Return the directories that are in no other one of them."""
    every = set(names)
    return [name for name in sorted(every) if every.isdisjoint(_directories(name))]


def _directories(key: str) -> Iterator[str]:
    """Yield the directories around a key, from the outermost to the innermost."""
    return (key[:index] for index, character in enumerate(key) if character == "/")
