"""Bases of updates: the checkpoints that store the arrays to which an update refers."""

from __future__ import annotations

import dataclasses
import posixpath
import re
from typing import Final

from ckptcore.commit.location import Location, LocationAddress, open_address
from ckptcore.commit.root import Base, Root, stored_numbers, stored_tree
from ckptcore.commit.stored_root import LocationVersion, parse_root, read_version
from ckptcore.context import Context
from ckptcore.derivations import Stored
from ckptcore.errors import CorruptCheckpointError, InvalidLocationError, UnsupportedVersionError
from ckptcore.io.threads import map_ordered, requests_of
from ckptcore.model.metadata import ArrayRecord
from ckptcore.model.tree import format_path
from ckptcore.opening.checkpoint import Checkpoint
from ckptcore.opening.derived import derive
from ckptcore.protocols import DerivedArray
from ckptcore.runtime import runtime_of

_AUTHORITY: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^/]*")


def base_location(location: Location, base: Base, context: Context) -> Location:
    """Return the location of a base of a checkpoint.

    Raises:
        InvalidLocationError: the Context does not allow this location, or the location is outside of the storage.
    """
    display = posixpath.join(posixpath.dirname(location.display.rstrip("/")), base.path)
    address = location.address
    if base.is_sibling:
        identity = f"{address.scheme}:{address.parent}/{base.path}"
        return dataclasses.replace(location, display=display, name=base.path, identity=identity, of_host=False)
    if context.io.bases != "anywhere":
        raise InvalidLocationError(
            f"{location.display} refers to a base at {display}, but only bases in the same directory are read. If you "
            'trust its author, pass context=Context(io=IOOptions(bases="anywhere")), or ask the author for a copy by '
            "ckptcore.copy"
        )
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
        save_id: the id of the save that the referring checkpoint expects there.

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
    if isinstance(root, Root) and root.save_id == save_id:
        return version, root
    state = "was deleted" if root is None else f"was replaced by another save ({root.save_id})"
    raise CorruptCheckpointError(
        f"{referring} has arrays in {at.display} (save {save_id}), which {state}: restore it, or load another "
        "checkpoint. Copies by ckptcore.copy need no base"
    )


def open_base(referring: str, at: Location, save_id: str, context: Context) -> Checkpoint:
    """Open a base. Its tree has only the arrays that the base stores itself, without the arrays of its own bases.

    Raises:
        CorruptCheckpointError: see `read_base`; also if the base has files instead of a tree.
        UnsupportedVersionError: see `read_base`.
    """
    version, root = read_base(referring, at, save_id)
    if not root.layout:
        raise CorruptCheckpointError(f"{referring} refers to {at.display}, which has no tree. Load another checkpoint")
    tree = stored_tree(root.tree, root.references)
    return dataclasses.replace(Checkpoint.of_root(at, version, root, context), tree=tree)


def with_bases(opened: Checkpoint, root: Root, context: Context) -> Checkpoint:
    """Open the bases of a checkpoint. Returns the checkpoint with all of its arrays.

    Args:
        opened: the checkpoint, opened as if it stored all arrays itself.
        root: its root.
        context: options.

    Raises:
        CorruptCheckpointError: a base was deleted or replaced, cannot be read, or lacks an array that the checkpoint
            refers to.
        InvalidLocationError: the Context does not allow the location of a base.
    """
    references, location = root.references, opened.location
    own = dataclasses.replace(opened, tree=stored_tree(root.tree, references))

    def open_one(base: Base) -> Checkpoint:
        return open_base(location.display, base_location(location, base, context), base.save_id, context)

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
