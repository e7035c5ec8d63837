"""Strategies of saves: what a save writes of the parts that were given, and how it claims and commits its target.

A caller passes a strategy to `ckptcore.save`. `prepare` returns the save, `begin` returns the commit of that save, and
the core runs its stages: claim, write, commit. Every stage ends with an exchange of errors between the processes of the
job.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, runtime_checkable

from ckptcore.protocols.layouts import Layout
from ckptcore.protocols.storage import StorageBackend

__all__ = ["FurtherSaves", "SaveCommit", "SaveStrategy", "StepStrategy"]

DraftT_contra = TypeVar("DraftT_contra", contravariant=True)
SaveT = TypeVar("SaveT")
StrategyT = TypeVar("StrategyT")


class SaveCommit(Protocol):
    """The claim and the commit of one save. The core calls its methods in this order, on every rank.

    Errors: what a method raises fails the save on all ranks, because `claim` and `commit` run inside stages of the job.
    """

    @property
    def meaning(self) -> str:
        """What it means if the claim or the writing fails on another rank, such as "nothing was committed"."""
        ...

    @property
    def commit_meaning(self) -> str:
        """What it means if the commit fails on another rank; empty if that cannot be known."""
        ...

    def claim(self) -> None:
        """Claim the target, if this process claims for others; make sure that this process sees the claim, if not."""
        ...

    @property
    def store(self) -> StorageBackend:
        """The storage to write to, opened at the root of the checkpoint. First read in the stage "write"."""
        ...

    def commit(self, payloads: Sequence[object]) -> None:
        """Commit what all processes wrote.

        Args:
            payloads: on the leader one for each rank: its encoded receipts in a job, None without other processes.
                Empty on other ranks.
        """
        ...

    def settle(self, error: Exception | None) -> None:
        """End a save whose commit may have happened.

        Args:
            error: None if every rank has committed. Otherwise what failed in the exchange after this process had done
                its work.

        Raises:
            CommitUnknownError: if the target does not have the save.
        """
        ...

    def abort(self) -> None:
        """Remove what was written. Does nothing after a commit."""
        ...


class SaveStrategy(Protocol[DraftT_contra, SaveT]):
    """What a save writes and commits. Immutable, so that several saves may share one.

    Derive a strategy from `ckptcore.PlainSave`, and override `begin` to return a `SaveCommit` around that of
    `PlainSave`.

    Attributes:
        takes_placeholders: whether the state may have placeholders for what the strategy finds elsewhere.
        checks_target: whether `prepare` checks what is at the location. Otherwise the core refuses what ``overwrite=``
            does not allow.
    """

    @property
    def takes_placeholders(self) -> bool: ...

    @property
    def checks_target(self) -> bool: ...

    def prepare(self, draft: DraftT_contra) -> SaveT:
        """Return the save with the plans of its parts. On every rank, with equal trees; writes nothing to the target.

        Args:
            draft: the target, the described trees and what the root will say.
        """
        ...

    def begin(self, save: SaveT) -> SaveCommit:
        """Return the commit of a save that `prepare` returned, without I/O."""
        ...


@runtime_checkable
class FurtherSaves(Protocol[SaveT]):
    """Optional: a strategy whose saves have further saves, which write the same captured boxes to other locations.

    Its `prepare` returns a save with `Save.further`. The core captures the boxes once for all of them.

    Attributes:
        layouts: the layouts of the further saves.
        signature: text that the processes of a job compare; a save is refused if it differs.
    """

    @property
    def layouts(self) -> Sequence[str | Layout]: ...

    @property
    def signature(self) -> str: ...

    def after_commit(self, save: SaveT, write: Callable[[SaveT], None]) -> None:
        """Write the further saves. On every rank, once the save is committed.

        Args:
            save: the save.
            write: writes and commits a further save.
        """
        ...


class StepStrategy(Protocol[StrategyT]):
    """Strategies for the steps of a `Checkpointer`. Immutable.

    Attributes:
        layouts: layouts that the strategies need besides that of the `Checkpointer`, which refuses unknown ones.
    """

    @property
    def layouts(self) -> Sequence[str | Layout]: ...

    def check(self, steps: str | os.PathLike[str]) -> None:
        """Refuse, when a `Checkpointer` begins, what would fail at a step.

        Args:
            steps: the directory of the run.
        """
        ...

    def for_step(self, step: int, name: str, strategy: StrategyT) -> StrategyT:
        """Return the strategy of a step. On every rank, with equal arguments.

        Args:
            step: its number.
            name: the name of its directory.
            strategy: the strategy that the directory of the run needs. The result wraps or is it.
        """
        ...
