"""Strategies of saves: what a save writes of the parts that were given, and how it claims and commits its target.

A caller passes a strategy to `ckptcore.save`. `prepare` returns the save, `begin` returns the commit of that save, and the
core runs its stages: claim, write, commit. Every stage ends with an exchange of errors between the processes of the job.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from ckptcore.protocols.storage import StorageBackend

__all__ = ["SaveCommit", "SaveStrategy"]

DraftT_contra = TypeVar("DraftT_contra", contravariant=True)
SaveT = TypeVar("SaveT")


class SaveCommit(Protocol):
    """The claim and the commit of one save, on one process of the job. The core calls its methods in this order, on every rank.

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
        """The storage that this process writes to, opened at the root of the checkpoint. The core reads it first in the stage of writing."""
        ...

    def commit(self, payloads: Sequence[object]) -> None:
        """Commit what all processes wrote.

        Args:
            payloads: on the leader, the encoded receipts of every rank; elsewhere nothing.
        """
        ...

    def settle(self, error: Exception | None) -> None:
        """End a save whose commit may have happened.

        Args:
            error: None if every rank has committed. Otherwise what failed in the exchange after this process had done its work.

        Raises:
            CommitUnknownError: if the target does not have the save.
        """
        ...

    def abort(self) -> None:
        """Remove what was written. Does nothing after a commit."""
        ...


class SaveStrategy(Protocol[DraftT_contra, SaveT]):
    """What a save writes and commits. Immutable, so that several saves may share one.

    Derive a strategy from `ckptcore.PlainSave`, and override `begin` to return a `SaveCommit` around that of `PlainSave`.

    Attributes:
        takes_placeholders: whether the state may have placeholders for what the strategy finds elsewhere.
        checks_target: whether `prepare` checks what is at the location. Otherwise the core refuses what ``overwrite=`` does not allow.
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
