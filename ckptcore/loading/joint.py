"""Collective loads: all processes of a job take each step together."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ckptcore.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, RankFailedError
from ckptcore.job.agreement import Agreement
from ckptcore.loading.reading import TreeRead
from ckptcore.model.tree import JSON
from ckptcore.opening.checkpoint import Checkpoint, CompositeCheckpoint, naming_arrays
from ckptcore.protocols import Coordinator
from ckptcore.runtime import runtime_of

if TYPE_CHECKING:
    from ckptcore.loading.composites import CompositeLoad, MemberRequest
    from ckptcore.loading.load import Load

T = TypeVar("T")


class PeerFailure(Exception):
    """Another process reported a failure in its message. That process sends its error at the end of the step."""


class Replaced(Exception):
    """The checkpoint was replaced during a step."""


def take_step(
    agreement: Agreement,
    name: str,
    work: Callable[[], JSON],
    *,
    is_current: Callable[[], bool],
    decide: Callable[[Sequence[Any]], JSON] | None = None,
) -> tuple[Any] | None:
    """Run a step on all ranks, and wait for all of them.

    An error of one rank fails the step on all ranks, as in a stage of an `Agreement`. If a rank finds damage, all ranks
    raise its error, because it may have read data for the others.

    Args:
        agreement: the agreement of the load.
        name: the name of the step; unique in the agreement.
        work: the work of this rank; returns its message to the leader. May raise `PeerFailure` and `Replaced`.
        is_current: returns True if the checkpoint was not replaced; called if `work` fails.
        decide: called on the leader with the messages of all ranks in their order.

    Returns:
        What `decide` returned, on every rank. None if a rank found that the checkpoint was replaced: the attempt must
        be repeated.

    Raises:
        CorruptCheckpointError, CheckpointNotFoundError: another rank raised it. An error of this rank is raised
            unchanged.
        RankFailedError: another rank failed with any other error.
    """
    # If the body of a stage raises an error, all ranks raise it as the failure of this rank. Damage and a replaced
    # checkpoint are sent as payload instead: the leader uses the payloads of all ranks to decide on another attempt.
    own: Exception | None = None
    with agreement.stage(name) as stage:
        damage: JSON = None
        payload: JSON = None
        again = False
        try:
            payload = work()
        except PeerFailure as error:
            own = error
        except Replaced:
            again = True
        except (CorruptCheckpointError, CheckpointNotFoundError) as error:
            again = not is_current()
            own = error
            damage = [isinstance(error, CheckpointNotFoundError), str(error)]
        except CheckpointError:
            again = not is_current()
            if not again:
                raise
        stage.payload = [again, damage, payload]
        stage.decide = lambda: _outcome(stage.payloads, decide)
    decided = stage.decision
    if decided["again"]:
        return None
    if decided["damage"] is not None:
        if own is not None and not isinstance(own, PeerFailure):
            raise own
        rank, is_gone, reason = decided["damage"]
        kind = CheckpointNotFoundError if is_gone else CorruptCheckpointError
        raise kind(f"rank {rank}: {reason}")
    if own is not None:
        raise RankFailedError("another rank failed to read without giving a reason: see the logs of all ranks")
    return (decided["decision"],)


def _outcome(messages: Sequence[Any], decide: Callable[[Sequence[Any]], JSON] | None) -> JSON:
    first = next(([rank, *damage] for rank, (_, damage, _) in enumerate(messages) if damage is not None), None)
    again = any(again for again, _, _ in messages)
    decision = None
    if decide is not None and first is None and not again:
        decision = decide([message for _, _, message in messages])
    return {"again": again, "damage": first, "decision": decision}


def _agreement(load: Load[Any] | CompositeLoad, job: Coordinator, purpose: str) -> Agreement:
    """Return the agreement of a load, whose name is equal on every rank.

    A step of a run is named by its number, because its directory can differ between hosts.
    """
    step = load.recording.step
    name = load.location if step is None else f"step {step}"
    return Agreement(job, runtime_of(load.context).exchange_key(f"{name}/{purpose}"), load.recording)


class CollectiveRead:
    """Strategy that loads on all ranks of a job, which take each step together.

    Methods of the loaded objects may be collective, so either all ranks call them, or none. No rank returns while
    another rank reads. If the checkpoint is replaced during the load, all ranks start again.
    """

    def __init__(
        self, job: Coordinator, find_attempt: Callable[[], type[CollectiveAttempt[Any]]], *, is_stage: bool = False
    ) -> None:
        """Load in a job of several processes.

        Args:
            job: the coordinator of the job.
            find_attempt: returns the type of the attempts. Its error on one rank fails the load on all ranks.
            is_stage: True if the load runs in a stage of the caller, at whose end all ranks know if it succeeded.
        """
        self.job = job
        self.find_attempt = find_attempt
        self._is_stage = is_stage

    def run(self, load: Load[T]) -> T:
        """Load. Every rank must call this, for the same checkpoint.

        Raises:
            RankFailedError: another rank failed.
            Errors of the stages of the load.
        """
        agreement = _agreement(load, self.job, "load")
        try:
            new_attempt: type[CollectiveAttempt[T]] = self.find_attempt()
        except BaseException:
            with agreement.stage("open-0"):  # fail in the first step, because the other ranks wait at its end
                raise
        for number in itertools.count():  # `load` limits the attempts
            attempt = new_attempt(load, self.job, agreement, number)
            reading = attempt.plan()
            if reading is not None and attempt.begin(reading) and attempt.read(reading):
                with nullcontext() if self._is_stage else agreement.stage(f"finish-{number}"):
                    return load.build(reading)
        raise AssertionError("unreachable")


class CollectiveAttempt(Generic[T]):
    """One attempt to load, in which every process reads for itself. Call each method on every rank."""

    def __init__(self, load: Load[T], job: Coordinator, agreement: Agreement, number: int) -> None:
        self._load = load
        self._job = job
        self._agreement = agreement
        self._number = number
        self._begins = False
        """True if a rank has objects that may refuse their state."""

    def plan(self) -> TreeRead | None:
        """Open the checkpoint and plan; None if it was replaced meanwhile."""
        checkpoint: list[Checkpoint] = []
        planned: list[TreeRead] = []

        def open_it() -> JSON:
            checkpoint.append(self._load.open())
            return None

        def plan_it() -> JSON:
            with naming_arrays(checkpoint[0]):
                planned.append(self._load.plan(checkpoint[0]))
            return [planned[0].first is not None, self._message(checkpoint[0], planned[0])]

        def decide(messages: Sequence[Any]) -> JSON:
            return [any(begins for begins, _ in messages), self._decide([message for _, message in messages])]

        if self._take_step("open", open_it) is None:
            return None
        decided = self._take_step("plan", plan_it, decide)
        if decided is None:
            return None
        ((self._begins, decision),) = decided
        return planned[0] if self._agree(decision, planned[0]) else None

    def begin(self, reading: TreeRead) -> bool:
        """Restore the objects that may refuse their state, if a rank has any; False if the checkpoint was replaced."""

        def begin() -> JSON:
            with naming_arrays(reading.checkpoint):
                self._load.begin(reading)
            return None

        return not self._begins or self._take_step("begin", begin) is not None

    def read(self, reading: TreeRead) -> bool:
        """Read the planned data; False if the checkpoint was replaced meanwhile."""

        def read() -> JSON:
            with naming_arrays(reading.checkpoint):
                self._load.read(reading)
            self._expect_unchanged()
            return None

        return self._take_step("read", read) is not None

    def _message(self, checkpoint: Checkpoint, reading: TreeRead) -> JSON:
        """Return the message to the leader about this rank's plan; None if every process reads for itself."""
        return None

    def _decide(self, messages: Sequence[Any]) -> JSON:
        """On the leader, decide how to read, given the messages of all ranks."""
        return None

    def _agree(self, decision: Any, reading: TreeRead) -> bool:
        """Follow the decision of the leader; False if the ranks opened different saves."""
        return True

    def _expect_unchanged(self) -> None:
        if not self._load.attempts.is_unchanged():
            raise Replaced

    def _take_step(
        self, name: str, work: Callable[[], JSON], decide: Callable[[Sequence[Any]], JSON] | None = None
    ) -> tuple[Any] | None:
        is_current = self._load.attempts.is_current
        return take_step(self._agreement, f"{name}-{self._number}", work, is_current=is_current, decide=decide)


def load_composite_collectively(load: CompositeLoad, strategy: CollectiveRead) -> dict[str, object]:
    """Load several checkpointables on all ranks of a job, one after another.

    A rank that does not request a name takes part in its load without requesting data.
    """
    agreement = _agreement(load, strategy.job, "names")
    for number in itertools.count():  # `load` limits the attempts
        attempt = _CompositeAttempt(load, strategy)
        decided = attempt.take_step(agreement, f"begin-{number}", attempt.begin, _union_of_names)
        if decided is None:
            continue
        (names,) = decided
        steps: list[tuple[str, Callable[[], JSON]]] = [
            (f"load-{number}/{name}", functools.partial(attempt.load, name)) for name in names
        ]
        steps.append((f"end-{number}", attempt.end))
        if all(attempt.take_step(agreement, step, work) is not None for step, work in steps):
            return attempt.loaded()
    raise AssertionError("unreachable")


def _union_of_names(of_ranks: Sequence[Any]) -> JSON:
    """Return the names that any rank requests, in the order of `Changes`: loads that change least come first."""
    changes: dict[str, int] = {}
    for requests in of_ranks:
        for name, changed in requests:
            changes[name] = max(changes.get(name, 0), changed)
    return sorted(changes, key=lambda name: changes[name])


class _CompositeAttempt:
    """One attempt of a rank to load several checkpointables.

    The methods `begin`, `load` and `end` are steps, and return messages.
    """

    def __init__(self, load: CompositeLoad, strategy: CollectiveRead) -> None:
        self._load = load
        self._strategy = strategy
        self._composite: CompositeCheckpoint | None = None
        self._requests: dict[str, MemberRequest] = {}
        self._loaded: dict[str, object] = {}

    def take_step(
        self,
        agreement: Agreement,
        name: str,
        work: Callable[[], JSON],
        decide: Callable[[Sequence[Any]], JSON] | None = None,
    ) -> tuple[Any] | None:
        """Run one of the steps."""
        return take_step(agreement, name, work, is_current=self._load.attempts.is_current, decide=decide)

    def begin(self) -> JSON:
        """Open the composite, and check the requests of this rank."""
        self._strategy.find_attempt()  # fails here, before a load changes anything
        self._composite = self._load.attempts.open()
        self._requests = {request.name: request for request in self._load.plan(self._composite)}
        return [[request.name, int(request.changes)] for request in self._requests.values()]

    def load(self, name: str) -> JSON:
        """Load a checkpointable, or take part in its collective load."""
        composite, request, context = self._composite, self._requests.get(name), self._load.context
        assert composite is not None  # opened by the first step
        member = composite.members[name]
        is_shared = member.processes is None and member.kind == "tree"
        if request is not None:
            if not is_shared:  # every process has a separate state
                context = replace(context, job=replace(context.job, reads="alone"))
            self._loaded[name] = self._load.load(request, context)
        elif is_shared:
            self._load.take_part(composite, name)
        return None

    def end(self) -> JSON:
        """Check that all data was read from one save."""
        if not self._load.attempts.is_unchanged():
            raise Replaced
        return None

    def loaded(self) -> dict[str, object]:
        """Return the checkpointables that this rank loaded, by name."""
        assert self._composite is not None  # opened by the first step
        return self._load.in_order(self._composite, self._loaded)
