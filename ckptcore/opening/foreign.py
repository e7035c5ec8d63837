"""Checkpoints of other software: each installed layout inspects the location."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from ckptcore.commit.location import Location
from ckptcore.commit.root import NO_LEAVES, ROOT_KEY, Member
from ckptcore.commit.root_json import HEAD_BYTES, read_head
from ckptcore.commit.stored_root import LocationVersion, has_members, read_version
from ckptcore.context import Context
from ckptcore.distributions import DISTRIBUTIONS, import_name, install_hint
from ckptcore.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CompositeCheckpointError,
    CorruptCheckpointError,
    InvalidLocationError,
    ObjectNotFoundError,
    UncommittedCheckpointError,
)
from ckptcore.io.chunk_reads import StoredFormat
from ckptcore.io.reader import ObjectReader
from ckptcore.model.file_kinds import FILE_HEAD_BYTES, directory_kind, file_kind, is_text, whole_formats
from ckptcore.model.metadata import UNREADABLE, ObjectRecord, TreeMetadata, check_key
from ckptcore.opening.checkpoint import (
    Checkpoint,
    CompositeCheckpoint,
    Origin,
    format_names,
    not_finalized,
    reader_of,
    several_checkpointables,
)
from ckptcore.opening.folders import find_steps, has_own_checkpoint, held_in
from ckptcore.protocols import Layout, StorageBackend
from ckptcore.runtime import runtime_of

if TYPE_CHECKING:
    from ckptcore.commit.stored_root import OwnKeys

_FILES_TRIED: Final = 20
"""Maximum number of files that are inspected for the message about a directory that is not a checkpoint."""

_CHECK_PATH: Final = "check the path, or list its parent directory"
_STEPS_SHOWN: Final = 10


_MAX_NAMES: Final = 1000
"""Maximum number of names in a directory whose files are inspected. See `_has_single_files`."""


def open_foreign(location: Location, version: LocationVersion, context: Context) -> Checkpoint:
    """Open a tree that other software wrote.

    Raises:
        CheckpointNotFoundError: no installed layout finds a checkpoint.
        CompositeCheckpointError: the location has several checkpointables, and none of them is loaded by default.
        UncommittedCheckpointError: the location has a partial save that is not finalized.
    """
    try:
        return inspect_tree(location, version, context)
    except UncommittedCheckpointError:
        raise
    except CheckpointNotFoundError:
        from ckptcore.commit.method import find_partial  # only if no layout finds a tree

        composite = find_composite(location, version, context)
        if composite is not None:
            raise several_checkpointables(location, list(composite.members)) from None
        partial = find_partial(location)
        if partial is None:
            raise
        raise not_finalized(location, partial) from None


def inspect_tree(location: Location, version: LocationVersion, context: Context) -> Checkpoint:
    """Open the tree with the first layout that recognises it.

    Raises:
        CheckpointNotFoundError: no layout finds a tree. This includes directories of separate files, and directories
            with checkpoints of several formats.
        CorruptCheckpointError: the location has a composite of ckptcore without its root.
    """
    entry = location.name if version.is_object else None
    storage = location.parent if entry is not None else location.store
    if entry is None and not version.names:
        raise _nothing_at(location)
    _expect_no_root(location, version)
    _expect_one_format(location, () if entry is not None else version.names)
    store = _reader(storage, context)
    registry = runtime_of(context).registry
    for layout in registry.layouts():
        item = layout.inspect(store, entry)
        if item is not None and not (entry is None and _is_folder(item.tree, storage, version.names)):
            origin = Origin(item.writer, item.custom, item.metrics, item.created, item.unused, item.files)
            return Checkpoint(location, version, None, StoredFormat(layout, item.state), item.tree, store, origin)
    if entry is None and has_members(storage, storage.list_names()):
        raise _lost_root(location)
    hint = _install_hint(entry, version.names)
    if entry is None and not hint:
        if steps := find_steps(version.names):
            raise CheckpointNotFoundError(_steps_message(location, steps, context))
        if file := _single_file(store, version.names, registry.layouts()):
            raise CheckpointNotFoundError(_files_message(location, file, store, version.names))
        if held := held_in(location, version.names, context):
            raise CheckpointNotFoundError(f"{location.display} is not a checkpoint. It holds {held}")
    tried = ", ".join([layout.name for layout in registry.layouts()])
    failed = "".join([f"; {name} cannot be used: {reason}" for name, reason in registry.failed_layouts().items()])
    remedy = f"install support for its format with {hint}" if hint else _way_on(location, store, entry, version.names)
    raise CheckpointNotFoundError(
        f"{location.display} is not a checkpoint that an installed layout reads (tried {tried}{failed}): {remedy}"
    )


def _is_folder(tree: TreeMetadata, store: StorageBackend, names: Collection[str]) -> bool:
    """Return True if a layout mistook a folder of ckptcore checkpoints for one tree with unreadable leaves."""
    return UNREADABLE in map(attrgetter("kind"), tree.leaves) and has_own_checkpoint(store, names)


def _install_hint(file: str | None, names: Sequence[str]) -> str:
    """Return the command that installs a layout for a file, or for a directory by its names; empty if unknown."""
    kind = directory_kind(names) if file is None else None
    of_kind = install_hint(layout=kind.layout) if kind is not None and kind.layout else ""
    return of_kind or install_hint(files=names if file is None else [file])


def _nothing_at(location: Location) -> CheckpointNotFoundError:
    way_on = _CHECK_PATH
    with contextlib.suppress(CheckpointError):  # the parent directory cannot be read, or does not exist either
        way_on = _way_from_parent(location)
    return CheckpointNotFoundError(f"{location.display} does not exist or is empty: {way_on}")


def _way_from_parent(location: Location) -> str:
    """Return advice for a missing location. Checks if the parent directory is a checkpoint or has steps."""
    within, names = location.display.rpartition("/")[0] or ".", location.parent.list_names()
    directories = [name[:-1] for name in names if name[-1] == "/" and name[0] != "."]
    if ROOT_KEY in names and has_members(location.parent, names):
        return f"{within} is a checkpoint of several checkpointables: {format_names(directories)}"
    if ROOT_KEY in names:
        part = f"select=ckptcore.select.names({location.name!r})"
        return (
            f"{within} is a checkpoint of one tree, which has no directories. Load a part of it with "
            f"ckptcore.load({within!r}, {part}), or in place with "
            f"ckptcore.load_into({within!r}, {{{location.name!r}: target}}, {part})"
        )
    if find_steps([f"{location.name}/"]) and (steps := find_steps(names)):
        return f"{_CHECK_PATH}: its steps are {_format_steps(list(steps.values()))}"
    if "!/" in location.identity:  # in an archive: users cannot easily list its names
        return f"check the path: {within} has {format_names(names)}"
    return _CHECK_PATH


def _format_steps(names: Sequence[str]) -> str:
    return ", ".join(names if len(names) <= _STEPS_SHOWN else [names[0], "...", *names[1 - _STEPS_SHOWN :]])


def _way_on(location: Location, store: ObjectReader, file: str | None, names: Sequence[str]) -> str:
    """Describe a file or directory that no layout recognises, and return advice on what to do."""
    if file is None:
        kind = directory_kind(names)
        content = f"has {format_names(names)}{_kind_inside(location, store, names) if kind is None else ''}"
    else:
        size = store.size(file)
        head = store.get(file, 0, min(size, FILE_HEAD_BYTES)) if size else b""
        kind = file_kind(head, file)
        content = f"begins with {head[:8]!r}"
    if kind is not None and kind.is_archive:
        return f"it is {kind.noun}{_inside_archive(location, kind.remedy)}"
    if kind is not None and kind.layout and (hint := install_hint(layout=kind.layout)):
        return f"it is {kind.noun}: install support for its format with {hint}"
    if kind is not None:
        return f"it is {kind}"
    return (
        f"it {content}. Read it with the software that wrote it and pass the state to ckptcore.save, or load another "
        "location"
    )


def _inside_archive(location: Location, unpack: str) -> str:
    """List the files of a zip or tar archive, and show how to load one of them by its location."""
    try:
        # The function is from a plugin of this project, so its arguments are known.
        open_archive: Any = import_name("open_archive", purpose="a location in the archive, such as NAME.zip!/FILE,")
        archive: StorageBackend = open_archive(location.parent, location.name, location.display)
        names = [key.partition("/")[2] for key in archive.list()]
    except CheckpointError as error:
        return f": {unpack}. {error}"
    if not names:
        return " without files: restore it from a copy, or load another one"
    suffixes = (".safetensors", ".th", *[suffix for distribution in DISTRIBUTIONS for suffix in distribution.suffixes])
    likely = next((name for name in names if name.endswith(suffixes)), names[0])
    return (
        f". It has {format_names(names)}. Load one of them by its own location, such as "
        f"{location.display}!/{likely if likely.isprintable() else 'NAME'}"
    )


def _kind_inside(location: Location, store: ObjectReader, names: Sequence[str]) -> str:
    """Describe the first file or directory of a known kind, in parentheses; empty if there is none.

    Prefers binary files, then directories, then text files.
    """
    description = ""
    for file in [name for name in names if name[-1] != "/"][:_FILES_TRIED]:
        with contextlib.suppress(CheckpointError):  # a file that cannot be read
            head = store.get(file, 0, min(store.size(file), FILE_HEAD_BYTES))
            if (kind := file_kind(head, file)) is not None and not (description and is_text(head)):
                description = f" ({format_names([file])} is {kind})"
                if not is_text(head):
                    return description
    for directory in [name.removesuffix("/") for name in names if name[-1] == "/"][:_FILES_TRIED]:
        with contextlib.suppress(CheckpointError):
            if (kind := directory_kind(store.list_names(directory))) is not None:
                return f" ({location.display.rstrip('/')}/{format_names([directory])} is {kind})"
    return description


def open_foreign_files(location: Location, version: LocationVersion, context: Context) -> Checkpoint:
    """Open all files at a location as the files of an object that other software saved.

    Raises:
        CheckpointNotFoundError: the location has no files.
    """
    _expect_no_root(location, version)
    objects = {key: ObjectRecord(key, location.store.size(key)) for key in location.store.list()}
    if not objects:
        raise _nothing_at(location)
    store = reader_of(location.store, objects, context)
    return Checkpoint(location, version, None, StoredFormat(None, None), NO_LEAVES, store)


def find_composite(location: Location, version: LocationVersion, context: Context) -> CompositeCheckpoint | None:
    """Return the composite that the first matching layout finds; None if no layout finds one.

    Raises:
        CorruptCheckpointError: the layout found damage, the name of a member is not a valid directory name, or the
            location has a composite of ckptcore without its root.
    """
    if not version.names:
        return None
    _expect_no_root(location, version)
    _expect_one_format(location, version.names)
    store = _reader(location.store, context)
    for layout in runtime_of(context).registry.layouts():
        composite = layout.inspect_composite(store)
        if composite is None or has_own_checkpoint(location.store, [f"{name}/" for name in composite.members]):
            continue
        for name in composite.members:
            _check_member(location, name)
        members = {name: Member(kind) for name, kind in composite.members.items()}
        origin = Origin(composite.writer, composite.custom, composite.metrics, composite.created)
        return CompositeCheckpoint(location, version, None, members, origin, composite.default)
    return None


def _reader(storage: StorageBackend, context: Context) -> ObjectReader:
    return ObjectReader(storage, {}, runtime_of(context).io_threads, verify=context.io.verify)


def _expect_no_root(location: Location, version: LocationVersion) -> None:
    """Refuse a directory whose listing has a root that could not be read.

    Raises:
        CheckpointNotFoundError: the directory lists a root.
    """
    if ROOT_KEY in version.names:
        raise CheckpointNotFoundError(
            f"there is no checkpoint at {location.display}: {ROOT_KEY} is listed but cannot be read. It is being "
            "written or deleted, or is a broken link: load again later, or remove the link"
        )


def _expect_one_format(location: Location, names: Sequence[str]) -> None:
    """Refuse a directory with checkpoints of several formats that each use the whole directory.

    Raises:
        CheckpointNotFoundError: names the formats.
    """
    formats = whole_formats(names)
    if len(formats) > 1:
        within = location.display.rstrip("/")
        places = [f"{within}/{name} for {form}" for form, name in formats.items() if name]
        load = f"Load one of them by its own location ({', '.join(places)}), or move" if places else "Move"
        raise CheckpointNotFoundError(
            f"{location.display} has checkpoints of several formats: {', '.join(formats)}. {load} the files of one to "
            "a directory of its own"
        )


def _check_member(location: Location, name: str) -> None:
    """Check that the name of a member is a valid directory name, and that ckptcore did not write the member.

    Raises:
        CorruptCheckpointError: the name is invalid, or ckptcore wrote the member and the root of its composite is
            missing.
    """
    reason = "a name is one directory and has no '/'" if "/" in name else ""
    try:
        check_key(name)
    except InvalidLocationError as error:
        reason = str(error)
    if reason:
        raise CorruptCheckpointError(f"{location.display} names {name[:80]!r} as a checkpointable: {reason}")
    try:
        head = read_head(location.store.get(f"{name}/{ROOT_KEY}", 0, HEAD_BYTES))
    except ObjectNotFoundError:
        return
    if head is not None and head.role == "member":
        raise _lost_root(location)


def _single_file(store: ObjectReader, names: Sequence[str], layouts: Sequence[Layout]) -> str | None:
    """Return the first file in a directory that is a checkpoint by itself; None if there is none."""
    files = [name for name in names if not name.endswith("/")]
    for file in files[:_FILES_TRIED]:
        for layout in layouts:
            with contextlib.suppress(CheckpointError):  # no layout can read this file
                if layout.inspect(store, file) is not None:
                    return file
    return None


def _files_message(location: Location, file: str, store: ObjectReader, names: Sequence[str]) -> str:
    """Return the message for a directory of separate files. Names the kind of each file if its first bytes show it."""
    described = []
    for name in [name for name in names if name[-1] != "/"][:_FILES_TRIED]:
        head = b""
        with contextlib.suppress(CheckpointError):  # a file that cannot be read
            head = store.get(name, 0, min(store.size(name), FILE_HEAD_BYTES))
        if is_text(head) and name != file:
            continue  # a configuration, a tokenizer
        kind = file_kind(head, name)
        shown = format_names([name])
        described.append(shown if kind is None or kind.is_archive else f"{shown}: {kind.noun.partition(',')[0]}")
    within = location.display.rstrip("/")
    return (
        f"{location.display} is not one checkpoint: it has separate files ({'; '.join(described)}), and no layout "
        f"reads them together. Load each of them by its own location, such as {within}/{file}"
    )


def _steps_message(location: Location, steps: Mapping[int, str], context: Context) -> str:
    """Return the message for a directory of steps. Does not choose one of them.

    If the newest step has files but is not a checkpoint, the message includes the reason.
    """
    names = list(steps.values())
    within = location.display.rstrip("/")
    newest = replace(
        location,
        display=f"{within}/{names[-1]}",
        parent=location.store,
        name=names[-1],
        identity=f"{location.identity}/{names[-1]}",
    )
    version = read_version(newest)
    try:
        if version.root is None and version.names:
            open_foreign(newest, version, context)
    except (CompositeCheckpointError, CorruptCheckpointError, UncommittedCheckpointError):
        pass  # loading the newest step raises this error with its details
    except CheckpointNotFoundError as error:
        return f"{location.display} is not a checkpoint, and neither is its newest step: {error}"
    return (
        f"{location.display} is not a checkpoint. Its names look like a directory of steps ({_format_steps(names)}): "
        f"load a step by its own location, such as {within}/{names[-1]}, or the newest with "
        f"CheckpointReader({within!r}).load()"
    )


def _lost_root(location: Location) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{location.display} was a checkpoint of several checkpointables, but its {ROOT_KEY} is missing: restore that "
        "from a copy, load another checkpoint, or copy one of its directories elsewhere to load it alone",
        key=ROOT_KEY,
    )


def owner_of_files(storage: StorageBackend, context: Context) -> OwnKeys | None:
    """Return a function that finds the files of the foreign checkpoint in a storage; None if it has no such checkpoint.

    Only counts a checkpoint that is the whole directory, not single files in it. See `_has_single_files`.
    """
    store = _reader(storage, context)
    for layout in runtime_of(context).registry.layouts():
        try:
            is_checkpoint = layout.inspect(store, None) is not None
        except CompositeCheckpointError:
            is_checkpoint = True  # a checkpoint of several items
        except CheckpointError:
            return None  # unfinished or damaged: its extent is unknown
        if is_checkpoint:
            return None if _has_single_files(layout, store) else _own_keys(layout, store)
    return None


def _own_keys(layout: Layout, store: ObjectReader) -> OwnKeys | None:
    """Return a function that finds the files of a layout's checkpoint; None if they cannot be determined."""
    try:
        composite = layout.inspect_composite(store)
    except CheckpointError:
        return None
    return functools.partial(layout.own_keys, members=() if composite is None else tuple(composite.members))


def _has_single_files(layout: Layout, store: ObjectReader) -> bool:
    """Return True if a file in the directory is a checkpoint by itself, like ``model.safetensors``.

    Such a directory is the user's: it may have other files, such as a tokenizer or a configuration. Also returns True
    for a directory with too many names to inspect.
    """
    names = store.list_names("")
    if len(names) > _MAX_NAMES:
        return True  # checkpoints of other software have few names
    for name in [name for name in names if not name.endswith("/") and not name.startswith(".")]:
        try:
            if layout.inspect(store, name) is not None:
                return True
        except CheckpointError:
            continue  # not a file of this layout
    return False
