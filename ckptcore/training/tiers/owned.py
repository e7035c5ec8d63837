"""OwnedTier: a directory of steps that this process owns, and may delete from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from ckptcore.commit.holding import Hold
from ckptcore.commit.location import Place
from ckptcore.commit.ownership import IfInUse, own_directory
from ckptcore.context import Context
from ckptcore.loading.verify import has_its_sizes
from ckptcore.policies import PreservationPolicy, PreserveAll, StepInfo
from ckptcore.protocols import StorageBackend
from ckptcore.training.garbage import StepDeleter, policy_infos
from ckptcore.training.steps import StepDirectory

__all__ = ["OwnedTier"]


class OwnedTier:
    """A tier of a run, as a process sees it that owns its directory, until it is closed.

    Attributes:
        steps: which there are.
        policy: which are kept.
        broken: those whose copy here was found to be damaged, and not replaced since; who finds out adds and takes away.
        store: the storage, opened at the directory.
        owned: the ownership.
        deleter: deletes steps.
    """

    def __init__(
        self,
        steps: StepDirectory,
        policy: PreservationPolicy,
        broken: set[int],
        context: Context,
        *,
        if_in_use: IfInUse,
        looks_whole: Callable[[Place, Context], bool] = has_its_sizes,
    ) -> None:
        """Own the directory.

        Args:
            steps: the directory.
            policy: which steps are kept.
            broken: the steps that are known to be damaged here, now and later.
            context: options.
            if_in_use: as for `Checkpointer`.
            looks_whole: whether a step at a place seems to be undamaged.

        Raises:
            DirectoryInUseError: if another job owns it.
            StorageError: if it cannot be written.
        """
        steps.expect_directory()
        self.steps = steps
        self.policy = policy
        self.broken = broken
        self.store: StorageBackend = steps.open_to_write()
        self.owned: Hold = own_directory(self.store, steps.display, if_in_use=if_in_use)
        self.deleter = StepDeleter(steps, self.store, self.owned, context, looks_whole=looks_whole)

    def infos(self) -> Sequence[StepInfo]:
        """What its policy decides over."""
        return policy_infos(self.steps, self.broken)

    def collect(self, *, keep: Callable[[], Collection[int]]) -> None:
        """Delete what its policy gives up; what is damaged is left alone.

        Args:
            keep: gives the steps that stay whatever the policy says.

        Raises:
            StorageError, SaveLostError: some may be deleted.
        """
        if not isinstance(self.policy, PreserveAll):
            self.deleter.collect(self.policy, keep=keep, broken=frozenset(self.broken))

    def close(self) -> None:
        """Let the directory go."""
        self.owned.close()
