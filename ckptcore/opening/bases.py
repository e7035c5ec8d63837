"""Bases: the checkpoints that store arrays of an update, or those that a chain of differences begins with."""

from __future__ import annotations

import dataclasses
import hashlib
import posixpath
import re
from collections.abc import Callable
from typing import Final

from ckptcore.builtin.local_calls import real_path
from ckptcore.commit.location import Location, LocationAddress, open_address
from ckptcore.commit.root import Base, Root, stored_numbers, stored_tree
from ckptcore.commit.stored_root import LocationVersion, parse_root, read_version, root_bytes
from ckptcore.context import Context
from ckptcore.derivations import Stored
from ckptcore.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CompositeCheckpointError,
    CorruptCheckpointError,
    InvalidLocationError,
    UnsupportedVersionError,
)
from ckptcore.io.threads import map_ordered, requests_of
from ckptcore.model.metadata import ArrayRecord
from ckptcore.model.tree import format_path
from ckptcore.opening.checkpoint import Checkpoint
from ckptcore.opening.derived import derive
from ckptcore.protocols import BaseReference, ChainLink, DerivedArray
from ckptcore.runtime import runtime_of

_MAX_LINKS: Final = 1 << 14
"""Maximum number of checkpoints of a chain that have a base."""

_MAX_NAME: Final = 255
"""Maximum length of the name of a base. It may be hostile, and file systems have this limit."""

_MAX_NESTED: Final = 4
"""Maximum number of updates that are bases of each other through chains."""

_AUTHORITY: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^/]*")


def base_location(location: Location, base: Base, context: Context) -> Location:
    """Return the location of a base of a checkpoint.

    Raises:
        InvalidLocationError: the Context does not allow this location, or the location is outside of the storage.
    """
    display = posixpath.join(posixpath.dirname(location.display.rstrip("/")), base.path)
    address = location.address
    path = f"{address.parent}/{base.path}"
    target = real_path(path) if base.is_sibling and address.scheme == "file" else path
    if base.is_sibling and target == path:
        identity = f"{address.scheme}:{path}"
        return dataclasses.replace(location, display=display, name=base.path, identity=identity, of_host=False)
    if context.io.bases != "anywhere":
        display += f" (a link to {target}, which leads out of it)" if target != path else ""
        raise InvalidLocationError(
            f"{location.display} refers to a base at {display}, but only bases in the same directory are read. If you "
            'trust its author, pass context=Context(io=IOOptions(bases="anywhere")), or ask the author for a copy by '
            "ckptcore.copy"
        )
    if target != path:
        parent, _, name = target.rpartition("/")
        return open_address(LocationAddress(display, address.scheme, parent, name), runtime_of(context).storages)
    authority = authority_of(address.parent)
    names = [name for name in address.parent[len(authority) :].split("/") if name]
    for name in base.path.split("/"):
        if name != "..":
            names.append(name)
        elif names:
            names.pop()
        else:
            raise InvalidLocationError(
                f"{location.display} refers to a base at {display}, which is outside of its storage"
            )
    parent = "/".join([authority, *names[:-1]]) or "/"
    return open_address(LocationAddress(display, address.scheme, parent, names[-1]), runtime_of(context).storages)


def authority_of(path: str) -> str:
    """Return the scheme and the host of a path, such as ``s3://bucket``; empty for a path of a file system."""
    authority = _AUTHORITY.match(path)
    return "" if authority is None else authority[0]


def read_base(referring: str, at: Location, save_id: str) -> tuple[LocationVersion, Root]:
    """Return the root and the version of a base.

    Args:
        referring: the display name of the checkpoint that refers to the base.
        at: the location of the base.
        save_id: the id of the save that the referring checkpoint expects there; empty for any.

    Raises:
        CorruptCheckpointError: the base was deleted, was replaced by another save, or cannot be read.
        UnsupportedVersionError: the format of the base has an unsupported version.
    """
    try:
        version = read_version(at)
        if isinstance(version.root, str):
            raise InvalidLocationError(version.root)
        root = None if version.root is None else parse_root(at.store, version.root)
    except (InvalidLocationError, CorruptCheckpointError, UnsupportedVersionError) as error:
        kind = CorruptCheckpointError if isinstance(error, InvalidLocationError) else type(error)
        raise kind(f"{referring} refers to {at.display}, which cannot be read: {error}") from error
    if isinstance(root, Root) and save_id in ("", root.save_id):
        return version, root
    state = "was deleted" if root is None else f"was replaced by another save ({root.save_id})"
    raise CorruptCheckpointError(
        f"{referring} has arrays in {at.display} (save {save_id}), which {state}: restore it, or load another "
        "checkpoint. Copies by ckptcore.copy need no base"
    )


def open_base(referring: str, at: Location, save_id: str, context: Context, nested: int = 0) -> Checkpoint:
    """Open a base. Its tree has only the arrays that the base stores itself, without those that it refers to.

    Raises:
        CorruptCheckpointError: see `read_base`; also if the base has files instead of a tree.
        UnsupportedVersionError: see `read_base`.
    """
    version, root = read_base(referring, at, save_id)
    if not root.layout:
        raise CorruptCheckpointError(f"{referring} refers to {at.display}, which has no tree. Load another checkpoint")
    tree = stored_tree(root.tree, root.references)
    return with_chain(dataclasses.replace(Checkpoint.of_root(at, version, root, context), tree=tree), context, nested)


def with_bases(opened: Checkpoint, root: Root, context: Context, nested: int = 0) -> Checkpoint:
    """Open the bases of a checkpoint. Returns the checkpoint with all of its arrays.

    Args:
        opened: the checkpoint, opened as if it stored all arrays itself.
        root: its root.
        context: options.
        nested: the number of updates whose bases are being opened.

    Raises:
        CorruptCheckpointError: a base was deleted or replaced, cannot be read, or lacks an array that the checkpoint
            refers to.
        InvalidLocationError: the Context does not allow the location of a base.
    """
    references, location = root.references, opened.location
    own = dataclasses.replace(opened, tree=stored_tree(root.tree, references))

    def open_one(base: Base) -> Checkpoint:
        return open_base(location.display, base_location(location, base, context), base.save_id, context, nested)

    parallelism = requests_of(location.parent).concurrency
    bases = map_ordered(runtime_of(context).io_threads, references.bases, open_one, parallelism=parallelism)
    derivations: dict[int, DerivedArray] = {}
    values: dict[int, int] = {}
    for leaf, number in stored_numbers(root.tree, references).items():
        record = root.tree.leaves[leaf]
        if not isinstance(record, ArrayRecord):
            values[leaf] = number
        elif leaf not in root.tree.aliases:
            derivations[leaf] = Stored(record.spec, number)
    numbers = [stored_numbers(base.root.tree, base.root.references) for base in bases if base.root is not None]
    for leaf, base, stored in zip(references.leaf, references.base, references.stored, strict=True):
        record = root.tree.leaves[leaf]
        assert isinstance(record, ArrayRecord)  # references were checked
        at = numbers[base].get(stored)
        stored_record = None if at is None else bases[base].tree.leaves[at]
        spec = stored_record.spec if isinstance(stored_record, ArrayRecord) else None
        if at is None or spec != record.spec:
            raise CorruptCheckpointError(
                f"{location.display} refers to {bases[base].location.display} for "
                f"{format_path(root.tree.paths[leaf])} ({record.spec}), which does not store it (found "
                f"{spec or 'no array'}): the checkpoint is damaged. Load another one"
            )
        derivations[leaf] = Stored(record.spec, at, 1 + base)
    return derive(
        own,
        root.tree,
        derivations,
        values=values,
        additional=bases,
        most_bytes=context.memory.load_bytes,
        description=f"with arrays of {', '.join([base.save_id for base in references.bases])}",
        is_builtin=True,
    )


def with_chain(
    opened: Checkpoint,
    context: Context,
    nested: int = 0,
    known: Callable[[BaseReference], Checkpoint | None] = lambda reference: None,
) -> Checkpoint:
    """Open the chain of a checkpoint whose layout states a base. Returns the checkpoint with all of its arrays.

    Returns the same checkpoint if its layout states none.

    Args:
        opened: the checkpoint, opened as if it stored all arrays itself.
        context: options.
        nested: the number of updates whose bases are being opened.
        known: returns an open checkpoint with the arrays of a base, such as a local copy, with which the chain ends;
            None to open the base.

    Raises:
        CorruptCheckpointError: a base was deleted, was replaced or cannot be read, does not fit, or needs the
            checkpoint itself; or the chain is too long.
    """
    links: list[Checkpoint] = []
    names = {opened.location.name}
    last = opened
    is_known = False
    while not is_known and not last.is_files and (reference := _base_of(last)) is not None:
        links.append(last)
        if last.layout.name != opened.layout.name:
            raise CorruptCheckpointError(
                f"{opened.location.display} needs {last.location.display}, which has the layout {last.layout.name!r} "
                f"and a base of its own: expected the layout {opened.layout.name!r}, or no base. Load another one"
            )
        if reference.name in names or len(links) > _MAX_LINKS:
            why = "which needs it" if reference.name in names else f"the last of {_MAX_LINKS} bases of bases"
            raise CorruptCheckpointError(
                f"{last.location.display} is stored as differences from {reference.name[:200]!r}, {why}: it is "
                "damaged. Load another checkpoint"
            )
        names.add(reference.name)
        copy = known(reference)
        is_known = copy is not None
        if copy is None:
            at = base_location(last.location, Base(reference.name, reference.save_id), context)
            copy = open_link(last.location.display, at, reference, context)
        last = copy
    if not links:
        return opened
    if last.root is not None and last.root.references.leaf:
        if nested == _MAX_NESTED:
            raise CorruptCheckpointError(
                f"{opened.location.display} needs {last.location.display}, an update with a base that needs further "
                "updates: it is damaged. Load another checkpoint"
            )
        last = with_bases(last, last.root, context, nested + 1)
    try:
        chained = opened.layout.derive([ChainLink(link.tree, link.state) for link in links], last.tree)
    except CorruptCheckpointError as error:
        raise type(error)(f"{opened.location.display}: {error}", key=error.key) from error
    own, *bases = [
        dataclasses.replace(link, tree=tree) for link, tree in zip(links, chained.stored, strict=True)
    ]  # fmt: skip
    return derive(
        own,
        chained.tree,
        chained.arrays,
        values={},
        additional=[*bases, last],
        most_bytes=context.memory.load_bytes,
        description=f"from {', '.join([base.location.name for base in (*bases, last)])}",
        is_builtin=True,
    )


def _base_of(checkpoint: Checkpoint) -> BaseReference | None:
    """Return the base that the layout of a checkpoint states.

    Raises:
        CorruptCheckpointError: the state is damaged, or the base is not in the same directory.
    """
    display = checkpoint.location.display
    try:
        reference = checkpoint.layout.base(checkpoint.tree, checkpoint.state)
    except CorruptCheckpointError as error:
        raise type(error)(f"{display}: {error}", key=error.key) from error
    if reference is not None and (
        len(reference.name) > _MAX_NAME or not Base(reference.name, reference.save_id).is_sibling
    ):
        raise CorruptCheckpointError(
            f"{display} is stored as differences from {reference.name[:200]!r}: expected the name of a checkpoint in "
            "the same directory. Load another checkpoint"
        )
    return reference


def expect_base(location: Location, reference: BaseReference, context: Context) -> None:
    """Check that a checkpoint can be stored as differences at a location: that the base exists next to it.

    Args:
        location: the location of a save.
        reference: the base that the checkpoint will state.
        context: options.

    Raises:
        CheckpointError: the base cannot be read there, or is another checkpoint; or the save would replace it.
        StorageError
    """
    at = base_location(location, Base(reference.name, reference.save_id), context)
    reason = "which this save would replace" if reference.name == location.name else ""
    if not reason and reference.digest:
        root = root_bytes(at.store)
        digest = "" if root is None else hashlib.sha256(root).hexdigest()
        if digest != reference.digest:
            expected = f"expected a root with the SHA-256 {reference.digest[:64]}, found {digest or 'none'}"
            reason = f"which {'is another checkpoint' if root else 'does not exist'}: {expected}"
    elif not reason:
        try:
            open_link(location.display, at, reference, context)
        except (CorruptCheckpointError, UnsupportedVersionError) as error:
            reason = f"which cannot be read: {error}"
    if reason:
        raise CheckpointError(
            f"{location.display} would be stored as differences from {at.display}, {reason}. It could not be loaded. "
            f"Save into the directory of the base, {reference.name[:200]!r}, or pass another layout, which stores all "
            "elements. Nothing was written"
        )


def open_link(display: str, at: Location, reference: BaseReference, context: Context) -> Checkpoint:
    """Open the base of a chain, as if it stored all of its arrays itself.

    Args:
        display: the display name of the checkpoint that refers to it.
        at: its location.
        reference: what is expected there.
        context: options.

    Raises:
        CorruptCheckpointError: it was deleted or replaced, cannot be read, or differs from the one that was expected.
        UnsupportedVersionError: its format has an unsupported version.
    """
    version = read_version(at)
    if version.root is None and not reference.save_id:
        from ckptcore.opening.foreign import inspect_tree  # only bases of other software need it

        try:
            return inspect_tree(at, version, context)
        except (CheckpointNotFoundError, CompositeCheckpointError, CorruptCheckpointError) as error:
            raise CorruptCheckpointError(
                f"{display} is stored as differences from {at.display}, which cannot be read: {error}"
                f"{'. ' if reference.remedy else ''}{reference.remedy}"
            ) from error
    version, root = read_base(display, at, reference.save_id)
    if not root.layout:
        raise CorruptCheckpointError(f"{display} refers to {at.display}, which has no tree. Load another checkpoint")
    if reference.digest:
        assert isinstance(version.root, bytes)  # it was parsed
        digest = hashlib.sha256(version.root).hexdigest()
        if digest != reference.digest:
            raise CorruptCheckpointError(
                f"{display} is stored as differences from {at.display}, which changed: expected a root with the "
                f"SHA-256 {reference.digest[:64]}, found {digest}. Restore it, or load another checkpoint"
            )
    return Checkpoint.of_root(at, version, root, context)
