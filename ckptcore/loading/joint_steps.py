"""Joint steps of a load: what every process of a job does, and then knows how it went everywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ckptcore.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, RankFailedError
from ckptcore.job.agreement import Agreement
from ckptcore.model.tree import JSON

__all__ = ["Joint", "PeerFailure", "Replaced", "take_step"]

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
