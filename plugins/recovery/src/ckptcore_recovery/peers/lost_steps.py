"""LostMembers: what a job that lost more failure domains than it survives still has in memory. Nothing is changed."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from ckptcore.commit.root import ROOT_KEY, Claim, PartialSave, Root
from ckptcore.commit.stored_root import read_root
from ckptcore.errors import CheckpointError, CorruptCheckpointError, StorageError
from ckptcore.io.threads import IOThreads, map_ordered
from ckptcore.step_names import StepNames
from ckptcore_recovery.peers.session import Session
from ckptcore_recovery.peers.spreading import Reached
from ckptcore_recovery.peers.storage import PeerStorage
from ckptcore_recovery.peers.views import Member

_THREADS: Final = 32
_SHOWN: Final = 20
"""The maximum number of steps that a message names."""


class StepsLeft(NamedTuple):
    """The steps in memory, as far as they are known.

    Attributes:
        whole: the newest committed step of which all objects are left; None if there is none.
        lost: the newer steps that may have been committed and are not whole, newest first.
        is_all: False if there may be more steps, of which no object is left.
    """

    whole: int | None
    lost: tuple[int, ...]
    is_all: bool

    def __str__(self) -> str:
        steps = ", ".join([f"step {step}" for step in self.lost[:_SHOWN]])
        return " and ".join(filter(None, [steps, "" if self.is_all else "perhaps steps whose names are lost, too"]))


class _NotCommittedError(Exception):
    """A step is not committed."""


@dataclass(frozen=True, slots=True)
class LostMembers:
    """The members of the last view that do not answer, if objects may be lost with them.

    Attributes:
        session: the last view as this process uses it.
        lost: the ids of these members.
    """

    session: Session
    lost: AbstractSet[str]

    def __str__(self) -> str:
        view = self.session.view
        lost = [member for member in view.members if member.id in self.lost]
        domains = {member.domain for member in view.members}
        answering = {member.domain for member in view.members if member.id not in self.lost}
        return (
            f"{len(view.members) - len(lost)} of the {len(view.members)} memory servers of its last start answer, in "
            f"{len(answering)} of {len(domains)} failure domains (no answer from {view.places(self.lost)}); its steps "
            f"survive the loss of any {view.survivable} of them"
        )

    def steps(self, directory: str, names: StepNames) -> StepsLeft:
        """Return what is left of the steps in a directory of the memory.

        Args:
            directory: the directory, with a slash at its end.
            names: the names of steps.
        """
        members = [member for member in self.session.view.writers if member.id not in self.lost]
        threads = IOThreads(min(len(members), _THREADS))
        listed = map_ordered(threads, members, partial(self._keys_of, directory))
        below: dict[str, set[str]] = {}
        for key in itertools.chain.from_iterable(keys or () for keys in listed):
            below.setdefault(key.removeprefix(directory).partition("/")[0], set()).add(key)
        whole, lost = None, list[int]()
        for step, name in sorted(names.find(below).items(), reverse=True):
            is_whole = self._is_whole(f"{directory}{name}/", below[name])
            if is_whole:
                whole = step
                break
            if is_whole is not None:
                lost.append(step)
        return StepsLeft(whole, tuple(lost), None not in listed and self.session.view.knows_all_without(self.lost))

    def _keys_of(self, directory: str, member: Member) -> Sequence[str] | None:
        """Return the keys below a directory that a member knows; None if it does not answer with them.

        Each member is asked for all that it knows, because a start that was killed may have left some with older views.
        """
        keys: list[str] = []
        request = {"op": "sizes", "below": directory, "after": None, "lost": None}
        while True:
            try:
                _, answer = self.session.server(member).call(request)
            except StorageError:
                return None
            page = Reached.decode(bytes(answer))
            keys += [key for key, _ in page.items]
            if not page.more:
                return keys
            request["after"] = keys[-1]

    def _is_whole(self, directory: str, known: Collection[str]) -> bool | None:
        """Return True if all objects of a step are left, and None if it is not committed.

        Args:
            directory: the directory of the step, with a slash at its end.
            known: the keys of its known objects.
        """
        try:
            root = directory + ROOT_KEY
            if root not in known:
                return False if self._is_unknown(root) else None
            keys = [*known, *self._named(directory)]
            return all(self._is_left(key) for key in keys)
        except _NotCommittedError:
            return None
        except CheckpointError:
            return False

    def _named(self, directory: str) -> Iterator[str]:
        """Yield the keys that the root of a step and the roots of its members name."""
        root = read_root(PeerStorage(self.session.job, directory, self.session))
        if root is None or isinstance(root, Claim | PartialSave):
            raise _NotCommittedError
        if isinstance(root, Root):
            yield from [directory + key for key in root.objects]
            return
        for name, member in root.members.items():
            for rank in range(member.processes or 1):
                inner = f"{directory}{member.directory(name, rank)}/"
                if self._is_unknown(inner + ROOT_KEY):
                    raise CorruptCheckpointError(f"the root of {inner} is lost")
                saved = read_root(PeerStorage(self.session.job, inner, self.session))
                yield from [inner + key for key in saved.objects] if isinstance(saved, Root) else ()

    def _is_unknown(self, key: str) -> bool:
        """Return True if all members that have the entry of a key are lost."""
        return self.session.view.deciding(key, self.lost) is None

    def _is_left(self, key: str) -> bool:
        """Return True if enough holders of an object answer."""
        if self._is_unknown(key):
            return False
        entry = self.session.find(key)
        left = [name for name in entry.holders if name in self.session.view.by_id and name not in self.lost]
        return not entry.blob or len(left) >= entry.needed
