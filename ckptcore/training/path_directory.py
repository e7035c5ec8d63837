"""PathDirectory: the steps of a run in one directory that all processes of a job share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from ckptcore.commit.location import LocationLike, Place, Within, commit_method
from ckptcore.commit.locks import IfInUse, Lock
from ckptcore.commit.target import ADMINISTRATION
from ckptcore.context import Context
from ckptcore.errors import CheckpointExistsError, CorruptCheckpointError, ObjectNotFoundError
from ckptcore.job.agreement import Agreement
from ckptcore.job.visibility import expect_one_directory
from ckptcore.loading.verify import has_its_sizes
from ckptcore.model.tree import JSON
from ckptcore.policies import PreservationPolicy, PreserveAll, StepInfo
from ckptcore.protocols import StorageBackend
from ckptcore.step_names import StepNames
from ckptcore.training.garbage import BegunDeletion, DeletionQueue, StepDeleter, policy_infos
from ckptcore.training.run_directory import Ownership, RunDirectory, SavedStep, StepTarget
from ckptcore.training.steps import StepDirectory

__all__ = [
    "OwnedDirectory",
    "PathDirectory",
    "as_run_directory",
    "read_directory_metadata",
    "refuse_existing",
    "write_directory_metadata",
]


@dataclass(frozen=True, slots=True)
class PathDirectory:
    """A `RunDirectory` in one place.

    Attributes:
        location: a path or URL.
    """

    location: LocationLike

    def open(self, names: StepNames, context: Context) -> StepDirectory:
        """See `RunDirectory`."""
        return StepDirectory(self.location, names, context)

    def own(self, names: StepNames, context: Context, ownership: Ownership) -> _PathRun:
        """See `RunDirectory`."""
        return _PathRun(self.open(names, context), context, ownership)


def as_run_directory(directory: LocationLike | RunDirectory) -> RunDirectory:
    """Return what a user passed as a `RunDirectory`."""
    if not isinstance(directory, str | os.PathLike) and isinstance(directory, RunDirectory):
        return directory
    return PathDirectory(directory)


class OwnedDirectory:
    """A directory of steps that this process owns, until it is closed.

    Attributes:
        steps: its steps.
        policy: which steps are kept.
        store: the storage, opened at the directory for writing.
        hold: the ownership.
        deleter: deletes steps.
    """

    def __init__(
        self,
        steps: StepDirectory,
        policy: PreservationPolicy,
        context: Context,
        *,
        if_in_use: IfInUse,
        looks_whole: Callable[[Place, Context], bool] = has_its_sizes,
    ) -> None:
        """Own the directory.

        Args:
            steps: the directory.
            policy: which steps are kept.
            context: options.
            if_in_use: as for `Checkpointer`.
            looks_whole: returns whether a step at a place seems to be undamaged.

        Raises:
            DirectoryInUseError: if another job owns it.
            StorageError: if it cannot be written.
        """
        steps.expect_directory()
        self.steps = steps
        self.policy = policy
        self.store: StorageBackend = steps.open_to_write()
        self.hold: Lock = commit_method(self.store).locks(steps.display).own(if_in_use)
        self.deleter = StepDeleter(steps, self.store, self.hold, context, looks_whole=looks_whole)

    def infos(self) -> Sequence[StepInfo]:
        """Return what the policy decides over."""
        return policy_infos(self.steps, self.steps.broken)

    def collect(self, *, keep: Callable[[], Collection[int]]) -> None:
        """Delete what the policy gives up. Damaged steps are left alone.

        Args:
            keep: returns the steps that stay whatever the policy says.

        Raises:
            StorageError, SaveLostError: some steps may be deleted.
        """
        if not isinstance(self.policy, PreserveAll):
            self.deleter.collect(self.policy, keep=keep, broken=frozenset(self.steps.broken))

    def close(self) -> None:
        """Give up the ownership."""
        self.hold.close()


def refuse_existing(step: int, directories: Sequence[StepDirectory]) -> None:
    """Refuse to save a new step that is in one of the directories. A copy that is known to be damaged does not count.

    Raises:
        CheckpointExistsError
    """
    for directory in directories:
        if step not in directory.broken and directory.is_committed(step):
            raise CheckpointExistsError(
                f"step {step} is in {directory.display} already, as {directory.name(step)}; pass overwrite=True to "
                "replace it. If the run was set back, delete it and all later steps, or the next resume loads them"
            )


class _PathRun:
    """The `OwnedRun` of a `PathDirectory`: the leader owns the directory, lists and deletes.

    Attributes:
        steps: the steps of the directory.
        directory: the directory; None if another process leads.
    """

    def __init__(self, steps: StepDirectory, context: Context, ownership: Ownership) -> None:
        """See `RunDirectory.own`."""
        self.steps = steps
        self.directory: OwnedDirectory | None = None
        self._saves = ownership.saves
        self._cleaner = DeletionQueue(steps.display)
        agreement = ownership.agreement
        try:
            with agreement.stage("own"):
                if agreement.rank == 0:
                    self.directory = OwnedDirectory(steps, ownership.policy, context, if_in_use=ownership.if_in_use)
                    if ownership.metadata is not None:
                        write_directory_metadata(steps.open_to_write(), ownership.metadata)
            expect_one_directory(agreement.part("directory"), steps.store, steps.directory)
        except BaseException:
            self.release()
            raise

    def begin(self) -> None:
        """See `OwnedRun`."""
        if self.directory is not None:
            self._cleaner.begin(self.directory.deleter.clean)

    def target(self, step: int, name: str) -> StepTarget:
        """See `OwnedRun`."""
        place, is_broken = Within(self.steps.directory, name), step in self.steps.broken
        if self.directory is None:
            return StepTarget(place, is_broken)
        self.directory.deleter.spare(step)
        return StepTarget(place, is_broken, self.directory.hold.check)

    def allow(self, step: int, *, is_new: bool) -> None:
        """See `OwnedRun`."""
        if self.directory is not None:
            self.directory.deleter.wait_until_gone(step)
        if is_new:
            refuse_existing(step, [self.steps])

    def committed(self, saved: SavedStep) -> None:
        """See `OwnedRun`."""
        self.steps.add(saved.step, saved.name)
        if self.directory is not None and not isinstance(self.directory.policy, PreserveAll):
            self._cleaner.begin(partial(self.directory.collect, keep=self._saves.kept))

    def delete(self, step: int, agreement: Agreement) -> None:
        """See `OwnedRun`. The leader decides at once, and removes the files in the background."""
        deleted = agreement.part("deleted")  # a rank that completes the stage counts as the leader does
        begun: BegunDeletion | None = None
        try:
            with agreement.stage("delete"):
                if self.directory is not None:
                    begun = self.directory.deleter.begin(step, under_way=self._saves.under_way)
        except BaseException:
            if begun is not None:
                begun.cancel()
            raise
        if begun is not None:
            self._cleaner.begin(partial(deleted.lead, "deleted", begun.perform))
            return
        name = self.steps.name(step) if step in self.steps.candidates() else None
        self.steps.forget([step])
        self._cleaner.begin(partial(self._await_deletion, step, name, deleted))

    def _await_deletion(self, step: int, name: str | None, deleted: Agreement) -> None:
        """Wait until the leader has deleted a step. The step exists again if that failed."""
        try:
            deleted.lead("deleted", _nothing)
        except BaseException:
            if name is not None:
                self.steps.add(step, name)
                self.steps.distrust(step)  # it may be deleted all the same
            raise

    def take_errors(self) -> Sequence[BaseException]:
        """See `OwnedRun`."""
        return self._cleaner.take_errors()

    def close(self) -> None:
        """See `OwnedRun`. Nothing outlasts saves here."""

    def release(self) -> None:
        """See `OwnedRun`."""
        self._cleaner.refuse()
        try:
            self._cleaner.close()
        finally:
            if self.directory is not None:
                self.directory.close()


def _nothing() -> None:
    """The part of other processes in what the leader does."""


_KEY: Final = f"{ADMINISTRATION}/metadata.json"
_MAX_BYTES: Final = 1 << 24


def read_directory_metadata(store: StorageBackend) -> dict[str, JSON]:
    """Return the stored metadata of a directory of steps; empty if there is none.

    Raises:
        CorruptCheckpointError: if it is no JSON object.
    """
    try:
        data = store.get(_KEY, 0, _MAX_BYTES)
    except ObjectNotFoundError:
        return {}
    try:
        found: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"{_KEY} cannot be read: {error}; write it again, or remove it", key=_KEY
        ) from error
    if not isinstance(found, dict):
        raise CorruptCheckpointError(f"{_KEY} is no JSON object; write it again, or remove it", key=_KEY)
    return found


def write_directory_metadata(store: StorageBackend, metadata: Mapping[str, JSON]) -> None:
    """Replace the stored metadata of a directory of steps. Writes nothing if it is the same.

    Raises:
        ValueError: if it is no JSON, or longer than 16 MiB.
    """
    try:
        data = json.dumps(dict(metadata), allow_nan=False).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"metadata= must be JSON, with str keys and finite numbers: {error}") from error
    if not _has_str_keys(metadata):
        raise ValueError("metadata= must be JSON, with str keys; it would come back changed")
    if len(data) > _MAX_BYTES:
        raise ValueError(f"metadata= has {len(data)} bytes as JSON; at most {_MAX_BYTES} can be kept with a directory")
    try:
        is_there = read_directory_metadata(store) == json.loads(data)
    except CorruptCheckpointError:
        is_there = False  # what is damaged is written again
    if not is_there:
        store.put(_KEY, data)


def _has_str_keys(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _has_str_keys(child) for key, child in value.items())
    return all(map(_has_str_keys, value)) if isinstance(value, list | tuple) else True
