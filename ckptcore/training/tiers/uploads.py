"""Uploads: what a process of a run does for steps to get from the near tier to the far one."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from ckptcore.context import Context
from ckptcore.job.agreement import Agreement
from ckptcore.training.tiers.near import RunTiers
from ckptcore.training.tiers.sending import CopiesSteps, Send
from ckptcore.training.tiers.status import UploadStatus
from ckptcore.training.tiers.uploader import Uploader

__all__ = ["Uploads", "begin_uploads"]


@dataclass(frozen=True, slots=True)
class Uploads:
    """The part of a process in the uploads of a run. Without a near tier, and where it neither leads nor speaks for a host, it has none.

    Attributes:
        uploader: uploads steps; on who leads.
        stop_sending: where hosts send together, ends the part of this process in that, if it has one.
        close_sending: waits for the end of the run's uploads and ends that part, where another process leads.
    """

    uploader: Uploader | None = None
    stop_sending: Callable[[], None] | None = None
    close_sending: Callable[[], None] | None = None

    def resume(self) -> None:
        """Upload from now on; first what an earlier run left near."""
        if self.uploader is not None:
            self.uploader.resume()

    def committed(self, step: int, epoch: int | None, *, preempted: bool) -> None:
        """Say that a step is committed near; see `Uploader.committed`."""
        if self.uploader is not None:
            self.uploader.committed(step, epoch, preempted=preempted)

    def pending(self) -> frozenset[int]:
        """The steps whose files near are still needed."""
        return frozenset() if self.uploader is None else self.uploader.pending()

    def cancel(self, step: int) -> None:
        """Let a step not be uploaded; returns when nothing of it is being sent."""
        if self.uploader is not None:
            self.uploader.cancel(step)

    @property
    def status(self) -> UploadStatus:
        """How far they are, as far as this process knows."""
        return UploadStatus() if self.uploader is None else self.uploader.status

    def raise_unheard(self) -> None:
        """Tell, once, which steps cannot be uploaded.

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
        """Send no more, and wait until the piece that is being sent is. Again is no error."""
        if self.uploader is not None:
            self.uploader.stop()
        if self.stop_sending is not None:
            self.stop_sending()


def begin_uploads(
    tiers: RunTiers,
    context: Context,
    agreement: Agreement,
    *,
    kept: Callable[[], Collection[int]],
    uploaded: Callable[[], None],
) -> Uploads:
    """The part of this process in the uploads of a run; nothing is uploaded before it is resumed. On every rank.

    Args:
        tiers: of the run, owned.
        context: options.
        agreement: with the other processes.
        kept: as for `Uploader`.
        uploaded: as for `Uploader`.
    """
    near = tiers.near
    if near is None:
        return Uploads()
    steps, far = tiers.copies.tiers
    send: Send
    stop_sending: Callable[[], None] | None = None
    if tiers.hosts is None:
        send = CopiesSteps(steps, far, context)
    else:
        from ckptcore.training.tiers.host_steps import HostSender, SendsFromHosts  # only who has hosts needs it

        run = agreement.lead("run", lambda: secrets.token_hex(8))
        if tiers.far is not None:
            send = together = SendsFromHosts(steps, far, tiers.far.store, tiers.hosts, context)
            stop_sending = partial(together.close, run)
        elif tiers.nearest is not None:
            sender = HostSender(agreement.rank, run, steps, far, far.open_to_write(), context)
            return Uploads(stop_sending=sender.stop, close_sending=partial(sender.close, near.close_seconds))
    if tiers.far is None:
        return Uploads()
    uploader = Uploader(near, steps, tiers.far, send, kept=kept, uploaded=uploaded, observers=context.observers)
    return Uploads(uploader, stop_sending)
