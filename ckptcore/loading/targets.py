"""Targets of a load: the stored value, an object restored from files, or nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckptcore.context import Context
from ckptcore.errors import (
    CheckpointError,
    CorruptCheckpointError,
    StorageError,
    TargetUndefinedError,
    TreeMismatchError,
)
from ckptcore.events import Recording, logger_named
from ckptcore.loading.load import DEFAULT_REQUEST, Load, LoadRequest, LoadTarget, files_instead
from ckptcore.loading.reading import TreeRead, default_handlers
from ckptcore.matching.options import Matched
from ckptcore.model.metadata import ArrayRecord, LeafRecord
from ckptcore.model.tree import Skeleton
from ckptcore.opening.checkpoint import Checkpoint, Source, file_pieces
from ckptcore.other_libraries import REFUSING_NUMPY, hint_of_framework
from ckptcore.plugins import Plugins
from ckptcore.protocols.values import FilesHandler, LeafHandler
from ckptcore.runtime import Runtime
from ckptcore.tree.flattening import own_values, rebuild

if TYPE_CHECKING:
    from pathlib import Path

logger = logger_named("ckptcore.loading")


def load_value(
    source: Source, abstract: object, context: Context, recording: Recording, request: LoadRequest = DEFAULT_REQUEST
) -> object:
    """Load a new value with the structure of an abstract tree.

    If `abstract` is None, loads arrays of the requested framework in the saved structure. For files, loads a dict of
    bytes by path.

    Raises:
        ValueError: both an abstract tree and a framework are requested.
    """
    if abstract is not None:
        refuse_framework(request)
        from ckptcore.loading.new_values import NewValue  # only abstract trees need it

        target: LoadTarget[object] = NewValue(abstract)
    else:
        target = _StoredValue()
    try:
        return Load(source, target, context, recording, request).run()
    except TreeMismatchError as error:
        if isinstance(abstract, str):
            error.add_note(f"The second argument is an abstract tree. A framework is named by framework={abstract!r}")
        raise


def load_nothing(source: Source, context: Context, recording: Recording) -> None:
    """Take part in a collective load without requesting any data."""
    Load(source, _NoValue(), context, recording, DEFAULT_REQUEST).run()


def load_files_into(
    source: Source, name: str, target: object, handler: FilesHandler, context: Context, recording: Recording
) -> object:
    """Restore an object from stored files. Returns the result of its handler.

    Args:
        source: the checkpoint with the files.
        name: the name of the object, for errors.
        target: the object.
        handler: restores it from a local directory.
        context: options.
        recording: records the phases.

    Raises:
        TargetUndefinedError: the load failed after the object began to change.
    """
    files = _RestoredFiles(name, target, handler)
    try:
        return Load(source, files, context, recording, DEFAULT_REQUEST).run()
    except Exception as error:
        if not files.has_begun or isinstance(error, TargetUndefinedError):
            raise
        raise TargetUndefinedError(
            f"{source} was replaced or deleted while {name!r} was restored from it, and loading again failed: {error}. "
            f"{name!r} may have a mix of two states. Before using it, load a sound checkpoint into it, or create it "
            "again"
        ) from error


def refuse_framework(request: LoadRequest) -> None:
    """Refuse a framework in a request with an abstract tree or target, whose leaves state their own framework.

    Raises:
        ValueError
    """
    if request.framework is not None:
        raise ValueError(
            f"framework={request.framework!r} is for a load without an abstract tree or target, whose leaves state "
            "their own framework; pass only one of the two"
        )


class _StoredValue(LoadTarget[object]):
    """The stored value in the saved structure, with arrays of a framework; for files, their bytes by path."""

    def __init__(self) -> None:
        self._skeleton: Skeleton | None = None
        self._files: dict[str, bytes] = {}

    def match(self, load: Load[object], checkpoint: Checkpoint) -> Matched:
        """Match all leaves, or the selected ones."""
        tree = checkpoint.tree
        if checkpoint.is_files:
            return self._match_files(load, checkpoint)
        array, value = default_handlers(load.runtime.registry)
        handlers = [array if isinstance(record, ArrayRecord) else value for record in tree.leaves]
        leaves: list[object] = [None] * len(handlers)
        if load.request.framework is not None:
            _choose_framework(load.request.framework, tree.leaves, load.runtime.registry, handlers, leaves)
        elif not REFUSING_NUMPY.isdisjoint(sys.modules):
            for record in tree.leaves:
                if isinstance(record, ArrayRecord) and record.notes.get("framework") in REFUSING_NUMPY:
                    _hint_of_framework(str(record.framework), load.runtime)
                    break
        job = load.runtime.job()
        skeleton: Skeleton = tree.skeleton
        numbers: Sequence[int | None] = range(len(handlers))
        if load.request.select is not None:
            from ckptcore.loading.selections import chosen_leaves, prune  # only selections need it

            skeleton, numbers = prune(skeleton, chosen_leaves(checkpoint, load.request.select, load.context))
        self._skeleton, numbers = own_values(skeleton, numbers, job.rank, job.size)
        if load.request.select is None and len(numbers) == len(handlers):
            return Matched(numbers, handlers, skeleton=self._skeleton, leaves=leaves)
        kept = set(numbers)
        return Matched(
            numbers,
            [None if number is None else handlers[number] for number in numbers],
            ignored=[number for number in range(len(handlers)) if number not in kept],
            skeleton=self._skeleton,
            leaves=[None if number is None else leaves[number] for number in numbers],
        )

    def _match_files(self, load: Load[object], checkpoint: Checkpoint) -> Matched:
        """Read the files now, because collective loads check after this stage whether the checkpoint was replaced."""
        if load.request.select is not None:
            raise files_instead(checkpoint)
        with load.recording.phase("read", sum([record.size for record in checkpoint.objects.values()])):
            self._files = {key: b"".join(file_pieces(checkpoint, record)) for key, record in checkpoint.objects.items()}
        self._skeleton = None  # an earlier attempt may have found a tree
        return Matched((), (), skeleton=checkpoint.tree.skeleton)

    def build(self, load: Load[object], reading: TreeRead) -> object:
        """Put the leaves into standard Python containers."""
        return self._files if self._skeleton is None else rebuild(self._skeleton, reading.leaves)


def _hint_of_framework(name: str, runtime: Runtime) -> None:
    """Log once how to load arrays in the framework in which they were saved."""
    if (hint := hint_of_framework(name)) not in runtime.hints:
        runtime.hints.add(hint)
        logger.warning("%s", hint)


def _choose_framework(
    name: str,
    records: Sequence[LeafRecord],
    registry: Plugins,
    handlers: list[LeafHandler],
    leaves: list[object],
) -> None:
    """Replace the handlers and abstract leaves of the arrays that a framework can represent."""
    arrays = {number: record for number, record in enumerate(records) if isinstance(record, ArrayRecord)}
    abstract = registry.framework(name)(list(arrays.values()))
    for number, leaf in zip(arrays, abstract, strict=True):
        if leaf is not None:
            handler = registry.dispatch(leaf).leaf
            assert handler is not None  # the plugin of a framework handles its abstract leaves
            leaves[number], handlers[number] = leaf, handler


class _NoValue(LoadTarget[None]):
    """No result: this process takes part in a collective load without requesting data."""

    def match(self, load: Load[None], checkpoint: Checkpoint) -> Matched:
        """Match no leaf."""
        return Matched((), ())

    def build(self, load: Load[None], reading: TreeRead) -> None:
        """Build nothing."""


class _RestoredFiles(LoadTarget[object]):
    """An object that restores itself from files.

    Attributes:
        has_begun: True once the object may have changed.
    """

    def __init__(self, name: str, target: object, handler: FilesHandler) -> None:
        self.has_begun = False
        self._name = name
        self._target = target
        self._handler = handler

    def match(self, load: Load[object], checkpoint: Checkpoint) -> Matched:
        """Refuse a tree. Reads no file yet."""
        if not checkpoint.is_files:
            raise CorruptCheckpointError(
                f"{checkpoint.location.display} has a tree instead of files of an object: it was replaced or is "
                "damaged. Load again, or load another checkpoint"
            )
        return Matched((), ())

    def build(self, load: Load[object], reading: TreeRead) -> object:
        """Copy and verify the files in a local directory, and restore the object from it."""
        from ckptcore.builtin.staging import StagingDirectory  # only objects that write files need it

        checkpoint, directory = reading.checkpoint, StagingDirectory()
        try:
            with load.recording.phase("read", sum([record.size for record in checkpoint.objects.values()])):
                _copy_out(checkpoint, directory.path)
            self.has_begun = True
            with load.recording.phase("restore"):
                return self._restore(load.location, directory.path)
        finally:
            directory.close()

    def _restore(self, source: Source, directory: Path) -> object:
        try:
            return self._handler.load(self._target, directory)
        except Exception as error:
            raise TargetUndefinedError(
                f"{self._name!r} failed to restore itself from {source}: {type(error).__name__}: {error}. It may "
                "have a mix of two states: create a new object, and load this or another checkpoint into it"
            ) from error


def _copy_out(checkpoint: Checkpoint, directory: Path) -> None:
    """Copy every file to a local directory and verify it. Also creates the directories that were saved empty.

    Raises:
        CorruptCheckpointError: a file is damaged, or two files have conflicting paths.
        StorageError: a file cannot be written to the local disk, or the storage failed.
    """
    from ckptcore.builtin.files import empty_directories  # only files of objects need it

    empty = dict.fromkeys(empty_directories(checkpoint.state))
    for key, record in [*checkpoint.objects.items(), *empty.items()]:
        path = os.path.join(directory, *key.split("/"))
        try:
            os.makedirs(path if record is None else os.path.dirname(path), exist_ok=True)
            if record is not None:
                with open(path, "xb") as file:
                    file.writelines(file_pieces(checkpoint, record))
        except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
            raise CorruptCheckpointError(
                f"{checkpoint.location.display} lists the file {key!r} twice, or also as a directory: {error}. Load "
                "another checkpoint",
                key=key,
            ) from error
        except CheckpointError:
            raise
        except OSError as error:
            raise StorageError(
                error.errno,
                f"cannot copy {key!r} of {checkpoint.location.display} to {path}: {error}. Nothing was changed",
            ) from error
