"""Open checkpoints of one tree or of several checkpointables, and errors that name the affected arrays."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Final, TypeAlias

import xxhash

from ckptcore.commit.location import AnyLocation, Location
from ckptcore.commit.root import CompositeRoot, Member, PartialSave, Root
from ckptcore.commit.stored_root import LocationVersion
from ckptcore.context import Context
from ckptcore.errors import (
    CheckpointError,
    CompositeCheckpointError,
    CorruptCheckpointError,
    ObjectNotFoundError,
    UncommittedCheckpointError,
    converts_errors,
)
from ckptcore.io.chunk_reads import StoredFormat
from ckptcore.io.reader import ObjectReader
from ckptcore.model.arrays import HostArray
from ckptcore.model.metadata import ArrayRecord, ObjectRecord, TreeMetadata
from ckptcore.model.transfer import ReadPlan
from ckptcore.model.tree import JSON, format_path
from ckptcore.protocols import ChunkIndex, Layout, ReadBoxes, ReadThrough, StorageBackend
from ckptcore.records import dataclass
from ckptcore.runtime import runtime_of

if TYPE_CHECKING:
    from ckptcore.opening.derived import Derived

_PIECE_BYTES: Final = 1 << 24
_NAMES_SHOWN: Final = 20


@dataclass(frozen=True, slots=True)
class Origin:
    """Provenance of a checkpoint, as stated in its metadata.

    Attributes:
        writer: names and versions of the software that wrote it.
        custom: metadata of the user.
        metrics: measurements saved with it.
        created: start of the save, ISO 8601 in UTC; None if other software wrote the checkpoint without a time.
        unused: by object, the names of stored arrays that the other software does not load. See `Inspection`.
        files: objects that other software wrote, as in `Inspection`.
    """

    writer: str = ""
    custom: Mapping[str, JSON] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    created: str | None = None
    unused: Mapping[str, Sequence[str]] = field(default_factory=dict)
    files: Collection[str] = ()

    @classmethod
    def of_root(cls, root: Root | CompositeRoot) -> Origin:
        """Return the provenance that a root states."""
        writer = " ".join([f"{name} {version}" for name, version in root.writer.items()])
        return cls(writer, root.custom, root.metrics, root.created)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An open checkpoint of one tree, or of files.

    Attributes:
        location: its location.
        version: the state of the location when it was opened.
        root: its root; None if other software wrote it.
        stored: its layout and the state of the layout, which locate arrays in objects.
        tree: its tree.
        store: reads its objects.
        foreign: its provenance, if other software wrote it.
        read_instead: reads boxes instead of `store`: from copies on this host, through a strategy, or, if `derived` is
            set, by computing them.
        derived: computes arrays from those of other checkpoints; None if the stored arrays are read directly. If it is
            set, `stored` and `store` belong to its first source.
    """

    location: Location
    version: LocationVersion
    root: Root | None
    stored: StoredFormat
    tree: TreeMetadata
    store: ObjectReader
    foreign: Origin = Origin()  # immutable
    read_instead: ReadBoxes | None = None
    derived: Derived | None = None

    @classmethod
    def of_root(
        cls,
        location: Location,
        version: LocationVersion,
        root: Root,
        context: Context,
        stored: StoredFormat | None = None,
    ) -> Checkpoint:
        """Return a checkpoint of ckptcore, with the arrays that it stores itself.

        Args:
            location, version, root: attributes of the checkpoint.
            context: options.
            stored: a cached layout and state for this root; None: create them.
        """
        store = reader_of(location.store, root.objects, context)
        return cls(location, version, root, stored or stored_format(root, context), root.tree, store)

    def __str__(self) -> str:
        return self.location.display

    @property
    def layout(self) -> Layout:
        """Its layout, if it has a tree."""
        assert self.stored.layout is not None, f"{self} has files, which no layout stores"
        return self.stored.layout

    @property
    def state(self) -> JSON:
        """The state that its layout stored with the tree."""
        return self.stored.state

    @property
    def origin(self) -> Origin:
        """Its provenance."""
        return self.foreign if self.root is None else Origin.of_root(self.root)

    @property
    def objects(self) -> Mapping[str, ObjectRecord]:
        """Records of its objects by key; empty for a tree that other software wrote."""
        return self.store.objects

    @property
    def index(self) -> ChunkIndex:
        """The chunk index of its arrays; for a derived checkpoint, the chunk index of its first source.

        Raises:
            CorruptCheckpointError: the state does not match the tree.
        """
        return self.stored.index(self.tree) if self.derived is None else self.derived.sources[0].index

    @property
    def is_files(self) -> bool:
        """True if the checkpoint has the files that an object wrote, instead of a tree."""
        return self.stored.layout is None

    def read(self, plan: ReadPlan, buffers: Sequence[HostArray]) -> Iterable[int]:
        """Fill buffers with the boxes of a plan. Yields the number of each box once it is complete."""
        if self.read_instead is not None:
            return self.read_instead(plan, buffers)
        return self.store.read_boxes(self.index, plan.items, buffers)

    def reading_through(self, read_through: ReadThrough) -> Checkpoint:
        """Return a copy of this checkpoint that reads boxes through a strategy."""
        root = self.version.root
        # The members of a composite share a save id. Each has its own root, so a digest of it identifies the content.
        content_id = xxhash.xxh3_128_hexdigest(root) if isinstance(root, bytes) else None
        return replace(self, read_instead=lambda plan, buffers: read_through(content_id, plan, buffers, self.read))


def stored_format(root: Root, context: Context) -> StoredFormat:
    """Return the layout of a checkpoint of ckptcore, with its state."""
    return StoredFormat(runtime_of(context).registry.layout(root.layout) if root.layout else None, root.state)


def reader_of(storage: StorageBackend, objects: Mapping[str, ObjectRecord], context: Context) -> ObjectReader:
    """Return a reader for the recorded objects of a checkpoint. It refuses objects that are not recorded."""
    return ObjectReader(storage, objects, runtime_of(context).io_threads, verify=context.io.verify, strict=True)


Source: TypeAlias = AnyLocation | Checkpoint
"""A location of a checkpoint, or an open checkpoint."""


@dataclass(frozen=True, slots=True)
class CompositeCheckpoint:
    """An open checkpoint of several checkpointables.

    Attributes:
        location, version: see `Checkpoint`.
        root: its root; None if other software wrote it.
        members: its checkpointables by name, including checkpointables that were deleted since the save.
        origin: its provenance.
        default: the checkpointable that a load of one tree uses; None if the caller must name one.
    """

    location: Location
    version: LocationVersion
    root: CompositeRoot | None
    members: Mapping[str, Member]
    origin: Origin
    default: str | None = None

    @classmethod
    def of_root(cls, location: Location, version: LocationVersion, root: CompositeRoot) -> CompositeCheckpoint:
        """Return a composite of ckptcore."""
        return cls(location, version, root, root.members, Origin.of_root(root), root.default)


@converts_errors
def naming_arrays(opened: Checkpoint) -> Iterator[None]:
    """Add the names of the affected arrays to errors about damaged bytes. Reports a missing object as damage.

    Raises:
        CorruptCheckpointError: the error of the body, or an object of the checkpoint is missing.
    """
    try:
        yield
    except CorruptCheckpointError as error:
        named = naming_other_file(error, opened.location)
        if affected := arrays_at(opened, error.key, error.start, error.stop):
            paths = ", ".join(affected[:5]) + (f" and {len(affected) - 5} more" if len(affected) > 5 else "")
            text = f"{opened.location.display}: {named} (this is in {paths})"
            raise type(error)(text, key=error.key, start=error.start, stop=error.stop) from error
        if named is error:
            raise
        raise named from error
    except ObjectNotFoundError as error:
        raise missing_file(opened, error) from error


def missing_file(opened: Checkpoint, error: ObjectNotFoundError) -> CorruptCheckpointError:
    """Return the error for an object of a checkpoint that is missing."""
    return CorruptCheckpointError(
        f"{opened.location.display}: a data file is missing: {error}. Restore it from a copy, or load another "
        "checkpoint"
    )


def naming_other_file(error: CorruptCheckpointError, location: Location) -> CorruptCheckpointError:
    """Return a clearer error if the file is a Git LFS pointer, an HTML page, or empty; otherwise the given error."""
    from ckptcore.model.file_kinds import FILE_HEAD_BYTES, kind_in_place_of  # only errors need it

    if error.key is None:
        return error
    for storage in (location.store, location.parent):  # the location may be a file
        try:
            head = storage.get(error.key, 0, FILE_HEAD_BYTES)
        except (CheckpointError, OSError):
            continue
        kind = kind_in_place_of(head)
        if kind is None or str(kind) in str(error):
            return error
        noun = kind.noun if head else f"{kind.noun}, truncated or damaged"
        return type(error)(f"{error.key} is {noun}: {kind.remedy}", key=error.key, start=error.start, stop=error.stop)
    return error


@converts_errors
def naming_additional(opened: Checkpoint) -> Iterator[None]:
    """Add the location of an additional source, and the names of its arrays, to errors about its bytes.

    Raises:
        CorruptCheckpointError: the body failed because the source is damaged or was replaced.
        Other errors of the body.
    """
    try:
        with naming_arrays(opened):
            yield
    except CheckpointError as error:
        if not opened.version.is_current(opened.location):
            raise _replaced_additional(opened) from error
        if not isinstance(error, CorruptCheckpointError):
            raise
        raise type(error)(f"{error}. Another checkpoint uses its arrays") from error


def _replaced_additional(source: Checkpoint) -> CorruptCheckpointError:
    """Return the error for an additional source that was replaced while its arrays were read."""
    return CorruptCheckpointError(
        f"{source.location.display} was replaced while its arrays were combined with those of another checkpoint: "
        "load again"
    )


def check_additional(opened: Checkpoint) -> None:
    """Check that no additional source of a derived checkpoint has been replaced since it was opened.

    Raises:
        CorruptCheckpointError: if a source was replaced, because the data may then come from two saves.
    """
    if opened.derived is None:
        return
    first, *additional = opened.derived.sources
    check_additional(first)
    for source in additional:
        if not source.version.has_current_root(source.location):
            raise _replaced_additional(source)


def arrays_at(opened: Checkpoint, key: str | None, start: int | None, stop: int | None) -> list[str]:
    """Return the paths of the stored arrays that have bytes in a range of an object.

    Args:
        opened: the checkpoint. For a derived checkpoint, only its first source is searched.
        key: the object; None returns no paths.
        start, stop: the range in bytes, half-open; None for the whole object.
    """
    if key is None:
        return []
    stored = stored_in(opened)
    return [
        format_path(stored.tree.paths[leaf])
        for leaf, own, first, last in extents_of(stored)
        if own == key and (start is None or stop is None or (first < stop and start < last))
    ]


def stored_in(opened: Checkpoint) -> Checkpoint:
    """Return the first source of a derived checkpoint, with the tree of the arrays that it stores itself."""
    while opened.derived is not None:
        opened = opened.derived.sources[0]
    return opened


def extents_of(opened: Checkpoint) -> Iterator[tuple[int, str, int, int]]:
    """Yield the byte ranges of the arrays of a checkpoint in order of leaves: leaf, object key, start and stop.

    For a derived checkpoint, the leaves are those of `stored_in`.
    """
    opened = stored_in(opened)
    index, tree = opened.index, opened.tree
    for leaf, record in enumerate(tree.leaves):
        if isinstance(record, ArrayRecord) and leaf not in tree.aliases:
            for key, start, stop in index.extents(leaf):
                yield leaf, key, start, stop


def check_file(opened: Checkpoint, record: ObjectRecord) -> None:
    """Check that a file has its recorded size. A hostile root may state any size.

    Raises:
        CorruptCheckpointError: the size differs.
    """
    size = opened.location.store.size(record.key)
    if size != record.size:
        raise CorruptCheckpointError(
            f"{record.key} in {opened.location.display} has {size} bytes instead of {record.size}. Load another "
            "checkpoint",
            key=record.key, start=min(size, record.size), stop=max(size, record.size),
        )  # fmt: skip


def file_pieces(opened: Checkpoint, record: ObjectRecord) -> Iterator[bytes]:
    """Iterate over the bytes of a file, 16 MiB at a time. Verifies recorded checksums if verification is on.

    Raises:
        CorruptCheckpointError: the file is damaged, or does not have its recorded size.
    """
    check_file(opened, record)
    for start in range(0, record.size, _PIECE_BYTES):
        stop = min(start + _PIECE_BYTES, record.size)
        data = opened.store.get(record.key, start, stop)
        if len(data) != stop - start:
            raise CorruptCheckpointError(
                f"{record.key} ends at byte {start + len(data)} instead of {record.size}",
                key=record.key, start=start + len(data), stop=record.size,
            )  # fmt: skip
        yield data


def format_names(names: Collection[str]) -> str:
    """Format names for a message. Limits their number, because a hostile root or a directory may have any number."""
    shown = [name if name.isprintable() else repr(name) for name in itertools.islice(names, _NAMES_SHOWN)]
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return (", ".join(shown) or "none") + more


def several_checkpointables(location: Location, names: Sequence[str]) -> CompositeCheckpointError:
    """Return the error for several checkpointables where one tree is expected."""
    return CompositeCheckpointError(
        f"{location.display} has several checkpointables ({', '.join(names)}): use load_checkpointables, or load one "
        f"by its own location, such as {location.display.rstrip('/')}/{names[0] if names else 'NAME'}",
        names,
    )


def not_finalized(location: Location, partial: PartialSave) -> UncommittedCheckpointError:
    """Return the error for a partial save that is not finalized."""
    running = "" if partial.owner is None else ", and a save that is running or was interrupted"
    return UncommittedCheckpointError(
        f"{location.display} is a partial save that is not finalized: it has {partial}{running}. Save the missing "
        "parts with ckptcore.partial(...).save, then call ckptcore.partial(...).finalize; or remove it with "
        "ckptcore.delete"
    )
