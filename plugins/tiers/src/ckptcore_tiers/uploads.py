"""Uploads: the part of one process in the uploads of a run."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from ckptcore.context import Context
from ckptcore.job.agreement import Agreement
from ckptcore.training.path_directory import OwnedDirectory
from ckptcore_tiers.host_groups import Hosts
from ckptcore_tiers.host_sending import HostSender, SendsFromHosts
from ckptcore_tiers.near_tier import NearTier
from ckptcore_tiers.sending import CopiesSteps, Send
from ckptcore_tiers.status import UploadStatus
from ckptcore_tiers.tiered_steps import TieredSteps
from ckptcore_tiers.uploader import Uploader

__all__ = ["Uploads", "begin_uploads"]


@dataclass(frozen=True, slots=True)
class Uploads:
    """The part of a process in the uploads of a run. A process that is not the first of its host has none.

    Attributes:
        uploader: uploads steps; on who leads.
        stop_sending: where hosts send together, ends the part of this process in that, if it has one.
        close_sending: waits for the end of the run's uploads and ends that part, where another process leads.
    """

    uploader: Uploader | None = None
    stop_sending: Callable[[], None] | None = None
    close_sending: Callable[[], None] | None = None

    def resume(self) -> None:
        """Start to upload, beginning with steps that an earlier run left near."""
        if self.uploader is not None:
            self.uploader.resume()

    def committed(self, step: int, epoch: int | None, *, preempted: bool) -> None:
        """See `Uploader.committed`."""
        if self.uploader is not None:
            self.uploader.committed(step, epoch, preempted=preempted)

    def pending(self) -> frozenset[int]:
        """Return the steps whose near files are still needed."""
        return frozenset() if self.uploader is None else self.uploader.pending()

    def cancel(self, step: int) -> None:
        """See `Uploader.cancel`."""
        if self.uploader is not None:
            self.uploader.cancel(step)

    @property
    def status(self) -> UploadStatus:
        """The progress, as far as this process knows."""
        return UploadStatus() if self.uploader is None else self.uploader.status

    def raise_unheard(self) -> None:
        """Raise an error for the steps that cannot be uploaded, once for each.

        Raises:
            UploadError
        """
        if self.uploader is not None:
            self.uploader.raise_unheard()

    def close(self) -> None:
        """Wait as long as the near tier says, then stop.

        Raises:
            UploadError: if steps are not uploaded by then.
        """
        if self.uploader is not None:
            self.uploader.close()
        if self.close_sending is not None:
            self.close_sending()

    def stop(self) -> None:
        """Stop after the current piece. Further calls do nothing."""
        if self.uploader is not None:
            self.uploader.stop()
        if self.stop_sending is not None:
            self.stop_sending()


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
    """Return the part of this process in the uploads of a run. Uploads nothing before it is resumed. On every rank.

    Args:
        options: of the near tier.
        steps: of the run.
        far: the far directory; None if another process leads.
        hosts: which processes see one near directory; None if all do.
        context: options.
        agreement: an exchange with the other processes.
        kept, uploaded: as for `Uploader`.
    """
    near, to = steps.directories
    send: Send
    stop_sending: Callable[[], None] | None = None
    if hosts is not None:
        run = agreement.lead("run", lambda: secrets.token_hex(8))
        if far is None:
            if agreement.rank not in hosts.firsts:
                return Uploads()
            sender = HostSender(agreement.rank, run, near, to, to.open_to_write(), context)
            return Uploads(stop_sending=sender.stop, close_sending=partial(sender.close, options.close_seconds))
        send = together = SendsFromHosts(near, to, far.store, hosts, context)
        stop_sending = partial(together.close, run)
    elif far is None:
        return Uploads()
    else:
        send = CopiesSteps(near, to, context)
    uploader = Uploader(options, near, far, send, kept=kept, uploaded=uploaded, observers=context.observers)
    return Uploads(uploader, stop_sending)
