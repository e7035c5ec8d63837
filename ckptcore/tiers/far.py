"""The far tier, as the process sees it that uploads to it: owned, listed, collected."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from ckptcore.context import Context
from ckptcore.garbage import StepDeleter, policy_infos
from ckptcore.holds import Hold, own_directory
from ckptcore.holds.ownership import IfInUse
from ckptcore.policies import PreservationPolicy, PreserveAll, StepInfo
from ckptcore.protocols import StorageBackend
from ckptcore.steps import StepDirectory

__all__ = ["FarTier"]


class FarTier:
    """The directory of a run that has a near tier too. This process owns it until it is closed.

    Attributes:
        steps: which there are.
        policy: which are kept.
        store: the storage, opened at the directory.
        owned: the ownership.
        deleter: deletes steps.
    """

    def __init__(
        self, steps: StepDirectory, policy: PreservationPolicy, context: Context, *, if_in_use: IfInUse
    ) -> None:
        """Own the directory.

        Args:
            steps: the directory.
            policy: which steps are kept.
            context: options.
            if_in_use: as for `Checkpointer`.

        Raises:
            DirectoryInUseError: if another job owns it.
            StorageError: if it cannot be written.
        """
        steps.expect_directory()
        self.steps = steps
        self.policy = policy
        self.store: StorageBackend = steps.open_to_write()
        self.owned: Hold = own_directory(self.store, steps.display, if_in_use=if_in_use)
        self.deleter = StepDeleter(steps, self.store, self.owned, context)

    def infos(self, broken: Collection[int]) -> Sequence[StepInfo]:
        """What its policy decides over."""
        return policy_infos(self.steps, broken)

    def collect(self, *, keep: Callable[[], Collection[int]], broken: Collection[int]) -> None:
        """Delete what its policy gives up.

        Args:
            keep: gives the steps that stay whatever the policy says.
            broken: steps that are damaged; they are left alone.

        Raises:
            StorageError, SaveLostError: some may be deleted.
        """
        if not isinstance(self.policy, PreserveAll):
            self.deleter.collect(self.policy, keep=keep, broken=broken)

    def close(self) -> None:
        """Let the directory go."""
        self.owned.close()
