"""The processes of one save agreeing, stage by stage, on whether it goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

from ckptcore.errors import PluginError, RankFailedError
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
    """

    payload: JSON = None
    payloads: Sequence[JSON] = field(default_factory=list)


class Agreement:
    """The exchanges of one save. In a job of one process nothing is exchanged."""

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
        self.rank = coordinator.rank
        self.size = coordinator.size

    @contextmanager
    def stage(self, name: str) -> Iterator[Stage]:
        """Do the work of a stage in the body; afterwards every rank knows whether it succeeded everywhere.

        Raises:
            RankFailedError: if it failed on another rank, with that rank's error. A rank's own error is raised as it is.
            CoordinationTimeoutError: if a rank did not come.
        """
        stage = Stage()
        if self.size == 1:
            yield stage
            stage.payloads = [stage.payload]
            return
        error: BaseException | None = None
        outcome = b""
        try:
            yield stage
            outcome = _encode({"error": None, "payload": stage.payload})
        except BaseException as caught:  # noqa: BLE001  # told to the others first, then raised below
            error = caught
            outcome = _encode({"error": f"{type(error).__name__}: {error}", "payload": None})
        with self._recording.phase("exchange") if self._recording is not None else nullcontext():
            gathered = self._coordinator.gather(f"{self._key}/{name}", outcome)
            failed: JSON = None
            if gathered is not None:
                outcomes = [json.loads(data) for data in gathered]
                stage.payloads = [outcome["payload"] for outcome in outcomes]
                failed = [
                    [rank, outcome["error"]] for rank, outcome in enumerate(outcomes) if outcome["error"] is not None
                ]
            verdict = self._coordinator.broadcast(
                f"{self._key}/{name}/verdict", _encode(failed) if self.rank == 0 else None
            )
        if error is not None:
            raise error
        failures = json.loads(verdict)
        if failures:
            told = "; ".join(f"rank {rank}: {reason}" for rank, reason in failures)
            raise RankFailedError(f"the stage {name!r} failed on {told}; nothing was committed")

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
        except BaseException as error:
            self._coordinator.broadcast(key, _encode({"error": f"{type(error).__name__}: {error}", "decision": None}))
            raise
        self._coordinator.broadcast(key, _encode({"error": None, "decision": decision}))
        return decision


def _encode(document: JSON) -> bytes:
    try:
        return json.dumps(document).encode("ascii")
    except (TypeError, ValueError) as error:
        raise PluginError(f"a layout's receipt is not JSON: {error}") from error
