"""Imagined jobs: what each process of a job would hear from the others, where none of them runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from ckptcore.errors import PluginError
from ckptcore.events import Recording
from ckptcore.job.agreement import Agreement, Stage
from ckptcore.model.tree import JSON

__all__ = ["ImaginedAgreement", "ImaginedJob", "NotToldYetError"]

T = TypeVar("T", bound=JSON)
R = TypeVar("R")


class NotToldYetError(Exception):
    """A process would decide for all, and some have not said yet what it decides by. To be asked again when they have."""


class ImaginedJob:
    """A job whose processes are played one after the other.

    Each is played up to where it would need what the others say, until all have said it. Most jobs need one round: every process has
    the same tree.
    """

    def __init__(self, size: int) -> None:
        """A job of so many processes."""
        self.size = size
        self._told: dict[str, dict[int, JSON]] = {}
        self._decided: dict[str, JSON] = {}

    def play(self, process: Callable[[Agreement], R]) -> list[R]:
        """What each process comes to, in order of rank."""
        while True:
            results = []
            waiting = False
            for rank in range(self.size):
                try:
                    results.append(process(ImaginedAgreement(self, rank)))
                except NotToldYetError:
                    waiting = True
            if not waiting:
                return results

    def tell(self, name: str, rank: int, payload: JSON) -> Sequence[JSON]:
        """What all ranks said in a stage, if they all did; else nothing."""
        told = self._told.setdefault(name, {})
        told[rank] = json.loads(json.dumps(payload))  # as it would arrive
        return [told[other] for other in range(self.size)] if len(told) == self.size else []

    def decide(self, name: str, rank: int, decide: Callable[[], T]) -> Any:
        """The decision of the leader."""
        if name not in self._decided:
            if rank or any(len(told) < self.size for told in self._told.values()):
                raise NotToldYetError(name)
            self._decided[name] = json.loads(json.dumps(decide()))
        return self._decided[name]


class ImaginedAgreement(Agreement):
    """The exchanges of one process of an imagined job."""

    def __init__(self, job: ImaginedJob, rank: int) -> None:
        super().__init__(_Member(rank, job.size), "imagined")
        self._job = job

    def part(self, name: str) -> Agreement:
        return self

    def recorded(self, recording: Recording) -> Agreement:
        return self

    @contextmanager
    def stage(self, name: str, *, meaning: str = "") -> Iterator[Stage]:
        stage = Stage()
        yield stage
        stage.done = True
        stage.payloads = self._job.tell(name, self.rank, stage.payload)

    def lead(self, name: str, decide: Callable[[], T]) -> T:
        decision: T = self._job.decide(name, self.rank, decide)
        return decision


class _Member:
    """A `Coordinator` that knows its place and reaches nobody."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def gather(self, key: str, payload: bytes) -> Sequence[bytes] | None:
        _refuse(key)

    def broadcast(self, key: str, payload: bytes | None) -> bytes:
        _refuse(key)


def _refuse(key: str) -> NoReturn:
    raise PluginError(f"the exchange {key!r} was begun in a job that is imagined: this is a bug of ckptcore")
