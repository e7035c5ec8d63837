"""A directory of steps: which there are, which are committed, and what each says of itself."""

from __future__ import annotations

import datetime
import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ckptcore.commit import is_committed, is_hidden_name, root_bytes
from ckptcore.context import Context
from ckptcore.errors import CheckpointNotFoundError, CorruptCheckpointError
from ckptcore.locations import LocationLike, Within, open_directory, subdirectory
from ckptcore.opening import open_checkpoint
from ckptcore.policies import StepInfo
from ckptcore.protocols import StorageBackend
from ckptcore.root import Summary, summarize_root
from ckptcore.step_names import StepNames

__all__ = ["StepDirectory"]


class StepDirectory:
    """The steps of a directory as they were when it was last listed, and as this process changed them since. Any thread.

    One listing finds every name. Whether a name is a committed step is found out when somebody asks, by one small request, and
    remembered; a step that was committed once stays so until it is deleted.
    """

    def __init__(self, directory: LocationLike, names: StepNames, context: Context) -> None:
        """Look at nothing yet.

        Args:
            directory: a path or URL; it need not be there.
            names: how steps are named.
            context: options.
        """
        self.directory = directory
        self.names = names
        self._context = context
        self._store = open_directory(directory, context.registry, durable=False, config=context.storage)
        self._lock = threading.Lock()
        self._found: dict[int, str] = {}
        self._ours: dict[str, bool] = {}
        """Names of committed steps; whether ckptcore wrote them."""
        self._summaries: dict[str, Summary] = {}
        self._leftovers: tuple[str, ...] = ()

    @property
    def display(self) -> str:
        """The directory as the user knows it."""
        return os.fspath(self.directory)

    @property
    def store(self) -> StorageBackend:
        """The storage, opened at the directory, for reading."""
        return self._store

    def list_names(self) -> Mapping[int, str]:
        """Every name that stands for a step, committed or not, by step; one listing. Changes nothing."""
        # Opened anew: a storage may remember what it saw.
        self._store = open_directory(
            self.directory, self._context.registry, durable=False, config=self._context.storage
        )
        entries = [entry[:-1] for entry in self._store.list_names() if entry.endswith("/")]
        self._leftovers = tuple([name for name in entries if is_hidden_name(name)])
        return self.names.find(entries)

    @property
    def leftovers(self) -> Sequence[str]:
        """The hidden directories of saves and deletions, under way or dead, as they were last listed."""
        return self._leftovers

    def replace(self, found: Mapping[int, str]) -> None:
        """Take these names for all there are."""
        with self._lock:
            self._found = dict(found)
            there = set(found.values())
            self._ours = {name: ours for name, ours in self._ours.items() if name in there}
            # A step that was deleted and saved again has another root.
            self._summaries = {}

    def add(self, step: int, name: str) -> None:
        """Say that a step was committed, and under which name."""
        with self._lock:
            self._found[step] = name
            self._ours[name] = True
            self._summaries.pop(name, None)

    def forget(self, steps: Iterable[int]) -> None:
        """Say that steps were deleted."""
        with self._lock:
            for step in steps:
                name = self._found.pop(step, None)
                if name is not None:
                    self._ours.pop(name, None)
                    self._summaries.pop(name, None)

    def candidates(self) -> Sequence[int]:
        """Every step that has a name, committed or not, ascending."""
        with self._lock:
            return sorted(self._found)

    def name(self, step: int) -> str:
        """The name that a step has, or would be written under."""
        with self._lock:
            return self._found.get(step) or self.names.name(step)

    def place(self, step: int) -> Within:
        """Where a step is, or would be written."""
        return Within(self.directory, self.name(step))

    def is_committed(self, step: int) -> bool:
        """Whether a step is there and committed, ours or of a format that an installed layout reads."""
        with self._lock:
            name = self._found.get(step)
            if name is None or name in self._ours:
                return name is not None
        ours = is_committed(subdirectory(self._store, name))
        if ours is None and not self._is_foreign(name):
            return False
        if ours is False:
            return False
        with self._lock:
            if self._found.get(step) == name:
                self._ours[name] = ours is True
        return True

    def _is_foreign(self, name: str) -> bool:
        try:
            return open_checkpoint(Within(self.directory, name), self._context).root is None
        except CheckpointNotFoundError:
            return False
        except CorruptCheckpointError:
            return True  # it is a checkpoint of some layout, and damaged

    def is_ours(self, step: int) -> bool:
        """Whether a step is there, committed, and written by ckptcore."""
        return self.is_committed(step) and self._ours.get(self.name(step), False)

    def steps(self) -> tuple[int, ...]:
        """Every committed step, ascending."""
        return tuple([step for step in self.candidates() if self.is_committed(step)])

    def newest_first(self) -> Iterator[int]:
        """Every committed step, the newest first; looks no further than it is asked."""
        return (step for step in reversed(self.candidates()) if self.is_committed(step))

    def latest(self) -> int | None:
        """The newest committed step; None if there is none."""
        return next(self.newest_first(), None)

    def summary(self, step: int) -> Summary | None:
        """What the root of a step says; None where other software wrote it.

        Raises:
            CheckpointNotFoundError: if there is no such step.
            CorruptCheckpointError, UnsupportedVersionError: if its root cannot be read.
        """
        if not self.is_committed(step):
            raise CheckpointNotFoundError(self.missing(step))
        name = self.name(step)
        with self._lock:
            known = self._summaries.get(name)
        if known is not None:
            return known
        data = root_bytes(subdirectory(self._store, name))
        if data is None:
            if self.is_ours(step):
                raise CheckpointNotFoundError(f"step {step} in {self.display} was deleted meanwhile")
            return None
        found = summarize_root(data)
        with self._lock:
            self._summaries[name] = found
        return found

    def info(self, step: int) -> StepInfo:
        """What preservation policies know of a step; created at NaN where other software wrote it.

        Raises:
            What `summary` does.
        """
        summary = self.summary(step)
        if summary is None:
            return StepInfo(step, math.nan)
        return StepInfo(step, _seconds(summary.created), summary.metrics)

    def missing(self, step: int) -> str:
        """What to say where a step is asked for that is not there."""
        steps = self.steps()
        there = ", ".join(map(str, steps[-5:])) if steps else "none"
        return f"there is no committed step {step} in {self.display}; the newest are {there}"


def _seconds(created: str) -> float:
    """Seconds since the epoch of a time in ISO 8601."""
    try:
        return datetime.datetime.fromisoformat(created).timestamp()
    except (ValueError, OverflowError, OSError) as error:
        raise CorruptCheckpointError(f"a root states that it was created at {created[:80]!r}") from error
