"""RunDirectory: where the steps of a run are listed, opened, saved, protected and deleted.

`Checkpointer` and `CheckpointReader` take a path or a `RunDirectory`. The core has one implementation, `PathDirectory`;
other distributions add more, such as a fast and a slow directory for one run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from ckptcore.commit.location import LocationLike, Place, Within
from ckptcore.commit.locks import IfInUse
from ckptcore.context import Context
from ckptcore.job.agreement import Agreement
from ckptcore.model.tree import JSON
from ckptcore.policies import PreservationPolicy
from ckptcore.protocols import Coordinator, SaveStrategy
from ckptcore.runtime import runtime_of
from ckptcore.saving.requests import Save, SaveDraft
from ckptcore.saving.writing import PlainSave
from ckptcore.step_names import StepNames
from ckptcore.training.steps import StepDirectory

__all__ = [
    "OwnedRun",
    "Ownership",
    "RunDirectory",
    "RunSaves",
    "RunSteps",
    "SavedStep",
    "StepTarget",
    "check_step_names",
    "exchanges_of",
]


class RunSteps(Protocol):
    """The steps of a run, open for reading. Any thread.

    Attributes:
        directories: the directories that steps are in. New steps are saved to the first.
        main: the directory that names the run and has its metadata.
    """

    @property
    def directories(self) -> Sequence[StepDirectory]: ...

    @property
    def main(self) -> StepDirectory: ...

    def reload(self, agreement: Agreement) -> None:
        """List the directories again. On every rank; the leader's listing counts."""
        ...

    def candidates(self) -> Sequence[int]:
        """Return every step that has a name, committed or not, ascending."""
        ...

    def steps(self) -> tuple[int, ...]:
        """Return every committed step, ascending."""
        ...

    def newest_first(self) -> Iterator[int]:
        """Yield every committed step, the newest first; looks no further than the caller iterates."""
        ...

    def latest(self) -> int | None:
        """Return the newest committed step; None if there is none."""
        ...

    def look_again(self, step: int) -> bool:
        """Return whether a step is committed, without relying on what is remembered."""
        ...

    def copies(self, step: int) -> Sequence[int]:
        """Return the numbers of the directories to load a step from, the best first; empty if the step is not there.

        Raises:
            StorageError: if the only directory that may have it does not answer.
        """
        ...

    def copy_place(self, step: int, number: int) -> Place:
        """Return where to read the copy of a step in the directory of that number."""
        ...


@dataclass(frozen=True, slots=True)
class RunSaves:
    """The saves of the process that owns a run, as its directory asks for them. Any thread may call.

    Attributes:
        under_way: returns the steps that this process is saving.
        last_steps: returns the steps that this run saved or loaded last. They are kept, whatever a policy says: the
            newest by number may be older, because the run was set back.
        wait: waits until every save and deletion has ended, and raises their errors.
    """

    under_way: Callable[[], set[int]]
    last_steps: Callable[[], set[int]]
    wait: Callable[[], None]

    def kept(self) -> set[int]:
        """Return the steps that a policy may not delete."""
        return self.last_steps() | self.under_way()


@dataclass(frozen=True, slots=True)
class Ownership:
    """How a `Checkpointer` owns its directory.

    Attributes:
        agreement: an exchange between the processes of the job.
        policy: which steps are kept.
        metadata: JSON to store with the directory; None leaves the stored metadata.
        if_in_use: what to do if another job seems to own the directory.
        saves: the saves of this process.
    """

    agreement: Agreement
    policy: PreservationPolicy
    metadata: Mapping[str, JSON] | None
    if_in_use: IfInUse
    saves: RunSaves


@dataclass(frozen=True, slots=True)
class StepTarget:
    """Where and how a step is saved.

    Attributes:
        place: the directory of the step.
        is_worthless: True if a step that is there is damaged or incomplete, so that replacing it need not be atomic.
        before_commit: called right before the commit by each process that commits; an error of it stops the save.
        strategy: how it is saved.
    """

    place: Within
    is_worthless: bool = False
    before_commit: Callable[[], None] | None = None
    strategy: SaveStrategy[SaveDraft, Save] = field(default_factory=PlainSave)


@dataclass(frozen=True, slots=True)
class SavedStep:
    """A step that was just committed.

    Attributes:
        step, name: its number, and the name of its directory.
        epoch: the epoch that it is in; None if unknown.
        preempted: True if this process is to be preempted.
    """

    step: int
    name: str
    epoch: int | None
    preempted: bool


class OwnedRun(Protocol):
    """A run directory that this job owns, in one of its processes, until it is released.

    Attributes:
        steps: the steps of the run.
    """

    @property
    def steps(self) -> RunSteps: ...

    def begin(self) -> None:
        """Begin background work, such as removing what killed processes left. Called once the steps are listed."""
        ...

    def target(self, step: int, name: str) -> StepTarget:
        """Return where a step is to be saved. On every rank, before the save begins."""
        ...

    def allow(self, step: int, *, is_new: bool) -> None:
        """Wait for a deletion of the step. On the leader, before anything is written.

        Args:
            step: the step.
            is_new: refuse the save if an undamaged copy of the step exists.

        Raises:
            CheckpointExistsError: if it does.
        """
        ...

    def committed(self, saved: SavedStep) -> None:
        """Add a committed step, and begin to delete what the policy gives up. On the thread of the save."""
        ...

    def delete(self, step: int, agreement: Agreement) -> None:
        """Delete a step in the background. On every rank; only the leader deletes.

        Raises:
            CheckpointNotFoundError: if it is not there, or other software wrote it.
            OnlyStepError: if it is the only valid one.
            StepPinnedError: if a reader has pinned it.
        """
        ...

    def take_errors(self) -> Sequence[BaseException]:
        """Wait for the deletions in the background. Return their errors and those of other work, each once."""
        ...

    def close(self) -> None:
        """Finish background work that outlasts saves, as far as the directory's options say.

        Raises:
            CheckpointError: if some work is not finished.
        """
        ...

    def release(self) -> None:
        """Stop background work, and give up the ownership. Further calls do nothing."""
        ...


@runtime_checkable
class RunDirectory(Protocol):
    """Where a run keeps its steps, as the user describes it.

    Attributes:
        location: the path or URL that the run is named by; the same in every process of a job.
    """

    @property
    def location(self) -> LocationLike: ...

    def open(self, names: StepNames, context: Context) -> RunSteps:
        """Open the directory for reading. Lists nothing yet.

        Args:
            names: how steps are named.
            context: options.
        """
        ...

    def own(self, names: StepNames, context: Context, ownership: Ownership) -> OwnedRun:
        """Create the directory if it does not exist, and own it. On every rank. Lists nothing yet.

        Raises:
            DirectoryInUseError: if another job owns it.
            NotSharedError: if this process does not see the directory of the leader.
            StorageError: if it cannot be written.
        """
        ...


def exchanges_of(run: str, context: Context, job: Coordinator) -> Callable[[str], Agreement]:
    """Return a function that begins an exchange about a run between all processes of a job.

    Args:
        run: names the run, and who asks about it.
        context: options.
        job: the processes.
    """
    return lambda what: Agreement(job, runtime_of(context).exchange_key(f"{run}/{what}", job=job))


def check_step_names(names: StepNames | None) -> StepNames:
    """Return the names that a user passed, or the default.

    Raises:
        TypeError: if they are none.
    """
    if names is not None and not isinstance(names, StepNames):
        raise TypeError(
            f"step_names={names!r}: expected StepNames, such as StepNames.of('step_00000010') or "
            "StepNames(StepNameFormat('step_', width=8))"
        )
    return names or StepNames()
