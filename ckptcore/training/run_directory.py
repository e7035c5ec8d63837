"""RunDirectory: the protocol by which the steps of a run are listed, opened, saved, protected and deleted.

`Checkpointer` and `CheckpointReader` take a path or a `RunDirectory`. The core has one implementation, `PathDirectory`.
Other distributions add more, such as a fast and a slow directory for one run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Protocol, runtime_checkable

from ckptcore.commit.location import AnyLocation, LocationLike, SubPath
from ckptcore.commit.locks import IfInUse
from ckptcore.context import Context
from ckptcore.job.agreement import Agreement
from ckptcore.model.tree import JSON
from ckptcore.policies import PreservationPolicy
from ckptcore.protocols import Coordinator, SaveStrategy
from ckptcore.records import dataclass
from ckptcore.runtime import runtime_of
from ckptcore.saving.requests import Save, SaveDraft
from ckptcore.saving.writing import PlainSave
from ckptcore.step_names import StepNames
from ckptcore.training.steps import StepDirectory


class RunSteps(Protocol):
    """The steps of a run, open for reading. Thread-safe.

    Attributes:
        directories: the directories of the steps. New steps are saved to the first.
        main: the directory that has the name and the metadata of the run.
    """

    @property
    def directories(self) -> Sequence[StepDirectory]: ...

    @property
    def main(self) -> StepDirectory: ...

    def reload(self, agreement: Agreement) -> None:
        """List the directories again. Called on every rank. All ranks use the leader's listing."""
        ...

    def candidates(self) -> Sequence[int]:
        """Return every step that has a name, committed or not, ascending."""
        ...

    def steps(self) -> tuple[int, ...]:
        """Return every committed step, ascending."""
        ...

    def newest_first(self) -> Iterator[int]:
        """Yield every committed step, newest first. Lazy: checks a step when the caller reaches it."""
        ...

    def latest(self) -> int | None:
        """Return the newest committed step; None if there is none."""
        ...

    def recheck(self, step: int) -> bool:
        """Return True if a step is committed, without using cached results."""
        ...

    def copies(self, step: int) -> Sequence[int]:
        """Return the numbers of the directories to load a step from, the best first; empty if no directory has it.

        Raises:
            StorageError: the only directory that may have it failed.
        """
        ...

    def copy_location(self, step: int, number: int) -> AnyLocation:
        """Return the location of the copy of a step in one of the directories."""
        ...


@dataclass(frozen=True, slots=True)
class RunSaves:
    """Functions that a run directory calls to learn about the saves of its owner. Thread-safe.

    Attributes:
        under_way: returns the steps that this process is saving.
        last_steps: returns the steps that this run saved or loaded last. They are always kept. If the run was set back,
            they are not the steps with the highest numbers.
        wait: waits until every save and deletion has ended, and raises their errors.
    """

    under_way: Callable[[], set[int]]
    last_steps: Callable[[], set[int]]
    wait: Callable[[], None]

    def kept(self) -> set[int]:
        """Return the steps that a policy must not delete."""
        return self.last_steps() | self.under_way()


@dataclass(frozen=True, slots=True)
class Ownership:
    """The options with which a `Checkpointer` owns its directory.

    Attributes:
        agreement: an exchange between the processes of the job.
        policy: chooses the steps to keep.
        metadata: JSON to store with the directory; None leaves the stored metadata unchanged.
        if_in_use: what to do if another job seems to own the directory.
        saves: the saves of this process.
        other_files: True to delete steps with files that no save wrote.
    """

    agreement: Agreement
    policy: PreservationPolicy
    metadata: Mapping[str, JSON] | None
    if_in_use: IfInUse
    saves: RunSaves
    other_files: bool = False


@dataclass(frozen=True, slots=True)
class StepTarget:
    """The location of a new step, and the strategy that saves it.

    Attributes:
        location: the directory of the step.
        is_unusable: True if an existing step is damaged or incomplete. Replacing it need not be atomic.
        before_commit: called by each process that commits, right before the commit. Its error stops the save.
        strategy: the strategy of the save.
        owner: on the leader, the number of the owner of the run: see `Lock.number`. 0 if it is unknown.
    """

    location: SubPath
    is_unusable: bool = False
    before_commit: Callable[[], None] | None = None
    strategy: SaveStrategy[SaveDraft, Save] = field(default_factory=PlainSave)
    owner: int = 0


@dataclass(frozen=True, slots=True)
class SavedStep:
    """A step that was just committed.

    Attributes:
        step: its number.
        name: the name of its directory.
        epoch: its epoch; None if unknown.
        preempted: True if a process of the job will be preempted.
    """

    step: int
    name: str
    epoch: int | None
    preempted: bool


class OwnedRun(Protocol):
    """A run directory that this job owns until it is released, in one process of the job.

    Attributes:
        steps: the steps of the run.
    """

    @property
    def steps(self) -> RunSteps: ...

    def begin(self) -> None:
        """Begin background work, such as removing the files of killed processes. Called after the first listing."""
        ...

    def target(self, step: int, name: str) -> StepTarget:
        """Return the target of a new step. Called on every rank, before the save begins."""
        ...

    def allow(self, step: int, *, is_new: bool) -> None:
        """Wait for a deletion of the step. Called on the leader, before anything is written.

        Args:
            step: the step.
            is_new: True to refuse the save if an undamaged copy of the step exists.

        Raises:
            CheckpointExistsError: an undamaged copy exists.
        """
        ...

    def committed(self, saved: SavedStep) -> None:
        """Add a committed step, and begin to delete steps by the policy. Called on the thread of the save."""
        ...

    def delete(self, step: int, agreement: Agreement) -> None:
        """Delete a step in the background. Called on every rank. Only the leader deletes.

        Raises:
            CheckpointNotFoundError: it does not exist, or other software wrote it.
            OnlyStepError: it is the only valid step.
            StepPinnedError: a reader has pinned it, or it is being saved.
            CheckpointReferredError: other checkpoints refer to it.
        """
        ...

    def take_errors(self) -> Sequence[BaseException]:
        """Wait for the background deletions. Return their errors and the errors of other background work, each once."""
        ...

    def close(self) -> None:
        """Finish background work that continues after the saves, if the options of the directory require it.

        Raises:
            CheckpointError: some work is not finished.
        """
        ...

    def release(self) -> None:
        """Stop background work, and release the ownership. Further calls do nothing."""
        ...


@runtime_checkable
class RunDirectory(Protocol):
    """The description of the directory of a run, which a user passes.

    Attributes:
        location: the path or URL that identifies the run; equal in every process of a job.
    """

    @property
    def location(self) -> LocationLike: ...

    def open(self, names: StepNames, context: Context) -> RunSteps:
        """Open the directory for reading. Lists nothing yet.

        Args:
            names: the names of steps.
            context: options.
        """
        ...

    def own(self, names: StepNames, context: Context, ownership: Ownership) -> OwnedRun:
        """Create the directory if it does not exist, and own it. Called on every rank. Lists nothing yet.

        Raises:
            DirectoryInUseError: another job owns it.
            NotSharedError: this process does not see the directory of the leader.
            StorageError: it cannot be written.
        """
        ...


def exchanges_of(run: str, context: Context, job: Coordinator) -> Callable[[str], Agreement]:
    """Return a function that begins an exchange between all processes of a job, given the subject of the exchange.

    Args:
        run: the name of the run and of the caller; exchanges with equal names and subjects belong together.
        context: options.
        job: the processes.
    """
    calls = {"own": "opening", "look-back": "opening", "list": "reload", "name": "save", "decide": "save"}

    def begin(what: str) -> Agreement:
        call = f"{calls.get(what, what.replace('-', ' of step '))} of {run.removesuffix('/checkpointer')}"
        return Agreement(job, runtime_of(context).exchange_key(f"{run}/{what}", job=job), call=call)

    return begin


def check_step_names(names: StepNames | None) -> StepNames:
    """Return the names that a user passed, or the default.

    Raises:
        TypeError: the argument is not a `StepNames`.
    """
    if names is not None and not isinstance(names, StepNames):
        raise TypeError(
            f"step_names={names!r}: expected StepNames, such as StepNames.of('step_00000010') or "
            "StepNames(StepNameFormat('step_', width=8))"
        )
    return names or StepNames()
