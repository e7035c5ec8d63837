"""PeerMemory: a run whose steps are saved to the memory of the job's hosts, in front of a directory."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from typing import Final

from ckptcore_tiers import NearTier, TieredDirectory, UploadStatus
from ckptcore_tiers.tiered_run import TieredRun
from ckptcore_tiers.tiered_steps import TieredSteps

from ckptcore.commit.location import LocationLike, absolute_location
from ckptcore.commit.locks import Lock
from ckptcore.context import Context
from ckptcore.errors import CheckpointError, StorageError
from ckptcore.events import logger_named
from ckptcore.policies import LatestN, PreservationPolicy, SavePolicy
from ckptcore.redaction import redacted, redacted_location
from ckptcore.step_names import StepNames
from ckptcore.training.run_directory import Ownership, RunSteps, SavedStep, StepTarget
from ckptcore.training.steps import StepDirectory
from ckptcore_recovery.peers.fragments import ErasureCode
from ckptcore_recovery.peers.joining import MemoryOptions, join_job
from ckptcore_recovery.peers.lost_steps import LostMembers
from ckptcore_recovery.peers.session import Session
from ckptcore_recovery.peers.spreading import spread
from ckptcore_recovery.peers.starting import find_server
from ckptcore_recovery.peers.storage import SCHEME

logger = logger_named("ckptcore.recovery")

_STEPS: Final = "steps"
"""The directory of the steps in memory."""


class PeerMemory:
    """A `RunDirectory` that saves steps to the memory of the job's hosts, and some of them to a directory.

    Each host has a memory server, which outlives the processes of the job. A step is committed once all its data has
    all its copies. A job that starts again, on the same hosts or on others, loads the newest step from the memory that
    is left, or from the directory.
    """

    def __init__(
        self,
        directory: LocationLike,
        *,
        memory_bytes: int,
        copies: int = 1,
        erasure_code: ErasureCode | None = None,
        upload_policy: SavePolicy,
        preservation_policy: PreservationPolicy | None = None,
        job: str | None = None,
        interface: str = "127.0.0.1",
        domain: str | None = None,
        bytes_per_second: float | None = None,
        idle_seconds: float = 900.0,
        close_seconds: float | None = 600.0,
    ) -> None:
        """Describe the memory and the directory. Does no I/O.

        Args:
            directory: the directory of the run: a path or URL, which all processes see.
            memory_bytes: the maximum bytes in the memory of each host: of its own steps, of copies of other hosts,
                and of the step that is being saved. Also holds for a server that runs already.
            copies: the number of copies on other hosts. Any so many failure domains can be lost.
            erasure_code: fragments in place of copies. Needs as many failure domains as there are fragments.
            upload_policy: chooses the steps to upload to the directory.
            preservation_policy: chooses the steps to keep in memory; None: the newest two.
            job: the name of the job; equal in all its processes and restarts, and not that of another run, whose steps
                in memory are refused. None: derived from the directory.
            interface: the IP address of this host on which its memory server listens. Other hosts connect to it.
            domain: what fails together with this host, such as the name of its rack. None: its slice of a TPU, or its
                leaf switch or block, if TPU multislice or Slurm name one and there are enough of them; else the host
                alone.
            bytes_per_second: the maximum rate at which each process sends and receives; None for no limit.
            idle_seconds: a memory server ends after this time without a process of the job.
            close_seconds: see `NearTier.close_seconds`.

        Raises:
            ValueError: an argument is invalid.
        """
        needed = 1
        if erasure_code is not None:
            needed, copies = erasure_code.data, erasure_code.parity
        if copies < 0 or memory_bytes <= 0:
            raise ValueError(
                f"PeerMemory(copies={copies!r}, memory_bytes={memory_bytes!r}): expected copies >= 0 and bytes > 0"
            )
        if bytes_per_second is not None and bytes_per_second <= 0:
            raise ValueError(f"PeerMemory(bytes_per_second={bytes_per_second!r}): expected a positive number or None")
        if interface in ("", "0.0.0.0", "::"):
            raise ValueError(f"PeerMemory(interface={interface!r}): expected the address that other hosts connect to")
        identity = absolute_location(directory)  # `s3://bucket/run/` is the run of `s3://bucket/run`
        self.location = directory
        self.job = job or hashlib.sha256(os.fsencode(identity)).hexdigest()[:16]
        self._identity = redacted_location(identity)
        self._options = MemoryOptions(memory_bytes, copies, needed, interface, domain, idle_seconds, bytes_per_second)
        self._near = NearTier(
            f"{SCHEME}://{self.job}/{_STEPS}",
            preservation_policy=LatestN(2) if preservation_policy is None else preservation_policy,
            upload_policy=upload_policy,
            close_seconds=close_seconds,
        )
        self._tiers = TieredDirectory(self._near, directory)
        self._run: PeerRun | None = None

    def __repr__(self) -> str:
        return redacted(f"PeerMemory({self.location!r}, job={self.job!r})")

    def open(self, names: StepNames, context: Context) -> RunSteps:
        """See `RunDirectory`. On a host without a memory server, only the directory is read."""
        if find_server(self.job) is None:
            return StepDirectory(self.location, names, context)
        return self._tiers.open(names, context)

    def own(self, names: StepNames, context: Context, ownership: Ownership) -> TieredRun:
        """See `RunDirectory`. Starts the memory server of this host if it does not run."""
        steps = self._tiers.open(names, context)
        locks: list[Lock] = []

        def own_directory() -> int:
            """Own the directory first, because a job that joins the memory ends the one that uses it.

            The number orders incarnations, also if their hosts do not know of each other.
            """
            directory = steps.directories[1]
            directory.expect_directory()
            locks.append(directory.commit_method(directory.open_to_write()).locks(directory.display).own(if_in_use))
            return locks[0].number

        def allow(lost: LostMembers) -> None:
            """Refuse a start if steps were lost and none is left: the hosts may only be unreachable."""
            left = lost.steps(f"{_STEPS}/", names)
            if not str(left):
                return
            stored = StepDirectory(self.location, names, context)
            stored.replace(stored.list_steps())
            newest = stored.latest()
            if left.whole is None and newest is None:
                raise StorageError(
                    f"no step is whole in the memory of job {self.job}, and {stored.display} has none. Lost: {left}. "
                    f"{lost}. Nothing was changed. If these hosts have their memory still, start the job on them, too, "
                    "or make them reachable. If it is gone, pass another job= to PeerMemory: the run starts from the "
                    "beginning"
                )
            logger.warning(
                "the memory of job %s has lost %s. %s. The newest step that is whole in memory: %s; the newest one in "
                "%s: %s",
                self.job, left, lost, left.whole, stored.display, newest,
            )  # fmt: skip

        if_in_use = ownership.if_in_use
        try:
            agreement = ownership.agreement.part("memory")
            session = join_job(self.job, agreement, self._options, run=self._identity, least=own_directory, allow=allow)
            far_lock = locks[0] if locks else None
            self._run = PeerRun(session, self._near, steps, context, ownership, far_lock)
        except BaseException:
            for lock in locks:
                lock.close()
            raise
        return self._run

    @property
    def uploads(self) -> UploadStatus:
        """Progress of the uploads. See `TieredDirectory.uploads`."""
        return UploadStatus() if self._run is None else self._run.uploads.status

    def wait_for_uploads(self, timeout: float | None = None) -> None:
        """See `TieredDirectory.wait_for_uploads`."""
        if self._run is not None:
            self._run.wait_for_uploads(timeout)

    def wait_for_copies(self, timeout: float | None = None) -> None:
        """Wait until this process has made copies again that were on lost hosts, which it does in the background.

        One process of each host makes the copies of its host, so call this in all of them. A copy that cannot be made
        is logged.

        Args:
            timeout: the maximum time in seconds; None for no limit.
        """
        if self._run is not None:
            self._run.session.wait_for_copies(timeout)


class PeerRun(TieredRun):
    """The `OwnedRun` of a `PeerMemory`, in one process."""

    def __init__(
        self,
        session: Session,
        near: NearTier,
        steps: TieredSteps,
        context: Context,
        ownership: Ownership,
        far_lock: Lock | None,
    ) -> None:
        """See `TieredRun`."""
        self.session = session
        self._last: int | None = None
        super().__init__(near, steps, context, ownership, far_lock=far_lock)

    def shared(self) -> Sequence[StepDirectory]:
        """See `TieredRun`. All processes have agreed on the memory."""
        return self.steps.directories[1:]

    def target(self, step: int, name: str) -> StepTarget:
        """See `OwnedRun`. Called on every rank before any of them writes, so each host has its server."""
        self.session.keep_server()
        return super().target(step, name)

    def committed(self, saved: SavedStep) -> None:
        """See `OwnedRun`."""
        self._last = saved.step
        super().committed(saved)

    def close(self) -> None:
        """See `OwnedRun`. The servers end soon, unless an error is being handled: then the job may start again.

        The leader says so to all of them, because it reads their memory until the last upload is done.
        """
        super().close()
        if self._leads and sys.exc_info()[1] is None:
            last = self._last
            if last in self.steps.directories[0].candidates() and last not in self.uploads.status.uploaded:
                advice = "let upload_policy choose the last step, with PreemptionCheckpointing() that of a preemption"
                if last in self.uploads.pending():
                    advice = "it was not uploaded within close_seconds; start the job again meanwhile, or increase them"
                logger.warning(
                    "step %d is in the memory of the hosts alone, which is freed a minute after the end of the job: "
                    "%s, to have it in %s",
                    last, advice, self.steps.main.display,
                )  # fmt: skip
            try:
                spread(self.session, {"op": "end", "epoch": self.session.view.epoch}, b"")
            except CheckpointError as error:
                logger.debug("a memory server ends later: %s", error)

    def release(self) -> None:
        """See `OwnedRun`."""
        super().release()
        self.session.close()
