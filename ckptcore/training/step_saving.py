"""StepSaver: saves steps of a run: whether one is wanted, what it may replace, and that it is known once it is committed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

from ckptcore.commit.location import Within
from ckptcore.commit.occupants import Overwrite
from ckptcore.context import Context
from ckptcore.errors import CheckpointExistsError
from ckptcore.io.background import SaveHandle
from ckptcore.job.agreement import Agreement
from ckptcore.job.visibility import OnHosts
from ckptcore.model.tree import JSON
from ckptcore.protocols import Coordinator, Layout
from ckptcore.saving.exporting import StepExport
from ckptcore.saving.plain import PlainSave
from ckptcore.saving.save import begin_save, perform_save
from ckptcore.saving.save_requests import Destination, OneTree, SaveHooks, SaveNotes, SaveRequest
from ckptcore.training.step_saves import Past, SaveDecider, StepSaves
from ckptcore.training.tiers.near import RunTiers

__all__ = ["StepOptions", "StepOrder", "StepSaver"]

logger = logging.getLogger("ckptcore.training")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """What all steps of a run have alike.

    Attributes:
        layout: how arrays are laid out.
        exports: further checkpoints of steps in other layouts.
        when_busy: what an asynchronous save does while another runs.
    """

    layout: str | Layout
    exports: Sequence[StepExport]
    when_busy: Literal["wait", "queue"]


@dataclass(frozen=True, slots=True)
class StepOrder:
    """A step that a user asks to be saved; the fields are as for `Checkpointer.save`."""

    step: int
    values: OneTree | Mapping[str, object]
    metrics: Mapping[str, float] | None
    metadata: Mapping[str, JSON] | None
    epoch: int | None
    force: bool
    overwrite: Overwrite


class StepSaver:
    """Saves steps to the nearest tier of a run, on the training thread. Every rank calls the same, with the same steps."""

    def __init__(
        self,
        tiers: RunTiers,
        broken_in: Sequence[set[int]],
        decider: SaveDecider,
        saves: StepSaves,
        options: StepOptions,
        context: Context,
        job: Coordinator,
        *,
        agree: Callable[[str], Agreement],
        on_hosts: Callable[[int], OnHosts | None],
        committed: Callable[[int, int | None, bool], None],
    ) -> None:
        """Save nothing yet.

        Args:
            tiers: of the run; owned before the first save.
            broken_in: by tier, the steps that are known to be damaged there, now and later.
            decider: whether to save.
            saves: takes those that are begun.
            options: of all steps.
            context: options of each save.
            job: the processes that save together.
            agree: begins an exchange between them; called on all or none.
            on_hosts: gives what a save of a step tells the other hosts; None where all see one directory.
            committed: called once a step is committed and known, with it, its epoch, and whether this process is to be preempted; on the
                thread of its save, before anybody hears of it.
        """
        self._tiers = tiers
        self._steps = tiers.copies.tiers[0]
        self._directory = tiers.copies.tiers[-1].display
        self._broken_in = broken_in
        self._decider = decider
        self._saves = saves
        self._options = options
        self._context = context
        self._job = job
        self._agree = agree
        self._on_hosts = on_hosts
        self._committed = committed
        self._warned = False

    def wants(self, step: int, epoch: int | None, *, force: bool = False) -> bool:
        """Whether a step is to be saved.

        Args:
            step, epoch: what could be saved.
            force: whether to save whatever the policy says.

        Raises:
            ValueError: if the step has no name, or the policy cannot answer.
        """
        self._steps.names.name(step)  # refuses what is no number of a step
        wanted = self._decider.decide(
            step,
            epoch,
            saving=self._saves.are_under_way,
            force=force,
            job_size=self._job.size,
            agree=partial(self._agree, "decide"),
        )
        if not wanted and self._decider.was_skipped:
            logger.info("step %d is not saved: an earlier save to %s is under way", step, self._directory)
        return wanted

    def begin(self, order: StepOrder) -> SaveHandle | None:
        """Save a step in the background; None if it is not wanted.

        Raises:
            CheckpointExistsError: if the step is there.
            What `begin_save` does.
        """
        if not self.wants(order.step, order.epoch, force=order.force):
            return None
        name = self._agreed_name(order)
        with self._begun(order) as before:
            handle = begin_save(self._request(order, name, before), self._context, when_busy=self._options.when_busy)
            self._saves.add(order.step, handle)
        return handle

    def perform(self, order: StepOrder) -> bool:
        """Save a step and return once it is committed; False if it is not wanted.

        Raises:
            CheckpointExistsError: if the step is there.
            What `perform_save` does.
        """
        if not self.wants(order.step, order.epoch, force=order.force):
            return False
        name = self._agreed_name(order)
        with self._begun(order) as before:
            perform_save(self._request(order, name, before), self._context)
        return True

    def _agreed_name(self, order: StepOrder) -> str:
        """What the directory of a step is to be called."""
        if order.overwrite or any(order.step in broken for broken in self._broken_in):
            # Processes may have listed at different moments; the leader's name is everybody's.
            return self._agree("name").lead("name", partial(self._steps.name, order.step))
        return self._steps.names.name(order.step)

    @contextmanager
    def _begun(self, order: StepOrder) -> Iterator[Past]:
        """Count a save as begun; gives what was before. One that could not begin is none for policies, so that the next is not left out."""
        past = self._decider.past
        with self._saves.beginning(order.step):
            self._decider.begin(order.step, order.epoch)
            try:
                yield past
            except BaseException:
                # In a job it may have begun in other processes, and what policies know has to be the same in all of them.
                if self._job.size == 1:
                    self._decider.past = past
                raise

    def _request(self, order: StepOrder, name: str, before: Past) -> SaveRequest:
        step, nearest = order.step, self._tiers.nearest
        if nearest is not None:
            nearest.deleter.spare(step)
        # What is known to be damaged is worth nothing, and neither is what only some hosts have: replacing it need not be atomic.
        is_on_some_hosts = self._tiers.hosts is not None and step not in self._steps.candidates()
        is_worthless = step in self._broken_in[0] or is_on_some_hosts
        return SaveRequest(
            destination=Destination(
                Within(self._steps.directory, name),
                "non-atomic" if is_worthless else order.overwrite,
                name=f"{self._directory}/{name}",  # hosts may find one directory by different paths
            ),
            values=order.values,
            layout=self._options.layout,
            exports=[export.of_step(name) for export in self._options.exports if export.wants(step)],
            strategy=self._strategy(step),
            notes=SaveNotes(custom=order.metadata, metrics=order.metrics or {}, step=step, epoch=order.epoch),
            hooks=SaveHooks(
                allowed=partial(self._allow, step, before.step, is_new=not order.overwrite),
                before_commit=None if nearest is None else nearest.owned.check,
                # Not the order: that has the state.
                committed=partial(self._saved, step, name, order.epoch, self._decider.preempted),
            ),
        )

    def _strategy(self, step: int) -> PlainSave:
        """Save into one directory, or into a directory of each host."""
        on_hosts = self._on_hosts(step)
        if on_hosts is None:
            return PlainSave()
        from ckptcore.saving.host_saves import HostSave  # only runs with directories of hosts need it

        return HostSave(on_hosts)

    def _allow(self, step: int, last: int | None, *, is_new: bool) -> None:
        """On the leader, where an error is told to all: wait for a deletion of the step; if it is to be a new one, refuse where it is there.

        One that is known to be damaged wherever it is counts as not there.
        """
        self._warn_of_newer(step, last)
        for owned in self._tiers.owned:
            owned.deleter.wait_until_gone(step)
        if not is_new:
            return
        for tier, broken in zip(self._tiers.copies.tiers, self._broken_in, strict=True):
            if step not in broken and tier.is_committed(step):
                raise CheckpointExistsError(
                    f"step {step} is in {tier.display} already, as {tier.name(step)}; pass overwrite=True to replace it. If the "
                    "run was set back, delete it and all that comes after it, or the next resume goes on from there"
                )

    def _warn_of_newer(self, step: int, last: int | None) -> None:
        if not self._warned and (last is None or last < step):
            newest = self._tiers.copies.latest()
            if newest is not None and newest > step and not any(newest in broken for broken in self._broken_in):
                self._warned = True
                logger.warning(
                    "step %d is saved below step %d, which %s has from before: the next resume loads that one; delete what comes "
                    "after the step that the run was set back to",
                    step, newest, self._directory,
                )  # fmt: skip

    def _saved(self, step: int, name: str, epoch: int | None, preempted: bool) -> None:
        """A step is committed. On the thread of the save, before anybody hears of it."""
        self._decider.end()
        self._broken_in[0].discard(step)
        self._steps.add(step, name)
        self._saves.last_committed = step
        self._committed(step, epoch, preempted)
