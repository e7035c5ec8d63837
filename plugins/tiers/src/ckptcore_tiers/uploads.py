"""`Uploads`: the role of one process in the uploads of a run."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from ckptcore.context import Context
from ckptcore.job.agreement import Agreement
from ckptcore.training.path_directory import OwnedDirectory
from ckptcore_tiers.host_sending import HostSender, LeaderSender, StepSender, WholeStepSender
from ckptcore_tiers.hosts import Hosts
from ckptcore_tiers.near_tier import Deadline, NearTier
from ckptcore_tiers.status import UploadStatus
from ckptcore_tiers.tiered_steps import TieredSteps
from ckptcore_tiers.uploader import Uploader


@dataclass(frozen=True, slots=True)
class Uploads:
    """The role of one process in the uploads of a run.

    The leader uploads. If hosts have separate near directories, the first process of every other
    host sends the part of its host. Other processes do nothing.

    Attributes:
        uploader: uploads steps; None except on the leader.
        stop_sending: on the leader, tells the other hosts that it sends no more steps; on the first
            process of another host, stops its `HostSender`. None on other processes, and if all
            processes share one near directory.
        close_sending: on the first process of a host other than the leader's, waits until the
            leader's uploads end, or a deadline, and stops the `HostSender`. Else None.
    """

    uploader: Uploader | None = None
    stop_sending: Callable[[Deadline], None] | None = None
    close_sending: Callable[[Deadline], None] | None = None

    def resume(self) -> None:
        """Start to upload, beginning with steps that an earlier run did not upload."""
        if self.uploader is not None:
            self.uploader.resume()

    def committed(self, step: int, epoch: int | None, *, preempted: bool) -> None:
        """See `Uploader.committed`."""
        if self.uploader is not None:
            self.uploader.committed(step, epoch, preempted=preempted)

    def pending(self) -> frozenset[int]:
        """Return steps whose near files are still needed."""
        return frozenset() if self.uploader is None else self.uploader.pending()

    def cancel(self, step: int) -> None:
        """See `Uploader.cancel`."""
        if self.uploader is not None:
            self.uploader.cancel(step)

    @property
    def status(self) -> UploadStatus:
        """Progress of the uploads; empty without an uploader."""
        return UploadStatus() if self.uploader is None else self.uploader.status

    def raise_unreported(self) -> None:
        """See `Uploader.raise_unreported`."""
        if self.uploader is not None:
            self.uploader.raise_unreported()

    def close(self, until: Deadline) -> None:
        """Wait for uploads until a deadline, then stop.

        Raises:
            UploadError: see `Uploader.close`.
        """
        if self.uploader is not None:
            self.uploader.close(until)
        if self.close_sending is not None:
            self.close_sending(until)

    def stop(self, until: Deadline) -> None:
        """Stop without waiting for the remaining uploads."""
        if self.uploader is not None:
            self.uploader.stop(until)
        if self.stop_sending is not None:
            self.stop_sending(until)


def begin_uploads(
    options: NearTier,
    steps: TieredSteps,
    far: OwnedDirectory | None,
    hosts: Hosts | None,
    context: Context,
    agreement: Agreement,
    *,
    kept: Callable[[], Collection[int]],
    uploaded: Callable[[], None],
) -> Uploads:
    """Return the role of this process in the uploads of a run. Every rank must call this. Uploads begin with `resume`.

    Args:
        options: options of the near tier.
        steps: the steps of the run.
        far: the far directory on the leader; None on other processes.
        hosts: groups of processes that share a near directory; None if all share one.
        context: options.
        agreement: exchange with the other processes.
        kept, uploaded: see `Uploader`.
    """
    near, to = steps.directories
    send: StepSender
    stop_sending: Callable[[Deadline], None] | None = None
    if hosts is not None:
        run = agreement.lead("run", lambda: secrets.token_hex(8))
        if far is None:
            if agreement.rank not in hosts.firsts:
                return Uploads()
            sender = HostSender(agreement.rank, run, near, to, to.open_to_write(), context)
            return Uploads(stop_sending=sender.stop, close_sending=sender.close)
        send = leader = LeaderSender(near, to, far.store, hosts, context)
        stop_sending = partial(leader.close, run)
    elif far is None:
        return Uploads()
    else:
        send = WholeStepSender(near, to, context)
    uploader = Uploader(options, near, far, send, kept=kept, uploaded=uploaded, observers=context.observers)
    return Uploads(uploader, stop_sending)
