"""The processes of one save agreeing, stage by stage, on whether it goes on."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ckptcore.errors import CommitUnknownError, CoordinationTimeoutError, PluginError, RankFailedError
from ckptcore.events import Recording
from ckptcore.model.tree import JSON
from ckptcore.protocols import Coordinator

__all__ = ["Agreement", "Stage"]

T = TypeVar("T", bound=JSON)


@dataclass(slots=True)
class Stage:
    """What a rank brings to the end of a stage and takes from it.

    Attributes:
        payload: JSON for the leader.
        payloads: on the leader, once the stage is over, those of all ranks in their order.
        done: whether this rank did its work. The others may have heard so, and go on, though the exchange failed here.
        failed: the ranks that did not, once the stage is over.
    """

    payload: JSON = None
    payloads: Sequence[JSON] = field(default_factory=list)
    done: bool = False
    failed: Sequence[int] = ()


class Agreement:
    """The exchanges of one save. In a job of one process nothing is exchanged.

    Every rank says a random token in the first stage. The leader tells all tokens back, and a rank that does not find its own
    was told what an earlier operation left behind. What follows has keys that hold a token of the leader, which no other operation has.
    """

    def __init__(self, coordinator: Coordinator, key: str, recording: Recording | None = None) -> None:
        """Agree through a coordinator.

        Args:
            coordinator: the processes.
            key: unique to the operation and the same on every rank.
            recording: is told how long exchanges take.
        """
        self._coordinator = coordinator
        self._key = key
        self._recording = recording
        self._met = False
        self.rank = coordinator.rank
        self.size = coordinator.size

    def part(self, name: str) -> Agreement:
        """The exchanges of a part of the operation, which has stages of its own under the same names."""
        return self._like(f"{self._key}/{name}", self._recording)

    def recorded(self, recording: Recording) -> Agreement:
        """The same exchanges; another recording is told how long they take."""
        return self._like(self._key, recording)

    def _like(self, key: str, recording: Recording | None) -> Agreement:
        made = Agreement(self._coordinator, key, recording)
        made._met = self._met
        return made

    @contextmanager
    def stage(self, name: str, *, meaning: str = "") -> Iterator[Stage]:
        """Do the work of a stage in the body; afterwards every rank knows whether it succeeded everywhere.

        Args:
            name: of the stage; a key takes each name once.
            meaning: ends the message of the error where the stage failed on another rank.

        Raises:
            RankFailedError: if it failed on another rank, with that rank's error. A rank's own error is raised as it is.
            CommitUnknownError: if that rank's error is one.
            CoordinationTimeoutError: if a rank did not come.
        """
        stage = Stage()
        if self.size == 1:
            yield stage
            stage.done = True
            stage.payloads = [stage.payload]
            return
        error: BaseException | None = None
        outcome = b""
        token = None if self._met else secrets.token_hex(8)
        try:
            yield stage
            outcome = _encode({"error": None, "payload": stage.payload, "token": token})
            stage.done = True
        except BaseException as caught:  # noqa: BLE001  # told to the others first, then raised below
            error = caught
            outcome = _encode(
                {
                    "error": f"{type(error).__name__}: {error}",
                    "unknown": isinstance(error, CommitUnknownError),
                    "payload": None,
                    "token": token,
                }
            )
        if isinstance(error, CoordinationTimeoutError) and 0 in error.missing:
            raise error  # there is no leader to tell it to
        failures: Sequence[tuple[int, str, bool]] = ()
        try:
            failures = self._exchange(name, outcome, token, stage)
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"telling the other ranks failed too: {type(failure).__name__}: {failure}")
        if error is not None:
            elsewhere = [failure for failure in failures if failure[0] != self.rank]
            if elsewhere:
                error.add_note(f"the stage {name!r} failed also on {_told(elsewhere)}")
            try:
                raise error
            finally:
                del error  # else it and this frame held each other, and the state that is saved
        if failures:
            stage.failed = [rank for rank, _, _ in failures]
            kind = CommitUnknownError if any(unknown for _, _, unknown in failures) else RankFailedError
            raise kind(f"the stage {name!r} failed on {_told(failures)}" + (f"; {meaning}" if meaning else ""))

    def _exchange(self, name: str, outcome: bytes, token: str | None, stage: Stage) -> Sequence[tuple[int, str, bool]]:
        """What failed, told to all by the leader: the rank, its error, and whether that leaves the commit unknown."""
        key = f"{self._key}/{name}"
        with self._recording.phase("exchange") if self._recording is not None else nullcontext():
            try:
                gathered = self._coordinator.gather(key, outcome)
            except CoordinationTimeoutError as error:
                self._tell_who_is_missing(key, error)
                raise
            told: JSON = None
            if gathered is not None:
                outcomes = [json.loads(data) for data in gathered]
                stage.payloads = [outcome["payload"] for outcome in outcomes]
                failed = [
                    [rank, outcome["error"], outcome["unknown"]]
                    for rank, outcome in enumerate(outcomes)
                    if outcome["error"] is not None
                ]
                told = {"failed": failed, "tokens": [outcome["token"] for outcome in outcomes]}
            verdict = json.loads(self._verdict(f"{key}/verdict", told))
        self._meet(key, token, verdict["tokens"])
        failures: Sequence[tuple[int, str, bool]] = verdict["failed"]
        return failures

    def _verdict(self, key: str, told: JSON) -> bytes:
        """What the leader tells; waits for up to two deadlines.

        The leader may come up to a deadline later than this rank, and says who is missing when its own is over.
        """
        if self.rank == 0:
            return self._coordinator.broadcast(key, _encode(told))
        try:
            return self._coordinator.broadcast(key, None)
        except CoordinationTimeoutError:
            return self._coordinator.broadcast(key, None)

    def _tell_who_is_missing(self, key: str, error: CoordinationTimeoutError) -> None:
        """Let the ranks that came know at once, and those that come late when they do: else each would wait in vain."""
        failed: JSON = [[rank, f"CoordinationTimeoutError: {error}", False] for rank in error.missing]
        if self.rank != 0 or not failed:
            return
        try:
            self._coordinator.broadcast(f"{key}/verdict", _encode({"failed": failed, "tokens": None}))
        except Exception as failure:  # noqa: BLE001  # the error that stopped the stage says more
            error.add_note(f"telling the other ranks failed too: {type(failure).__name__}: {failure}")

    def _meet(self, key: str, token: str | None, tokens: Any) -> None:
        """Make sure that the leader answered this rank, and take up keys that are of this operation alone."""
        if token is None or tokens is None:
            return
        if tokens[self.rank] != token:
            raise RankFailedError(
                f"the answer to the exchange {key!r} is not one to rank {self.rank}: it was left behind by an operation that "
                "failed, or that a process which was restarted alone took part in; expected the ranks to begin the same operations. "
                "Start all processes of the job again, or give them a Context with a new coordinator"
            )
        self._met = True
        self._key = f"{self._key}/{tokens[0]}"

    def lead(self, name: str, decide: Callable[[], T]) -> T:
        """Let the leader decide; every rank gets the decision.

        Raises:
            RankFailedError: if the leader could not; it raises its own error.
        """
        if self.size == 1:
            return decide()
        key = f"{self._key}/{name}"
        if self.rank != 0:
            told = json.loads(self._coordinator.broadcast(key, None))
            if told["error"] is not None:
                raise RankFailedError(f"rank 0: {told['error']}")
            decision: T = told["decision"]
            return decision
        try:
            decision = decide()
            told = _encode({"error": None, "decision": decision})
        except BaseException as error:
            self._coordinator.broadcast(key, _encode({"error": f"{type(error).__name__}: {error}", "decision": None}))
            raise
        self._coordinator.broadcast(key, told)
        return decision


def _told(failures: Sequence[tuple[int, str, bool]]) -> str:
    """Which ranks failed, and why. Ranks of one host often fail alike, and are told together."""
    ranks: dict[str, list[int]] = {}
    for rank, reason, _ in failures:
        ranks.setdefault(reason, []).append(rank)
    return "; ".join(
        f"rank {alike[0]}: {reason}" if len(alike) == 1 else f"the ranks {alike}: {reason}"
        for reason, alike in ranks.items()
    )


def _encode(document: JSON) -> bytes:
    try:
        return json.dumps(document).encode("ascii")
    except (TypeError, ValueError) as error:
        raise PluginError(
            f"what a rank tells the others (of a save, the receipt of its layout) is not JSON: {error}"
        ) from error
