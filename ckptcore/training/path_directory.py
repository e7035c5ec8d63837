"""PathDirectory: the steps of a run in one directory that all processes of a job share, and its ownership."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final

from ckptcore.commit.location import AnyLocation, LocationLike, SubPath
from ckptcore.commit.locks import IfInUse, Lock
from ckptcore.commit.names import INTERNAL_DIRECTORY
from ckptcore.context import Context
from ckptcore.errors import CheckpointExistsError, CorruptCheckpointError, ObjectNotFoundError
from ckptcore.inspection.completeness import has_expected_sizes
from ckptcore.job.agreement import Agreement
from ckptcore.job.visibility import expect_one_directory
from ckptcore.model.tree import JSON
from ckptcore.policies import PreservationPolicy, PreserveAll, StepInfo
from ckptcore.protocols import StorageBackend
from ckptcore.records import dataclass
from ckptcore.saving.requests import check_custom
from ckptcore.step_names import StepNames
from ckptcore.training.deletion import DeletionQueue, PendingDeletion, StepDeleter, policy_infos
from ckptcore.training.run_directory import Ownership, RunDirectory, SavedStep, StepTarget
from ckptcore.training.steps import StepDirectory


@dataclass(frozen=True, slots=True)
class PathDirectory:
    """A `RunDirectory` that is one directory.

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
    """Return the argument of a user as a `RunDirectory`."""
    if not isinstance(directory, str | os.PathLike) and isinstance(directory, RunDirectory):
        return directory
    return PathDirectory(directory)


class OwnedDirectory:
    """A directory of steps that this process owns, until it is closed.

    Attributes:
        steps: its steps.
        policy: chooses the steps to keep.
        store: the storage, opened at the directory for writing.
        lock: the lock of the owner.
        deleter: deletes steps.
    """

    def __init__(
        self,
        steps: StepDirectory,
        policy: PreservationPolicy,
        context: Context,
        *,
        if_in_use: IfInUse,
        at_least: int = 0,
        looks_complete: Callable[[AnyLocation, Context], bool] = has_expected_sizes,
        other_files: bool = False,
    ) -> None:
        """Own the directory.

        Args:
            steps: the directory.
            policy: chooses the steps to keep.
            context: options.
            if_in_use: as for `Checkpointer`.
            at_least: the lowest number that the owner may get. See `Locks.own`.
            looks_complete: returns True if the files of a step seem complete.
            other_files: True to delete steps with files that no save wrote.

        Raises:
            DirectoryInUseError: another job owns it.
            InvalidLocationError: it is a checkpoint, not a directory of steps.
            StorageError: it cannot be written.
        """
        steps.expect_directory()
        self.steps = steps
        self.policy = policy
        self.store: StorageBackend = steps.open_to_write()
        self.lock: Lock = steps.commit_method(self.store).locks(steps.display).own(if_in_use, at_least=at_least)
        self.deleter = StepDeleter(
            steps, self.store, self.lock, context, looks_complete=looks_complete, other_files=other_files
        )
        steps.expect_present = self.expect_present

    def expect_present(self) -> None:
        """Check that a directory on a file system still exists, before a save creates anything in it.

        Raises:
            SaveLostError: another process owns it.
            StorageError: it does not exist now, because its file system is not mounted.
        """
        if not self.steps.commit_method(self.store).claims_by_root:  # object stores have no directories to check
            self.lock.check_without_room()

    def infos(self) -> Sequence[StepInfo]:
        """Return the steps that the policy decides about."""
        return policy_infos(self.steps, self.steps.broken)

    def collect(self, *, keep: Callable[[], Collection[int]]) -> None:
        """Delete the steps that the policy does not keep. Damaged steps are left alone.

        Args:
            keep: returns steps that must not be deleted.

        Raises:
            StorageError, SaveLostError: some steps may have been deleted.
        """
        if not isinstance(self.policy, PreserveAll):
            self.deleter.collect(self.policy, keep=keep, broken=frozenset(self.steps.broken))

    def close(self, seconds: float | None = None) -> None:
        """Release the ownership. See `Lock.close`."""
        self.steps.expect_present = bool
        self.lock.close(seconds)


def refuse_existing(step: int, directories: Sequence[StepDirectory]) -> None:
    """Refuse to save a step that exists in one of the directories. Copies that are known to be damaged do not count.

    Raises:
        CheckpointExistsError: an undamaged copy exists.
    """
    for directory in directories:
        if step not in directory.broken and directory.is_committed(step):
            raise CheckpointExistsError(
                f"{directory.display} already has step {step} ({directory.name(step)}); pass overwrite=True to replace "
                "it. To continue from an earlier step, first delete this step and all later ones: a resume loads the "
                "newest"
            )


class _PathRun:
    """The `OwnedRun` of a `PathDirectory`: the leader owns the directory, lists and deletes.

    Attributes:
        steps: the steps of the directory.
        directory: the owned directory; None on other ranks than the leader.
    """

    def __init__(self, steps: StepDirectory, context: Context, ownership: Ownership) -> None:
        """See `RunDirectory.own`."""
        self.steps = steps
        self.directory: OwnedDirectory | None = None
        self._saves = ownership.saves
        self._deletions = DeletionQueue(steps.display)
        agreement = ownership.agreement
        try:
            with agreement.stage("own"):
                if agreement.rank == 0:
                    self.directory = OwnedDirectory(
                        steps,
                        ownership.policy,
                        context,
                        if_in_use=ownership.if_in_use,
                        other_files=ownership.other_files,
                    )
                    if ownership.metadata is not None:
                        write_directory_metadata(steps.open_to_write(), ownership.metadata)
            expect_one_directory(agreement.part("directory"), steps.store, steps.directory)
        except BaseException:
            self.release()
            raise

    def begin(self) -> None:
        """See `OwnedRun`."""
        if self.directory is not None:
            self._deletions.begin(self.directory.deleter.clean)

    def target(self, step: int, name: str) -> StepTarget:
        """See `OwnedRun`."""
        location, is_broken = SubPath(self.steps.directory, name), step in self.steps.broken
        if self.directory is None:
            return StepTarget(location, is_broken)
        self.directory.deleter.keep_claim(step)
        return StepTarget(location, is_broken, self.directory.lock.check, owner=self.directory.lock.number)

    def allow(self, step: int, *, is_new: bool) -> None:
        """See `OwnedRun`."""
        if self.directory is not None:
            self.directory.expect_present()
            self.directory.deleter.wait_until_gone(step)
        if is_new:
            refuse_existing(step, [self.steps])

    def committed(self, saved: SavedStep) -> None:
        """See `OwnedRun`."""
        self.steps.add(saved.step, saved.name)
        if self.directory is not None and not isinstance(self.directory.policy, PreserveAll):
            self._deletions.begin(partial(self.directory.collect, keep=self._saves.kept))

    def delete(self, step: int, agreement: Agreement) -> None:
        """See `OwnedRun`. The leader decides immediately, and removes the files in the background."""
        deleted = agreement.part("deleted")  # before the stage, so that all ranks count their exchanges equally
        begun: PendingDeletion | None = None
        try:
            with agreement.stage("delete"):
                if self.directory is not None:
                    begun = self.directory.deleter.begin(step, under_way=self._saves.under_way)
        except BaseException:
            if begun is not None:
                begun.cancel()
            raise
        if begun is not None:
            self._deletions.begin(partial(deleted.lead, "deleted", begun.perform))
            return
        name = self.steps.name(step) if step in self.steps.candidates() else None
        self.steps.forget([step])
        self._deletions.begin(partial(self._await_deletion, step, name, deleted))

    def _await_deletion(self, step: int, name: str | None, deleted: Agreement) -> None:
        """Wait until the leader has deleted a step. Show the step again if this failed."""
        try:
            deleted.lead("deleted", _nothing)
        except BaseException:
            if name is not None:
                self.steps.add(step, name)
                self.steps.distrust(step)  # it may have been deleted nevertheless
            raise

    def take_errors(self) -> Sequence[BaseException]:
        """See `OwnedRun`."""
        return self._deletions.take_errors()

    def close(self) -> None:
        """Do nothing, because no work continues after the saves. See `OwnedRun`."""

    def release(self) -> None:
        """See `OwnedRun`."""
        self._deletions.refuse()
        try:
            self._deletions.close()
        finally:
            if self.directory is not None:
                self.directory.close()


def _nothing() -> None:
    """Do nothing: only the leader has work to do."""


_KEY: Final = f"{INTERNAL_DIRECTORY}/metadata.json"
_MAX_BYTES: Final = 1 << 24
_REMEDY: Final = "write it again with Checkpointer(directory, metadata=...), or remove it"


def read_directory_metadata(store: StorageBackend) -> dict[str, JSON]:
    """Return the stored metadata of a directory of steps; empty if there is none.

    Raises:
        CorruptCheckpointError: it is not a JSON object.
    """
    try:
        data = store.get(_KEY, 0, _MAX_BYTES)
    except ObjectNotFoundError:
        return {}
    try:
        metadata: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{_KEY} cannot be read: {error}; {_REMEDY}", key=_KEY) from error
    if not isinstance(metadata, dict):
        raise CorruptCheckpointError(f"{_KEY} is not a JSON object; {_REMEDY}", key=_KEY)
    return metadata


def write_directory_metadata(store: StorageBackend, metadata: Mapping[str, JSON]) -> None:
    """Replace the stored metadata of a directory of steps. Writes nothing if the metadata are equal.

    Raises:
        ValueError: it is not valid JSON, or longer than 16 MiB.
    """
    data = json.dumps(check_custom(metadata)).encode("ascii")
    if len(data) > _MAX_BYTES:
        raise ValueError(f"metadata= has {len(data)} bytes as JSON; the maximum for a directory is {_MAX_BYTES}")
    try:
        is_stored = read_directory_metadata(store) == json.loads(data)
    except CorruptCheckpointError:
        is_stored = False  # damaged metadata is written again
    if not is_stored:
        store.put(_KEY, data)
