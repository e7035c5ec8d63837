"""Agreement: stages of an operation, and keys of exchanges. After a stage, every process knows if all succeeded."""

from __future__ import annotations

import copy
import functools
import json
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import xxhash

from ckptcore.errors import CommitUnknownError, CoordinationTimeoutError, PluginError, RankFailedError
from ckptcore.events import Recording
from ckptcore.model.tree import JSON
from ckptcore.protocols import Coordinator

if TYPE_CHECKING:
    from ckptcore.job.gathering import Gathering

T = TypeVar("T", bound=JSON)

_SHOWN: Final = 20
"""Maximum number of failed ranks that are reported with their errors; the others are counted."""

_REASON: Final = 4000
"""Maximum length of the reported text of a timeout, in characters."""


class ExchangeCounts:
    """The counts of operations that this process began, by job and name. Thread-safe.

    Counts belong to a job and not to a Context. Otherwise two Contexts that save to one location would use the same
    keys, and one Context could receive a message of a failed exchange of the other Context. Each name has its own
    count. If a rank misses an operation after an error, its counts of all other names still equal the counts of the
    other ranks.

    Names are stored as hashes. Each takes about a hundred bytes until the job ends.
    """

    def __init__(self) -> None:
        """Start with zero counts."""
        self._lock = threading.Lock()
        self._of_found_jobs: dict[int, int] = {}
        self._of_coordinators: dict[int, dict[int, int]] = {}
        self._kept: list[Coordinator] = []

    def key(self, coordinator: Coordinator | None, name: str) -> str:
        """Return a key for the exchanges of an operation that begins now.

        Args:
            coordinator: the coordinator of a Context, or of a job that this process joined and may join again; None for
                a job that gets a new coordinator for each operation.
            name: the name of the operation, such as its location.
        """
        hashed = xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogatepass"))
        with self._lock:
            counts = self._of_found_jobs if coordinator is None else self._counts_of(coordinator)
            number = counts.get(hashed, 0)
            counts[hashed] = number + 1
        return f"{name}#{number}"

    def _counts_of(self, coordinator: Coordinator) -> dict[int, int]:
        number = id(coordinator)
        if number not in self._of_coordinators:
            self._of_coordinators[number] = {}
            try:
                # The callback does not take the lock: garbage collection may run while this thread has it.
                weakref.finalize(coordinator, self._of_coordinators.pop, number, None).atexit = False
            except TypeError:
                self._kept.append(coordinator)  # slots without `__weakref__`: kept, so that its id is not reused
        return self._of_coordinators[number]


@functools.cache
def exchange_counts() -> ExchangeCounts:
    """Return the counts of this process."""
    return ExchangeCounts()


@dataclass(slots=True)
class Stage:
    """The data that a rank sends and receives at the end of a stage.

    Attributes:
        payload: JSON or bytes for the leader.
        payloads: on the leader after the stage, the payloads of all ranks in order of rank.
        done: True if this rank finished its work. If the exchange then fails on this rank, other ranks may have
            received this outcome and continue.
        failed: after the stage, the ranks that failed; only the first ranks if there are many. Empty on a rank that
            failed itself.
        decide: called on the leader once all ranks succeeded, and `payloads` has their payloads. Its error is that of
            rank 0. None: there is nothing to decide.
        decision: after the stage, what `decide` returned, on every rank. It costs no exchange, except after the first
            stage of a job of several blocks of ranks.
    """

    payload: JSON | bytes = None
    payloads: Sequence[JSON | bytes] = field(default_factory=list)
    done: bool = False
    failed: Sequence[int] = ()
    decide: Callable[[], JSON] | None = None
    decision: Any = None


class Agreement:
    """The exchanges of one operation. A job of one process exchanges nothing.

    In the first stage every rank sends a random token, and the leader sends the tokens of each block of ranks back to
    this block. If a rank does not find its token, the response is stale: it belongs to an earlier operation. The keys
    of later exchanges contain the token of the leader, which is unique to the operation.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        key: str,
        recording: Recording | None = None,
        *,
        call: str | None = None,
        block_ranks: int | None = None,
    ) -> None:
        """Exchange nothing yet.

        Args:
            coordinator: connects the processes.
            key: unique to the operation and equal on every rank.
            recording: records the time of exchanges.
            call: the operation, for the log if other ranks are late; None: the operation of the recording, or the key.
            block_ranks: see `Gathering`; None: `BLOCK_RANKS`.
        """
        self._coordinator = coordinator
        if coordinator.size > 1:
            from ckptcore.job.gathering import BLOCK_RANKS, Gathering, LateRanks  # only jobs of several processes

            if call is None:
                call = key if recording is None else f"{recording.operation} of {recording.location}"
            late = LateRanks(call, coordinator.rank, coordinator.size)
            self._gathering: Gathering = Gathering(coordinator, late=late, block_ranks=block_ranks or BLOCK_RANKS)
        self._key = key
        self._recording = recording
        self._is_verified = False  # True once the response to the token of this rank was received
        self.rank = coordinator.rank
        self.size = coordinator.size

    def part(self, name: str) -> Agreement:
        """Return the exchanges of a part of the operation, which can have stages with the same names."""
        return self._like(f"{self._key}/{name}", self._recording)

    def recorded(self, recording: Recording) -> Agreement:
        """Return the same exchanges with another recording."""
        return self._like(self._key, recording)

    def _like(self, key: str, recording: Recording | None) -> Agreement:
        agreement = copy.copy(self)
        agreement._key = key
        agreement._recording = recording
        return agreement

    @contextmanager
    def stage(self, name: str, *, meaning: str = "") -> Iterator[Stage]:
        """Run the body as a stage. Afterwards every rank knows whether it succeeded on all ranks.

        Args:
            name: the name of the stage; each name can be used once.
            meaning: the end of the error message if the stage failed on another rank.

        Raises:
            RankFailedError: the stage failed on another rank; the message has that rank's error. A rank raises its own
                error unchanged.
            CommitUnknownError: the stage failed with this error on another rank.
            CoordinationTimeoutError: on the leader, a rank did not take part in time; the others raise RankFailedError.
                On another rank, the exchange with the leader did not end in time.
        """
        stage = Stage()
        if self.size == 1:
            yield stage
            stage.done = True
            stage.payloads = [stage.payload]
            decide, stage.decide = stage.decide, None
            stage.decision = None if decide is None else decide()
            return
        error: BaseException | None = None
        outcome = b""
        token = None if self._is_verified else os.urandom(8).hex()
        try:
            yield stage
            outcome = encode_outcome(token, stage.payload)
            stage.done = True
        except BaseException as caught:  # noqa: BLE001  # sent to the others first, then raised below
            error = caught
            outcome = _encode_failure(token, error)
        decide, stage.decide = stage.decide, None  # breaks a reference cycle, see below
        undecided: BaseException | None = None
        verdict = _Verdict()
        # If the leader is missing, there is no rank to send the error to.
        if not (isinstance(error, CoordinationTimeoutError) and 0 in error.missing):
            try:
                verdict, undecided = self._exchange(name, outcome, token, stage, decide)
                error = error or undecided
            except Exception as failure:
                if error is None:
                    raise
                _note_unsent(error, failure)
        if error is not None:
            others = [failure for failure in verdict.failed if failure[0] != self.rank]
            if others:
                error.add_note(f"the stage {name!r} also failed on {_describe(replace(verdict, failed=others))}")
            try:
                raise error
            finally:
                # Break a reference cycle with this frame, which would keep the saved state in memory.
                del error, undecided
        if verdict.failed:
            stage.failed = [rank for rank, _ in verdict.failed]
            kind = CommitUnknownError if verdict.unknown else RankFailedError
            raise kind(f"the stage {name!r} failed on {_describe(verdict)}" + (f"; {meaning}" if meaning else ""))
        stage.decision = verdict.decision

    def _exchange(
        self, name: str, outcome: bytes, token: str | None, stage: Stage, decide: Callable[[], JSON] | None
    ) -> tuple[_Verdict, BaseException | None]:
        """Send the outcome of this rank to the leader. Return the verdict of the leader, and the error of `decide`."""
        key = f"{self._key}/{name}"
        with self._recording.phase("exchange") if self._recording is not None else nullcontext():
            try:
                gathered = self._gathering.gather(key, outcome)
            except CoordinationTimeoutError as error:
                self._report_missing(key, token, error)
                raise
            verdict, tokens, undecided = None, [], None
            if gathered is not None:
                outcomes = [_decode_outcome(data) for data in gathered]
                stage.payloads = [payload for _, payload in outcomes]
                tokens = [head["token"] for head, _ in outcomes]
                failed = [(rank, head["error"]) for rank, (head, _) in enumerate(outcomes) if head["error"] is not None]
                unknown = any(head["unknown"] for head, _ in outcomes)
                verdict = _Verdict(failed[:_SHOWN], max(0, len(failed) - _SHOWN), unknown)
                if decide is not None and not failed:
                    verdict, undecided = _decide(decide)
            # Each block gets its own verdict of the first stage. A decision, which may be large, is sent once for all.
            is_apart = decide is not None and token is not None and len(self._gathering.blocks) > 1
            sent = replace(verdict, decision=None) if verdict is not None and is_apart else verdict
            try:
                received = self._verdict(key, token, sent, tokens)
            except Exception as failure:
                if verdict is None or undecided is None:
                    raise
                _note_unsent(undecided, failure)
                return verdict, undecided
            if is_apart and not received.failed:
                decision = None if verdict is None else _encode(verdict.decision)
                received = replace(
                    received, decision=json.loads(self._gathering.broadcast(f"{key}/decision", decision))
                )
            return received, undecided

    def _verdict(self, key: str, token: str | None, verdict: _Verdict | None, tokens: Sequence[str]) -> _Verdict:
        """Send the verdict from the leader to all ranks, and return it on each of them.

        Apart from a decision, its size does not depend on the size of the job.

        Args:
            key: the key of the exchange.
            token: the token of this rank; None after the first stage.
            verdict: on the leader, the verdict; None on the others.
            tokens: on the leader, the tokens of all ranks; empty if ranks are missing.

        Raises:
            RankFailedError: the received verdict is of an earlier operation.
        """

        def message(block: range) -> bytes:
            given = verdict or _Verdict()
            return _encode(
                {
                    "failed": [list(failure) for failure in given.failed],
                    "others": given.others,
                    "unknown": given.unknown,
                    "decision": given.decision,
                    "leader": tokens[0] if tokens else None,
                    "first": block.start,
                    "tokens": list(tokens[block.start : block.stop]),
                }
            )

        leads = verdict is not None
        if token is not None:
            response = json.loads(self._gathering.broadcast_to_blocks(f"{key}/verdict", message if leads else None))
        else:
            response = json.loads(self._gathering.broadcast(f"{key}/verdict", message(range(0)) if leads else None))
        if response["leader"] is not None and token is not None:
            self._verify_response(key, token, response)
        failed = [(rank, reason) for rank, reason in response["failed"]]
        return _Verdict(failed, response["others"], response["unknown"], response["decision"])

    def _report_missing(self, key: str, token: str | None, error: CoordinationTimeoutError) -> None:
        """Report the missing ranks to all ranks, so that none waits for them."""
        if self.rank != 0 or not error.missing:
            return
        reason = f"CoordinationTimeoutError: {error}"[:_REASON]
        failed = [(rank, reason) for rank in error.missing[:_SHOWN]]
        try:
            self._verdict(key, token, _Verdict(failed, max(0, len(error.missing) - _SHOWN)), ())
        except Exception as failure:  # noqa: BLE001  # the error that stopped the stage is raised
            _note_unsent(error, failure)

    def _verify_response(self, key: str, token: str, response: Mapping[str, Any]) -> None:
        """Check that the leader's response is for this operation. Later exchanges use keys unique to the operation."""
        if response["tokens"][self.rank - response["first"]] != token:
            raise RankFailedError(
                f"rank {self.rank} received a stale message in the exchange {key!r}: it belongs to an operation that "
                "failed, or to one that a process joined before it was restarted alone. All ranks must begin the same "
                "operations: restart all processes of the job, or give them a Context with a new coordinator"
            )
        self._is_verified = True
        self._key = f"{self._key}/{response['leader']}"

    def lead(self, name: str, decide: Callable[[], T]) -> T:
        """Return the decision of the leader on every rank.

        Args:
            name: the name of the exchange.
            decide: makes the decision; called on the leader.

        Raises:
            RankFailedError: `decide` failed on the leader, which raises its own error.
        """
        if self.size == 1:
            return decide()
        key = f"{self._key}/{name}"
        if self.rank != 0:
            response = json.loads(self._gathering.receive(key))
            if response["error"] is not None:
                raise RankFailedError(f"rank 0: {response['error']}")
            decision: T = response["decision"]
            return decision
        try:
            decision = decide()
            message = _encode({"error": None, "decision": decision})
        except BaseException as error:
            self._coordinator.broadcast(key, _encode({"error": f"{type(error).__name__}: {error}", "decision": None}))
            raise
        self._coordinator.broadcast(key, message)
        return decision


@dataclass(frozen=True, slots=True)
class _Verdict:
    """The result of a stage on all ranks.

    Attributes:
        failed: the first ranks that failed, with their errors.
        others: the number of further ranks that failed.
        unknown: True if the commit may have happened.
        decision: see `Stage`.
    """

    failed: Sequence[tuple[int, str]] = ()
    others: int = 0
    unknown: bool = False
    decision: Any = None


def _decide(decide: Callable[[], JSON]) -> tuple[_Verdict, BaseException | None]:
    """Return the verdict with the decision of the leader, or with its error."""
    try:
        decision = decide()
        _encode(decision)
    except BaseException as error:  # noqa: BLE001  # sent to the others first, then raised
        return _Verdict([(0, _reason(error))], unknown=isinstance(error, CommitUnknownError)), error
    return _Verdict(decision=decision), None


def encode_outcome(token: str | None, payload: JSON | bytes) -> bytes:
    """Encode the message of a rank that succeeded: a line of JSON, followed by the payload if it is bytes.

    Raises:
        PluginError: the payload is neither bytes nor JSON.
    """
    head: dict[str, JSON] = {"error": None, "unknown": False, "token": token}
    if isinstance(payload, bytes):
        return _encode(head) + b"\n" + payload
    return _encode({**head, "payload": payload})


def _encode_failure(token: str | None, error: BaseException) -> bytes:
    unknown = isinstance(error, CommitUnknownError)
    return _encode({"error": _reason(error), "unknown": unknown, "token": token, "payload": None})


def _note_unsent(error: BaseException, failure: Exception) -> None:
    error.add_note(f"sending this error to the other ranks also failed: {type(failure).__name__}: {failure}")


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _decode_outcome(data: bytes) -> tuple[dict[str, Any], JSON | bytes]:
    line, separator, rest = data.partition(b"\n")
    head: dict[str, Any] = json.loads(line)
    return head, rest if separator else head["payload"]


def _describe(verdict: _Verdict) -> str:
    """Describe the failed ranks and their errors. Ranks with the same error, such as all of one host, are grouped."""
    groups: dict[str, list[int]] = {}
    for rank, reason in verdict.failed:
        groups.setdefault(reason, []).append(rank)
    text = "; ".join(
        f"rank {ranks[0]}: {reason}" if len(ranks) == 1 else f"the ranks {ranks}: {reason}"
        for reason, ranks in groups.items()
    )
    return text + (f"; and {verdict.others} more ranks" if verdict.others else "")


def _encode(document: JSON) -> bytes:
    try:
        return json.dumps(document).encode("ascii")
    except (TypeError, ValueError) as error:
        raise PluginError(f"a message to other ranks, such as the receipt of a layout, is not JSON: {error}") from error
