"""Completeness of checkpoints: files that are missing or have another size than recorded. Reads roots and no array."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from ckptcore.commit.location import AnyLocation, LocationAddress, SubPath, resolve_location
from ckptcore.commit.root import ROOT_KEY, Base, CompositeRoot, Root, RootSummary
from ckptcore.commit.root_json import summarize_root
from ckptcore.commit.stored_root import LocationVersion, parse_root, root_bytes
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.context import Context
from ckptcore.errors import (
    CheckpointError,
    CorruptCheckpointError,
    ObjectNotFoundError,
    StorageError,
    StoragePermissionError,
)
from ckptcore.io.threads import map_ordered, requests_of
from ckptcore.opening.checkpoint import Checkpoint, CompositeCheckpoint, extents_of, format_names
from ckptcore.opening.members import MemberOpener, existing_members, lost_members, member_opener, present_members
from ckptcore.opening.open_checkpoints import ConsistentRead, open_either
from ckptcore.protocols import StorageBackend
from ckptcore.records import NamedTuple, dataclass
from ckptcore.runtime import runtime_of

OpenedMember: TypeAlias = Checkpoint | CheckpointError
"""An open checkpointable, or the error of opening it."""

_FEW: Final = 8
"""Up to this number, requests are sent one after the other, because starting threads takes longer on a local disk."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem of a checkpoint.

    Attributes:
        key: the object (file), or the name or directory of a checkpointable; None if unknown, such as for an array in a
            base.
        start, stop: the half-open range of its bytes; None for the whole object.
        arrays: the paths of the affected arrays, if known: those that have bytes in this range.
        message: what was expected and found.
    """

    key: str | None
    start: int | None
    stop: int | None
    arrays: tuple[str, ...]
    message: str


def _wrong_size(key: str, expected: int, size: int | None, least: str = "") -> Problem:
    """Return the problem of an object with another size in bytes than expected. `size` is None if it is missing."""
    message = f"{key} is missing" if size is None else f"{key} has {size} bytes instead of {least}{expected}"
    return Problem(key, min(size or 0, expected), max(size or 0, expected), (), message)


def missing_members(
    composite: CompositeCheckpoint, existing: Mapping[str, Collection[str]]
) -> tuple[tuple[str, ...], Sequence[Problem]]:
    """Return the checkpointables that do not exist, and the problems of lost and incomplete checkpointables.

    A checkpointable that ckptcore deleted is not a problem.

    Args:
        composite: the checkpoint.
        existing: by name, the directories that exist. May omit names without directories.
    """
    problems = []
    for name, member in composite.members.items():
        processes, count = member.processes or 1, len(existing.get(name, ()))
        if 0 < count < processes:
            message = f"{name!r} has a state for each of {processes} processes, but only {count} exist"
            problems.append(Problem(name, None, None, (), message))
    absent = tuple([name for name in composite.members if not existing.get(name)])
    if (lost := lost_problem(composite, absent)) is not None:
        problems.append(lost)
    return absent, problems


def members_by_name(composite: CompositeCheckpoint) -> dict[str, list[str]]:
    """Return the directories of each checkpointable that exist and are not being deleted, in the order of the save."""
    return {name: list(directories) for name, directories in existing_members(composite)}


def open_members(
    directories: Mapping[str, Iterable[str]], open_one: MemberOpener
) -> Iterator[tuple[str, OpenedMember]]:
    """Open checkpointables one after the other. Yields the directory and the checkpoint, or the error of opening it.

    Args:
        directories: the directories to open, by name of the checkpointable.
        open_one: opens a checkpointable.
    """
    for name, of_name in directories.items():
        for directory in of_name:
            try:
                member: OpenedMember = open_one(name, directory)
            except CheckpointError as error:
                member = error
            yield directory, member


def lost_problem(composite: CompositeCheckpoint, absent: Collection[str]) -> Problem | None:
    """Return one problem for all `absent` checkpointables that ckptcore did not delete; None if it deleted all."""
    lost = lost_members(composite, absent)
    if not lost:
        return None
    listed = f"{format_names([repr(name) for name in lost])} {'is' if len(lost) == 1 else 'are'} listed but missing"
    present = ", ".join([name for name in composite.members if name not in lost])
    message = (
        f"{listed}: deleted, lost, or never copied here. Copy it again; or take what exists "
        f"({present or 'nothing'}) by name"
    )
    if composite.root is not None:
        members, directory = composite.root.members, composite.location.display.rstrip("/")
        places = format_names([f"{directory}/{members[name].directories(name)}" for name in lost])
        message = (
            f"{listed}: lost, or never copied here. Copy it again; or, if it is not needed, pass each of its "
            f"directories to ckptcore.delete: {places}"
        )
    return Problem(lost[0], None, None, (), message)


class StoredFiles(NamedTuple):
    """The files of a checkpoint.

    Attributes:
        nbytes: recorded bytes of the objects of all checkpointables and processes, without roots and their parts; for
            checkpoints of other software, bytes of the arrays.
        problems: the files of the checkpoint and of its bases that are missing or have another size.
        deleted: names of checkpointables that do not exist, because they were deleted or lost. `problems` also lists
            the lost checkpointables.
    """

    nbytes: int
    problems: tuple[Problem, ...] = ()
    deleted: tuple[str, ...] = ()


def has_expected_sizes(location: AnyLocation, context: Context) -> bool:
    """Return True if every object of a checkpoint and of its bases exists with its recorded size.

    Reads roots and no array. Returns False if a checkpointable of a composite has no directory.

    Raises:
        CheckpointError: a root cannot be read.
    """
    check = FileCheck(context)
    read = ConsistentRead(location, context, open_either)
    files = read.retry_if_replaced(
        lambda checkpoint: check.check(checkpoint, location, member_opener(checkpoint, location, context))
    )
    return not (files.problems or files.deleted)


class FileCheck:
    """Finds files that are missing or have another size than recorded. Reads roots, listings and sizes. Thread-safe.

    The caller checks afterwards that the checkpoint was not replaced. Caches the results for bases, because several
    updates may share a base.
    """

    def __init__(self, context: Context) -> None:
        """Keep the context, and begin with an empty cache."""
        self._context = context
        self._threads = runtime_of(context).io_threads
        self._bases: dict[tuple[LocationAddress, Base], tuple[Sequence[Problem], Sequence[Base]]] = {}

    def check(
        self, checkpoint: Checkpoint | CompositeCheckpoint, location: AnyLocation, open_one: MemberOpener
    ) -> StoredFiles:
        """Check the files of an open checkpoint.

        Args:
            checkpoint: the checkpoint.
            location: its location.
            open_one: opens a checkpointable of other software.

        Raises:
            CorruptCheckpointError: the root of a checkpointable or of a base cannot be read.
        """
        if isinstance(checkpoint, CompositeCheckpoint):
            if checkpoint.root is None:
                return self._check_named(checkpoint, open_one)
            return self._check_composite(checkpoint, checkpoint.root, location)
        if checkpoint.root is None:
            return StoredFiles(checkpoint.tree.nbytes, tuple(self._wrong_in_foreign(checkpoint)))
        sizes = {key: record.size for key, record in checkpoint.objects.items()}
        problems = self._wrong(checkpoint.location.store, sizes)
        problems += self._wrong_in_bases(checkpoint.root.references.bases, location)
        return StoredFiles(sum(sizes.values()), tuple(problems))

    def check_root(
        self, location: AnyLocation, store: StorageBackend, data: bytes, summary: RootSummary
    ) -> StoredFiles:
        """Check the files of a checkpoint of ckptcore, without reading its tree.

        Args:
            location: the location.
            store: the storage, opened at the location.
            data: the bytes of its root.
            summary: the summary of its root.

        Raises:
            CorruptCheckpointError: the root of a checkpointable or of a base cannot be read.
        """
        if summary.members:
            resolved = resolve_location(location, runtime_of(self._context).storages)
            root = CompositeRoot(save_id=summary.save_id, created=summary.created, writer={}, members=summary.members)
            composite = CompositeCheckpoint.of_root(resolved, LocationVersion(data), root)
            return self._check_composite(composite, root, location)
        sizes = _recorded_sizes(store, data, summary)
        problems = self._wrong(store, {**sizes, **summary.parts})
        problems += self._wrong_in_bases(summary.bases, location)
        return StoredFiles(sum(sizes.values()), tuple(problems))

    def _check_composite(
        self, composite: CompositeCheckpoint, root: CompositeRoot, location: AnyLocation
    ) -> StoredFiles:
        store = composite.location.store
        nbytes, sizes, problems = 0, dict[str, int](), list[Problem]()
        existing: dict[str, list[str]] = {}
        roots: dict[str, bytes] = {}
        for name, directory, data in self._roots(composite):
            try:
                summary = summarize_root(data)
                if not summary.committed:
                    continue  # it is being deleted
                own = _recorded_sizes(subdirectory(store, directory), data, summary)
            except CorruptCheckpointError as error:
                raise CorruptCheckpointError(f"{directory}: {error}", key=error.key) from error
            existing.setdefault(name, []).append(directory)
            roots[directory] = data
            nbytes += sum(own.values())
            if summary.save_id != root.save_id:
                message = f"{directory} was replaced by another save"
                problems.append(Problem(f"{directory}/{ROOT_KEY}", None, None, (), message))
            sizes.update({f"{directory}/{key}": size for key, size in {**own, **summary.parts}.items()})
            problems += self._wrong_in_bases(summary.bases, SubPath(location, directory))
        absent, missing = missing_members(composite, existing)
        problems += missing
        wrong = self._wrong(store, sizes)
        # Deleting a checkpointable does not change the root of the composite. It first replaces or removes the root of
        # the checkpointable, so a changed root shows that files are missing because of a deletion.
        deleted = {
            directory
            for directory in {(problem.key or "").partition("/")[0] for problem in wrong}
            if root_bytes(subdirectory(store, directory)) != roots[directory]
        }
        problems += [problem for problem in wrong if (problem.key or "").partition("/")[0] not in deleted]
        return StoredFiles(nbytes, tuple(problems), absent)

    def _roots(self, composite: CompositeCheckpoint) -> Iterator[tuple[str, str, bytes]]:
        """Yield each existing directory of a composite of ckptcore: its checkpointable, its name, and its root."""
        store = composite.location.store
        directories = [
            (name, directory) for name, present in present_members(composite).items() for directory in present
        ]
        roots = map_ordered(
            self._threads,
            directories,
            lambda member: root_bytes(subdirectory(store, member[1])),
            parallelism=requests_of(store).concurrency,
        )
        for (name, directory), data in zip(directories, roots, strict=True):
            if data is not None:
                yield name, directory, data

    def _check_named(self, composite: CompositeCheckpoint, open_one: MemberOpener) -> StoredFiles:
        """Check the files of several checkpointables of other software."""
        nbytes, problems, existing = 0, list[Problem](), members_by_name(composite)
        for directory, member in open_members(existing, open_one):
            if isinstance(member, CorruptCheckpointError | StorageError):
                raise member
            if isinstance(member, Checkpoint):  # otherwise no installed layout reads it, so its files are unknown
                nbytes += member.tree.nbytes
                problems += self._wrong_in_foreign(member, f"{directory}/")
        absent, missing = missing_members(composite, existing)
        return StoredFiles(nbytes, (*problems, *missing), absent)

    def _wrong_in_foreign(self, checkpoint: Checkpoint, prefix: str = "") -> Sequence[Problem]:
        """Return the problems of a checkpoint of other software, as far as its layout knows where arrays end."""
        if checkpoint.is_files:
            return ()  # the storage itself gave the recorded sizes
        ends: dict[str, int] = {}
        try:
            for _, key, _, stop in extents_of(checkpoint):
                ends[key] = max(stop, ends.get(key, 0))
        except CorruptCheckpointError as error:
            return (Problem(error.key, error.start, error.stop, (), str(error)),)
        except CheckpointError:
            return ()  # an array cannot be read here, so its extent is unknown
        store = checkpoint.location.parent if checkpoint.version.is_object else checkpoint.location.store
        return self._wrong(store, ends, prefix if not checkpoint.version.is_object else "", "at least ")

    def _wrong_in_bases(self, bases: Sequence[Base], location: AnyLocation) -> Iterator[Problem]:
        if not bases:
            return
        from ckptcore.opening.bases import base_location, read_base  # only updates and differences have bases

        resolved = resolve_location(location, runtime_of(self._context).storages)
        needed = [(resolved, base) for base in dict.fromkeys(bases)]
        seen: set[tuple[LocationAddress, Base]] = set()
        for referring, base in needed:  # grows: the base of a chain has a base
            if not base.save_id:
                continue  # other software wrote it
            at = base_location(referring, base, self._context)
            if (at.address, base) in seen:
                continue
            seen.add((at.address, base))
            known = self._bases.get((at.address, base))
            if known is None:
                _, root = read_base(referring.display, at, base.save_id)
                sizes = {key: record.size for key, record in root.objects.items()}
                further = () if root.references.leaf else root.references.bases
                known = self._bases[at.address, base] = self._wrong(at.store, sizes, f"../{base.path}/"), further
            yield from known[0]
            needed += [(at, further) for further in known[1]]

    def _wrong(
        self, store: StorageBackend, expected: Mapping[str, int], prefix: str = "", least: str = ""
    ) -> list[Problem]:
        """Return the problems of objects that are missing or have another size. With `least`, they may be larger."""
        parallelism = requests_of(store).concurrency
        keys = list(expected)
        if parallelism > 1 and len(keys) > 1 and (listed := _listed_sizes(store)) is not None:
            # A listing may be outdated: ask for each object that it lacks, or lists with another size.
            keys = [key for key in keys if not _fits(listed.get(key), expected[key], least)]
        if len(keys) <= _FEW:
            sizes = [_size(store, key) for key in keys]
        else:
            sizes = list(map_ordered(self._threads, keys, lambda key: _size(store, key), parallelism=parallelism))
        return [
            _wrong_size(prefix + key, expected[key], size, least)
            for key, size in zip(keys, sizes, strict=True)
            if not _fits(size, expected[key], least)
        ]


def _listed_sizes(store: StorageBackend) -> Mapping[str, int] | None:
    """Return the sizes of all objects; None if the storage does not list sizes, or does not permit it."""
    try:
        return store.list_sizes()
    except StoragePermissionError:
        return None


def _fits(size: int | None, expected: int, least: str) -> bool:
    return size == expected or (bool(least) and size is not None and size > expected)


def _recorded_sizes(store: StorageBackend, data: bytes, summary: RootSummary) -> Mapping[str, int]:
    """Return the recorded sizes of the objects of one tree, or of the files of one checkpointable, in bytes."""
    if summary.objects is not None:
        return summary.objects
    root = parse_root(store, data)
    return {key: record.size for key, record in root.objects.items()} if isinstance(root, Root) else {}


def _size(store: StorageBackend, key: str) -> int | None:
    try:
        return store.size(key)
    except ObjectNotFoundError:
        return None
