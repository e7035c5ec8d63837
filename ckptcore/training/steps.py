"""StepDirectory: the steps in one directory, and cached facts about each step."""

from __future__ import annotations

import datetime
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final, TypeVar

from ckptcore.commit.delete import concerns_one_entry
from ckptcore.commit.location import (
    AnyLocation,
    LocationLike,
    SubPath,
    absolute_location,
    commit_method,
    open_directory,
    shown_location,
)
from ckptcore.commit.locks import Lock, Locks
from ckptcore.commit.method import CommitMethod
from ckptcore.commit.names import is_leftover_name, replaced_by
from ckptcore.commit.root import ROOT_KEY, RootSummary
from ckptcore.commit.root_json import summarize_root
from ckptcore.commit.stored_root import root_bytes
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.context import Context
from ckptcore.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CompositeCheckpointError,
    CorruptCheckpointError,
    InvalidLocationError,
    ObjectNotFoundError,
    StorageError,
    UncommittedCheckpointError,
)
from ckptcore.events import logger_named
from ckptcore.io.threads import map_ordered, requests_of, reset_in_children
from ckptcore.job.agreement import Agreement
from ckptcore.opening.foreign import owner_of_files
from ckptcore.opening.open_checkpoints import ConsistentRead, open_stored
from ckptcore.policies import StepInfo
from ckptcore.protocols import StorageBackend
from ckptcore.runtime import runtime_of
from ckptcore.step_names import StepNames
from ckptcore.training.other_names import find_other_steps

logger = logger_named("ckptcore.training")

_MAX_WARNED: Final = 1000
"""Maximum number of remembered warnings. If there are more, some are logged again."""

_ROOTS_TRIED: Final = 20
"""Maximum number of directories without a step name whose roots are read."""

T = TypeVar("T")


class StepDirectory:
    """The steps in a directory: the last listing, and the changes by this process since then. Thread-safe.

    One listing finds all names. The first call about a step checks with one small request that the step is committed.
    A positive result is cached until the step is deleted or missing in a new listing.

    Attributes:
        directory: the absolute path or URL.
        display: the directory as users see it: without secrets, and with ``~`` expanded.
        names: the names of steps.
        store: the storage, opened at the directory, for reading.
        leftovers: hidden directories of running or interrupted saves and deletions, as last listed.
        broken: the steps that this process found damaged and has not replaced.
        expect_present: called if a listing is empty, or if files of a step are missing. Raises an error if the
            directory does not exist now, because its file system is not mounted. Does nothing unless this process owns
            the directory.
    """

    def __init__(self, directory: LocationLike, names: StepNames, context: Context) -> None:
        """Open a directory. Lists nothing yet.

        Args:
            directory: a path or URL; it need not exist.
            names: the names of steps.
            context: options.
        """
        self.display = shown_location(directory)
        # Resolved only once, because a program may change its working directory.
        self.directory = absolute_location(directory)
        self.names = names
        self._context = context
        self.store = open_directory(self.directory, runtime_of(context).storages)
        self._listed: dict[int, str] = {}
        self._ours: dict[str, bool] = {}
        """By name of a committed step: True if ckptcore wrote it."""
        self._summaries: dict[str, RootSummary] = {}
        self._unlisted: set[str] = set()
        """Names of committed steps that the last listing lacks. They are checked before they count as deleted."""
        self._hidden: set[int] = set()
        """Steps that are being deleted."""
        self._changes: dict[int, tuple[int, str | None]] = {}
        """By step: the number of the last change by this process, and the new name; None after a deletion."""
        self._number = 0
        self.leftovers: Sequence[str] = ()
        self._others: tuple[str, ...] = ()
        """The entries of the last listing that have no name of a step."""
        self._warned: set[str] = set()
        self._adopted: str | None = None
        """The other prefix of step names that `list_steps` found; None if it found none."""
        self._locks: Locks | None = None
        self.broken: set[int] = set()
        self.expect_present: Callable[[], object] = bool  # `bool()` does nothing
        self.reset_after_fork()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """Replace the lock in a forked child, because a thread of the parent may have held it during the fork."""
        self._lock = threading.Lock()

    def commit_method(self, store: StorageBackend | None = None) -> CommitMethod:
        """Return the commit method of the directory.

        Args:
            store: the storage, opened at the directory; None: the storage for reading.
        """
        return commit_method(self.store if store is None else store, runtime_of(self._context).storages.support)

    def open_to_write(self) -> StorageBackend:
        """Return the storage for writing, opened at the directory, with the options of the Context."""
        return open_directory(self.directory, runtime_of(self._context).storages, to_write=True)

    def list_names(self) -> Mapping[int, str]:
        """List the names of steps, committed or not, by step, with one request. See `replace`.

        A step is a directory, or a file that other software wrote. Does not change the known steps, but updates
        `leftovers`.

        Raises:
            InvalidLocationError: the directory is a checkpoint.
            StorageError: the directory does not exist, although this process owns it.
        """
        self._reopen()
        listing = self.store.list_names()
        if not listing:
            self.expect_present()
        if ROOT_KEY in listing:
            raise self._no_directory()
        entries = [entry[:-1] for entry in listing if entry.endswith("/")]
        # A save that replaces a step by two renames hides the old step between them. Restore it if the save was killed.
        replaced = {name for entry in entries if (name := replaced_by(entry)) is not None}
        for name in sorted(replaced.difference(entries)):
            try:
                if self.commit_method().restore(name):
                    entries.append(name)
            except StorageError as error:
                logger.warning("%s in %s, which a killed save hid, cannot be restored: %s", name, self.display, error)
        self.leftovers = tuple([name for name in entries if is_leftover_name(name)])
        files = [entry for entry in listing if not entry.endswith("/")]
        steps = self.names.find([*entries, *files])
        known = set(steps.values())
        self._others = tuple(
            [
                entry
                for entry in listing
                if not entry.startswith(".") and entry.removesuffix("/") not in known and entry[:-1] not in replaced
            ]
        )
        return steps

    def list_visible(self) -> Mapping[int, str]:
        """Return the result of `list_names` without the steps that are being deleted."""
        return {step: name for step, name in self.list_names().items() if not self.is_hidden(step)}

    def list_steps(self) -> Mapping[int, str]:
        """List the names of steps. If none is committed and `StepNames.finds_others`, look for steps with other names.

        To find out whether a step is committed, replaces the known names, and takes one small request for the newest
        step, unless that step is cached. Takes requests for other names only if no step is committed.

        Raises:
            InvalidLocationError: the directory is a checkpoint, or has only checkpoints that cannot be read as steps.
        """
        since = self.changes()
        steps = self.list_visible()
        if not self.names.finds_others:
            return steps
        self.replace(steps, since)
        try:
            if self.latest() is not None or not (self._others or steps):
                return steps
            unread = [name for _, name in sorted(steps.items(), reverse=True)]
            others = find_other_steps(self.display, self.store, self._others, unread, self._holds_checkpoint)
            # A checkpoint of ckptcore with another name, such as a base, looks like an item of Orbax.
            if not (others or steps or self._has_roots()) and owner_of_files(self.store, self._context) is not None:
                raise self._no_directory()
        except StorageError as error:
            if not concerns_one_entry(error):  # the `steps` method reports an error of one entry
                logger.warning("cannot find out whether %s has steps: %s", self.display, error)
            return steps
        return others or steps

    def _has_roots(self) -> bool:
        """Return True if a directory with another name has a checkpoint of ckptcore."""
        directories = [entry[:-1] for entry in self._others if entry.endswith("/")]
        return any(root_bytes(subdirectory(self.store, name)) is not None for name in directories[:_ROOTS_TRIED])

    def reload(self, agreement: Agreement) -> None:
        """List the directory again. Called on every rank. All ranks use the leader's listing."""
        since = self.changes()
        steps = agreement.lead("list", lambda: {str(step): name for step, name in self.list_steps().items()})
        self.replace({int(step): name for step, name in steps.items()}, since)

    def _holds_checkpoint(self, name: str) -> bool | None:
        """Return True if an entry is a checkpoint, damaged or not; None if it is unfinished or cannot be read."""
        try:
            ConsistentRead(SubPath(self.directory, name), self._context, open_stored).open()
        except UncommittedCheckpointError:
            return None
        except (CheckpointNotFoundError, InvalidLocationError, ObjectNotFoundError):
            return False
        except StorageError as error:
            self.warn_once("%s in %s is passed over: %s", name, self.display, error)
            return None
        except CheckpointError:
            return True  # it has several checkpointables, is damaged, or has a newer version
        return True

    def expect_directory(self) -> None:
        """Check that this can be a directory of steps; it need not exist.

        Raises:
            InvalidLocationError: it is a checkpoint.
        """
        if self.commit_method().is_committed("") is not None:
            raise self._no_directory()

    def _no_directory(self) -> InvalidLocationError:
        return InvalidLocationError(
            f"{self.display} is a checkpoint itself, not a directory of steps; pass the directory that contains it"
        )

    def _reopen(self) -> None:
        # The storage may have cached its listings.
        self.store = open_directory(self.directory, runtime_of(self._context).storages)

    def changes(self) -> int:
        """Return the number of changes by this process. Call it before a listing, for `replace`."""
        with self._lock:
            return self._number

    def changed_since(self, step: int, since: int) -> bool:
        """Return True if this process changed a step after `changes` returned `since`."""
        with self._lock:
            return self._changes.get(step, (0, None))[0] > since

    def replace(self, listing: Mapping[int, str], since: int = 0) -> None:
        """Replace the known names by a listing. Changes by this process since the listing began are kept.

        Args:
            listing: names by step.
            since: the result of `changes` before the listing; 0 if there were no changes yet.
        """
        with self._lock:
            self._adopt(listing)
            known = {step: name for step, name in self._listed.items() if self._ours.get(name)}
            self._listed = dict(listing)
            for step, (number, name) in list(self._changes.items()):
                if number <= since:
                    del self._changes[step]
                elif name is None:
                    self._listed.pop(step, None)
                else:
                    self._listed[step] = name
            there = set(self._listed.values())
            # A listing may be stale, so committed steps that it lacks are checked once.
            self._unlisted = {name for step, name in known.items() if step not in self._listed}
            for step, name in known.items():
                self._listed.setdefault(step, name)
            self._ours = {name: ours for name, ours in self._ours.items() if name in there}
            # A step may have been deleted and saved again with another root.
            self._summaries = {}

    def _adopt(self, listing: Mapping[int, str]) -> None:
        """Read step names with the prefix that `list_steps` found. With default names, new steps get that prefix, too.

        Otherwise the next process would find the new steps, and would not look for the old steps.
        """
        others = [name for name in listing.values() if self.names.parse(name) is None]
        if not others:
            return
        other = StepNames.of(others[-1])
        write = other.write if self.names == StepNames() else self.names.write
        self.names = StepNames(write, [*self.names.read, other.read[-1]])
        self._adopted = other.write.prefix

    def is_adopted(self, step: int) -> bool:
        """Return True if the name of a step has the prefix that `list_steps` found.

        This run, other software, or a save outside a run may have written such a step.
        """
        return self._adopted is not None and self.name(step).startswith(self._adopted)

    def add(self, step: int, name: str) -> None:
        """Add a committed step with its name."""
        with self._lock:
            self._change(step, name)
            self._listed[step] = name
            self._ours[name] = True
            self._summaries.pop(name, None)

    def _change(self, step: int, name: str | None) -> None:
        self._number += 1
        self._changes[step] = (self._number, name)
        self._hidden.discard(step)

    def forget(self, steps: Iterable[int]) -> None:
        """Remove deleted steps."""
        with self._lock:
            for step in steps:
                self._change(step, None)
                name = self._listed.pop(step, None)
                if name is not None:
                    self._ours.pop(name, None)
                    self._summaries.pop(name, None)

    def hide(self, step: int) -> None:
        """Hide a step from all callers in this process, because it is being deleted."""
        with self._lock:
            self._hidden.add(step)

    def show(self, step: int) -> None:
        """Undo `hide`, because the deletion has ended or was cancelled."""
        with self._lock:
            self._hidden.discard(step)

    def distrust(self, step: int) -> None:
        """Check a step again in the next call, because it may have been deleted."""
        with self._lock:
            name = self._listed.get(step)
            if name is not None:
                self._ours.pop(name, None)
                self._summaries.pop(name, None)

    def is_hidden(self, step: int) -> bool:
        """Return True if a step is being deleted."""
        with self._lock:
            return step in self._hidden

    def candidates(self) -> Sequence[int]:
        """Return every step that has a name, committed or not, and is not being deleted, ascending."""
        with self._lock:
            return sorted(self._listed.keys() - self._hidden if self._hidden else self._listed)

    def name(self, step: int) -> str:
        """Return the name of a step, or the name that a save would give it."""
        with self._lock:
            return self._listed.get(step) or self.names.name(step)

    def location(self, step: int) -> SubPath:
        """Return the location of a step, or the location where a save would write it."""
        return SubPath(self.directory, self.name(step))

    @property
    def directories(self) -> tuple[StepDirectory, ...]:
        """This directory. See `RunSteps`."""
        return (self,)

    @property
    def main(self) -> StepDirectory:
        """This directory. See `RunSteps`."""
        return self

    def copies(self, step: int) -> Sequence[int]:
        """Return ``(0,)`` if the step is committed, else ``()``. See `RunSteps`."""
        return (0,) if self.is_committed(step) else ()

    def copy_location(self, step: int, number: int) -> AnyLocation:
        """Return the location of a step. See `RunSteps`."""
        return self.location(step)

    def pin(self, step: int) -> Lock:
        """Keep a step from being deleted until the result is closed.

        Raises:
            CheckpointNotFoundError: the step does not exist.
            StorageError: the pin cannot be written to the directory.
        """
        if not self.is_committed(step):
            raise CheckpointNotFoundError(self.missing(step))  # before anything is written to the directory
        pin = self._pins().pin(self.name(step))
        try:
            # Check again after the pin is written, because the step may have been deleted before.
            if not self.recheck(step):
                raise CheckpointNotFoundError(self.missing(step))
        except BaseException:
            pin.close()
            raise
        return pin

    def has_pin(self, key: str) -> bool:
        """Return True if this process sees a pin of the leader, given `Lock.key`: their directories are the same.

        Raises:
            StorageError
        """
        return self._pins().has_pin(key)

    def _pins(self) -> Locks:
        if self._locks is None:
            store = open_directory(self.directory, runtime_of(self._context).storages)
            self._locks = self.commit_method(store).locks(self.display)
        return self._locks

    def is_committed(self, step: int) -> bool:
        """Return True if a step is committed, by ckptcore or in a format that an installed layout reads."""
        with self._lock:
            name = self._listed.get(step)
            if name is None or step in self._hidden:
                return False
            if name in self._ours:
                return True
        return self._check(step, name)

    def recheck(self, step: int) -> bool:
        """Check again if a step is committed, with one small request for a step that ckptcore wrote."""
        with self._lock:
            name = self._listed.get(step)
            if name is None or step in self._hidden:
                return False
        self._reopen()
        return self._check(step, name)

    def _check(self, step: int, name: str) -> bool:
        """Check in the storage if a step is committed, and cache the result."""
        try:
            ours = self.commit_method().is_committed(name)
        except InvalidLocationError as error:
            self._ignore_link(name, error)
            return False
        with self._lock:
            listed = name not in self._unlisted
            self._unlisted.discard(name)
            if not listed and ours is None and self._listed.get(step) == name:
                del self._listed[step]  # neither the listing nor the storage has it: it was deleted
        committed = ours is True
        if ours is None and listed:
            committed, ours = self._inspect(name)
        with self._lock:
            if committed and self._listed.get(step) == name:
                self._ours[name] = ours is True
            elif not committed:
                # Keep the name: a save may be running.
                self._ours.pop(name, None)
                self._summaries.pop(name, None)
        return committed

    def _ignore_link(self, name: str, error: InvalidLocationError) -> None:
        """Log once that a name is a link out of the directory. Such links are neither read nor deleted."""
        self.warn_once("%s in %s is passed over and left alone: %s", name, self.display, error)

    def _inspect(self, name: str) -> tuple[bool, bool]:
        """Look for a checkpoint without a root. Return True if it exists, and True if it has a root now."""
        try:
            return True, ConsistentRead(
                SubPath(self.directory, name), self._context, open_stored
            ).open().root is not None
        except (CheckpointNotFoundError, ObjectNotFoundError):
            return False, False  # ObjectNotFoundError: a stale listing contains deleted objects
        except InvalidLocationError as error:
            self._ignore_link(name, error)
            return False, False
        except (CompositeCheckpointError, CorruptCheckpointError):
            return True, False  # a layout recognised it

    def is_ours(self, step: int) -> bool:
        """Return True if a step is committed and ckptcore wrote it."""
        return self.is_committed(step) and self._ours.get(self.name(step), False)

    def steps(self) -> tuple[int, ...]:
        """Return every committed step, ascending. A step that this process may not read is left out, and logged once.

        Raises:
            StorageError: the storage failed, or no step can be read.
        """
        candidates = self.candidates()
        answers = dict(zip(candidates, self.map_ordered(candidates, self.is_committed_or_why), strict=True))
        errors = {step: answer for step, answer in answers.items() if isinstance(answer, StorageError)}
        if errors and len(errors) == len(answers):
            raise errors[candidates[0]]
        for step, error in errors.items():
            self.leave_alone(step, error)
        return tuple([step for step, answer in answers.items() if answer is True])

    def is_committed_or_why(self, step: int) -> bool | StorageError:
        """Return True if a step is committed. Return the error if this process may not read the step."""
        try:
            return self.is_committed(step)
        except StorageError as error:
            if not concerns_one_entry(error):
                raise
            return error

    def leave_alone(self, step: int, error: StorageError) -> None:
        """Log that nothing is done to a step, because it cannot be read."""
        self.warn_once("step %d in %s is left alone: it cannot be read: %s", step, self.display, error)

    def warn_once(self, message: str, *arguments: object) -> None:
        """Log a warning. If this object has logged the same text before, log it at debug level."""
        text = message % arguments
        with self._lock:
            is_new = text not in self._warned
            if len(self._warned) >= _MAX_WARNED:
                self._warned.clear()
            self._warned.add(text)
        logger.log(logging.WARNING if is_new else logging.DEBUG, "%s", text)

    def map_ordered(self, steps: Sequence[int], ask: Callable[[int], T]) -> Sequence[T]:
        """Call a function for each step, on several threads if the storage benefits from that.

        Raises:
            The errors of `ask`.
        """
        parallelism = requests_of(self.store).concurrency
        if parallelism == 1:
            return [ask(step) for step in steps]
        return map_ordered(runtime_of(self._context).io_threads, steps, ask, parallelism=parallelism)

    def look_ahead(self, steps: Sequence[int]) -> None:
        """Read the roots of steps before `summary` needs them. Errors are ignored, because `summary` raises them."""
        if requests_of(self.store).concurrency > 1:
            self.map_ordered(steps, self._look_ahead)

    def _look_ahead(self, step: int) -> None:
        with suppress(CheckpointError):
            self.summary(step)

    def newest_first(self) -> Iterator[int]:
        """Yield every committed step, newest first. Lazy: checks a step when the caller reaches it.

        A step that this process may not read is left out, and logged once.

        Raises:
            StorageError: the storage failed.
        """
        for step in reversed(self.candidates()):
            answer = self.is_committed_or_why(step)
            if isinstance(answer, StorageError):
                self.leave_alone(step, answer)
            elif answer:
                yield step

    def latest(self) -> int | None:
        """Return the newest committed step; None if there is none.

        Raises:
            StorageError: a newer step cannot be read, so the newest step is unknown.
        """
        return next((step for step in reversed(self.candidates()) if self.is_committed(step)), None)

    def summary(self, step: int) -> RootSummary | None:
        """Return the summary of the root of a step; None if other software wrote the step.

        Raises:
            CheckpointNotFoundError: the step does not exist.
            CorruptCheckpointError, UnsupportedVersionError: its root cannot be read.
        """
        if not self.is_committed(step):
            raise CheckpointNotFoundError(self.missing(step))
        name = self.name(step)
        with self._lock:
            known = self._summaries.get(name)
        if known is not None:
            return known
        data = root_bytes(subdirectory(self.store, name))
        if data is None:
            if self.is_ours(step):
                raise CheckpointNotFoundError(f"step {step} in {self.display} was deleted meanwhile")
            return None
        # A run can have thousands of steps, each with many objects: cache only the small fields.
        summary = summarize_root(data)._replace(objects=None, parts={}, timeline=None)
        with self._lock:
            self._summaries[name] = summary
        return summary

    def info(self, step: int) -> StepInfo:
        """Return the facts about a step for preservation policies. `created` is NaN if other software wrote the step.

        Raises:
            The errors of `summary`.
        """
        summary = self.summary(step)
        if summary is None:
            return StepInfo(step, math.nan)
        return StepInfo(step, _seconds(summary.created), summary.metrics)

    def missing(self, step: int) -> str:
        """Return the message of the error for a step that does not exist."""
        steps = self.steps()
        there = ", ".join(map(str, steps[-5:])) if steps else "none"
        return (
            f"{self.display} has no committed step {step}; the newest steps when it was last listed: {there}; "
            "reload() lists steps that other processes have saved since then"
        )


def _seconds(created: str) -> float:
    """Convert a time in ISO 8601 to seconds since the epoch."""
    try:
        return datetime.datetime.fromisoformat(created).timestamp()
    except (ValueError, OverflowError, OSError) as error:
        raise CorruptCheckpointError(f"a root has an invalid time of creation: {created[:80]!r}") from error
