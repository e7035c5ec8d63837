"""The processes of one save agreeing, stage by stage, on whether it goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, TypeVar

from ckptcore.errors import CommitUnknownError, CoordinationTimeoutError, PluginError, RankFailedError
from ckptcore.events import Recording
from ckptcore.job.gathering import BLOCK_RANKS, Gathering
from ckptcore.model.tree import JSON
from ckptcore.protocols import Coordinator

__all__ = ["Agreement", "Stage", "encode_outcome"]

T = TypeVar("T", bound=JSON)

_TOLD: Final = 20
"""Ranks that failed of which all others are told; of more, how many they are."""

_REASON: Final = 4000
"""Characters of what is told of ranks that did not come."""


@dataclass(slots=True)
class Stage:
    """What a rank brings to the end of a stage and takes from it.

    Attributes:
        payload: JSON or bytes for the leader.
        payloads: on the leader, once the stage is over, those of all ranks in their order.
        done: whether this rank did its work. The others may have heard so, and go on, though the exchange failed here.
        failed: the ranks that did not, once the stage is over: the first ones, where they are many.
    """

    payload: JSON | bytes = None
    payloads: Sequence[JSON | bytes] = field(default_factory=list)
    done: bool = False
    failed: Sequence[int] = ()


class Agreement:
    """The exchanges of one save. In a job of one process nothing is exchanged.

    Every rank says a random token in the first stage. The leader tells the tokens back, those of a block to that block, and a rank that
    does not find its own was told what an earlier operation left behind. What follows has keys that hold a token of the leader, which no
    other operation has.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        key: str,
        recording: Recording | None = None,
        *,
        block_ranks: int = BLOCK_RANKS,
    ) -> None:
        """Agree through a coordinator.

        Args:
            coordinator: the processes.
            key: unique to the operation and the same on every rank.
            recording: is told how long exchanges take.
            block_ranks: see `Gathering`.
        """
        self._coordinator = coordinator
        self._gathering = Gathering(coordinator, block_ranks=block_ranks)
        self._block_ranks = block_ranks
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
        made = Agreement(self._coordinator, key, recording, block_ranks=self._block_ranks)
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
        token = None if self._met else os.urandom(8).hex()
        try:
            yield stage
            outcome = encode_outcome(token, stage.payload)
            stage.done = True
        except BaseException as caught:  # noqa: BLE001  # told to the others first, then raised below
            error = caught
            outcome = _encode_failure(token, error)
        if isinstance(error, CoordinationTimeoutError) and 0 in error.missing:
            raise error  # there is no leader to tell it to
        verdict = _Verdict()
        try:
            verdict = self._exchange(name, outcome, token, stage)
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"telling the other ranks failed too: {type(failure).__name__}: {failure}")
        if error is not None:
            elsewhere = [failure for failure in verdict.failed if failure[0] != self.rank]
            if elsewhere:
                also = replace(verdict, failed=elsewhere)
                error.add_note(f"the stage {name!r} failed also on {_told(also)}")
            try:
                raise error
            finally:
                del error  # else it and this frame held each other, and the state that is saved
        if verdict.failed:
            stage.failed = [rank for rank, _ in verdict.failed]
            kind = CommitUnknownError if verdict.unknown else RankFailedError
            raise kind(f"the stage {name!r} failed on {_told(verdict)}" + (f"; {meaning}" if meaning else ""))

    def _exchange(self, name: str, outcome: bytes, token: str | None, stage: Stage) -> _Verdict:
        """What failed, told to all by the leader."""
        key = f"{self._key}/{name}"
        with self._recording.phase("exchange") if self._recording is not None else nullcontext():
            try:
                gathered = self._gathering.gather(key, outcome)
            except CoordinationTimeoutError as error:
                self._tell_who_is_missing(key, token, error)
                raise
            verdict, tokens = None, []
            if gathered is not None:
                outcomes = [_decode_outcome(data) for data in gathered]
                stage.payloads = [payload for _, payload in outcomes]
                tokens = [head["token"] for head, _ in outcomes]
                failed = [(rank, head["error"]) for rank, (head, _) in enumerate(outcomes) if head["error"] is not None]
                unknown = any(head["unknown"] for head, _ in outcomes)
                verdict = _Verdict(failed[:_TOLD], max(0, len(failed) - _TOLD), unknown)
            return self._verdict(key, token, verdict, tokens)

    def _verdict(self, key: str, token: str | None, verdict: _Verdict | None, tokens: Sequence[str]) -> _Verdict:
        """What the leader tells: as much to each rank whatever the size of the job."""

        def say(block: range) -> bytes:
            found = tokens[block.start : block.stop]
            return _encode({**asdict(verdict or _Verdict()), "leader": tokens[0] if tokens else None,
                            "first": block.start, "tokens": list(found)})  # fmt: skip

        leads = say if verdict is not None else None
        if token is not None:
            told = json.loads(self._gathering.tell_blocks(f"{key}/verdict", leads))
        else:
            told = json.loads(self._gathering.tell(f"{key}/verdict", None if leads is None else leads(range(0))))
        if told["leader"] is not None and token is not None:
            self._meet(key, token, told)
        return _Verdict([(rank, reason) for rank, reason in told["failed"]], told["others"], told["unknown"])

    def _tell_who_is_missing(self, key: str, token: str | None, error: CoordinationTimeoutError) -> None:
        """Let the ranks that came know at once, and those that come late when they do: else each would wait in vain."""
        if self.rank != 0 or not error.missing:
            return
        reason = f"CoordinationTimeoutError: {error}"[:_REASON]
        failed = [(rank, reason) for rank in error.missing[:_TOLD]]
        try:
            self._verdict(key, token, _Verdict(failed, max(0, len(error.missing) - _TOLD)), ())
        except Exception as failure:  # noqa: BLE001  # the error that stopped the stage says more
            error.add_note(f"telling the other ranks failed too: {type(failure).__name__}: {failure}")

    def _meet(self, key: str, token: str, told: Mapping[str, Any]) -> None:
        """Make sure that the leader answered this rank, and take up keys that are of this operation alone."""
        if told["tokens"][self.rank - told["first"]] != token:
            raise RankFailedError(
                f"the answer to the exchange {key!r} is not one to rank {self.rank}: it was left behind by an "
                "operation that failed, or that a process which was restarted alone took part in; expected the ranks "
                "to begin the same operations. Start all processes of the job again, or give them a Context with a "
                "new coordinator"
            )
        self._met = True
        self._key = f"{self._key}/{told['leader']}"

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


@dataclass(frozen=True, slots=True)
class _Verdict:
    """How a stage ended.

    Attributes:
        failed: ranks that failed, and why.
        others: how many more did.
        unknown: whether that leaves the commit unknown.
    """

    failed: Sequence[tuple[int, str]] = ()
    others: int = 0
    unknown: bool = False


def encode_outcome(token: str | None, payload: JSON | bytes) -> bytes:
    """What a rank says: a line of JSON, and bytes behind it where those are its payload."""
    head: dict[str, JSON] = {"error": None, "unknown": False, "token": token}
    if isinstance(payload, bytes):
        return _encode(head) + b"\n" + payload
    return _encode({**head, "payload": payload})


def _encode_failure(token: str | None, error: BaseException) -> bytes:
    reason = f"{type(error).__name__}: {error}"
    return _encode({"error": reason, "unknown": isinstance(error, CommitUnknownError), "token": token, "payload": None})


def _decode_outcome(data: bytes) -> tuple[dict[str, Any], JSON | bytes]:
    line, separator, rest = data.partition(b"\n")
    head: dict[str, Any] = json.loads(line)
    return head, rest if separator else head["payload"]


def _told(verdict: _Verdict) -> str:
    """Which ranks failed, and why. Ranks of one host often fail alike, and are told together."""
    ranks: dict[str, list[int]] = {}
    for rank, reason in verdict.failed:
        ranks.setdefault(reason, []).append(rank)
    told = "; ".join(
        f"rank {alike[0]}: {reason}" if len(alike) == 1 else f"the ranks {alike}: {reason}"
        for reason, alike in ranks.items()
    )
    return told + (f"; and {verdict.others} more ranks" if verdict.others else "")


def _encode(document: JSON) -> bytes:
    try:
        return json.dumps(document).encode("ascii")
    except (TypeError, ValueError) as error:
        raise PluginError(
            f"what a rank tells the others (of a save, the receipt of its layout) is not JSON: {error}"
        ) from error
