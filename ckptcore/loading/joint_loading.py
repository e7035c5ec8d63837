"""Loads in which all processes of a job take part."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ckptcore.context import Context
from ckptcore.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, RankFailedError
from ckptcore.events import Recording
from ckptcore.job.agreement import Agreement
from ckptcore.loading.checkpoint import Checkpoint, Source, naming_arrays
from ckptcore.loading.consistent_read import ConsistentRead, tree_read
from ckptcore.loading.reading import Planned, Reading, perform
from ckptcore.model.tree import JSON
from ckptcore.protocols import Coordinator
from ckptcore.runtime import runtime_of

__all__ = [
    "Joint",
    "JointAttempt",
    "PeerFailure",
    "Replaced",
    "agreed_name",
    "load_jointly",
    "take_step",
]

T = TypeVar("T")


class PeerFailure(Exception):
    """Another process has said, in what it sent, that it failed. It tells why at the end of the step."""


class Replaced(Exception):
    """The checkpoint was replaced while a step worked with it."""


@dataclass(frozen=True, slots=True)
class Joint:
    """What a process did in a step, and what the others told.

    Attributes:
        payloads: on the leader, those of all ranks in their order.
        again: whether a rank found that the checkpoint was replaced meanwhile: what was done is worth nothing.
    """

    payloads: Sequence[JSON]
    again: bool


def take_step(agreement: Agreement, name: str, work: Callable[[], JSON], *, stands: Callable[[], bool]) -> Joint:
    """Do a step on all ranks and wait for all.

    An error of a rank fails the step on all of them, as in a stage of an `Agreement`. Damage that one finds is damage to all, because
    it read for them; unless the checkpoint was replaced meanwhile, for any of them.

    Args:
        agreement: of the load.
        name: of the step; an agreement takes each once.
        work: what this rank does, and tells the leader; may raise `PeerFailure` and `Replaced`.
        stands: whether what was opened is there still; asked where `work` fails.

    Raises:
        CorruptCheckpointError, CheckpointNotFoundError: if another rank found that. A rank's own error is raised as it is.
        RankFailedError: if another rank failed otherwise.
    """
    own: Exception | None = None
    with agreement.stage(name) as stage:
        found: JSON = None
        payload: JSON = None
        again = False
        try:
            payload = work()
        except PeerFailure as error:
            own = error
        except Replaced:
            again = True
        except (CorruptCheckpointError, CheckpointNotFoundError) as error:
            again = not stands()
            own = error
            found = [isinstance(error, CheckpointNotFoundError), str(error)]
        except CheckpointError:
            again = not stands()
            if not again:
                raise
        stage.payload = [again, found, payload]
    told: list[Any] = list(stage.payloads)
    decided: Any = agreement.lead(f"{name}/outcome", lambda: _outcome(told))
    if decided["again"]:
        return Joint((), again=True)
    if decided["found"] is not None:
        if own is not None and not isinstance(own, PeerFailure):
            raise own
        rank, is_gone, reason = decided["found"]
        kind = CheckpointNotFoundError if is_gone else CorruptCheckpointError
        raise kind(f"rank {rank}: {reason}")
    if own is not None:
        raise RankFailedError("another rank sent that it failed to read, and told no reason; look at the logs of all")
    return Joint([payload for _, _, payload in told], again=False)


def _outcome(told: Sequence[Any]) -> JSON:
    found = next(([rank, *found] for rank, (_, found, _) in enumerate(told) if found is not None), None)
    return {"again": any(again for again, _, _ in told), "found": found}


def load_jointly(
    location: Source,
    context: Context,
    recording: Recording,
    job: Coordinator,
    plan: Callable[[Checkpoint], Planned[T]],
    attempt_type: type[JointAttempt],
) -> T:
    """Load on all ranks of a job, and return when all have loaded.

    Every rank must call this, for the same checkpoint. The ranks take each step together: open, plan, read, finish. So
    a rank calls methods of objects, which may be collective, only if the others do, and no rank returns while another
    one reads. If the checkpoint is replaced meanwhile, all ranks start again.

    Args:
        location: of the checkpoint.
        context: options.
        recording: records the phases.
        job: a job of several processes.
        plan: plans what this process wants.
        attempt_type: how the ranks read.

    Raises:
        RankFailedError: if another rank failed.
        What opening, planning, reading and finishing do.
    """
    agreement = Agreement(job, runtime_of(context).exchange_key(f"{agreed_name(location, recording)}/load"), recording)
    tries = tree_read(location, context)
    for number in itertools.count():  # `tries` limits the attempts
        attempt = attempt_type(tries, context, job, agreement, number, str(location))
        planned = attempt.plan(plan)
        if planned is not None and attempt.read(planned, recording):
            with agreement.stage(f"finish-{number}"):
                made = planned.finish(planned.reading.leaves)
            return made
    raise AssertionError("counting ends only by an error")


def agreed_name(location: Source, recording: Recording) -> str:
    """Return a name for the exchanges of a load, equal on every rank: directories of a step may differ by host."""
    return str(location) if recording.step is None else f"step {recording.step}"


class JointAttempt:
    """One attempt to load, in which every process reads for itself. Each method must be called on every rank."""

    def __init__(
        self,
        tries: ConsistentRead[Checkpoint],
        context: Context,
        job: Coordinator,
        agreement: Agreement,
        number: int,
        location: str,
    ) -> None:
        self._tries = tries
        self._context = context
        self._job = job
        self._agreement = agreement
        self._number = number
        self._location = location

    def plan(self, plan: Callable[[Checkpoint], Planned[T]]) -> Planned[T] | None:
        """Open the checkpoint and plan; None if it was replaced meanwhile."""
        opened: list[Checkpoint] = []
        planned: list[Planned[T]] = []

        def open_it() -> JSON:
            opened.append(self._tries.open())
            return None

        def plan_it() -> JSON:
            with naming_arrays(opened[0]):
                planned.append(plan(opened[0]))
            return self._told_of(opened[0], planned[0].reading)

        if self._take_step("open", open_it).again:
            return None
        joint = self._take_step("plan", plan_it)
        return planned[0] if not joint.again and self._agree(joint.payloads, planned[0].reading) else None

    def read(self, planned: Planned[T], recording: Recording) -> bool:
        """Read what was planned; False if the checkpoint was replaced meanwhile."""
        reading = planned.reading

        def read() -> JSON:
            planned.begin()
            with naming_arrays(reading.opened), recording.phase("read", reading.nbytes):
                perform(reading, self._context)
            if not self._tries.is_unchanged():
                raise Replaced
            return None

        return not self._take_step("read", read).again

    def _told_of(self, opened: Checkpoint, reading: Reading) -> JSON:
        """Return what this rank sends to the leader about its plan."""
        return None

    def _agree(self, payloads: Sequence[JSON], reading: Reading) -> bool:
        """Agree on how to read; False if the ranks opened different saves."""
        return True

    def _take_step(self, name: str, work: Callable[[], JSON]) -> Joint:
        return take_step(self._agreement, f"{name}-{self._number}", work, stands=self._tries.stands)
