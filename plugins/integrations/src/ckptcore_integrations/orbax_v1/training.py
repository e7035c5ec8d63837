"""`training`: steps of a run. Orbax's `Checkpointer` manages them; ckptcore saves, loads and deletes them."""

from __future__ import annotations

from typing import Any

import ckptcore
from ckptcore.context import JobOptions, SingleProcess
from ckptcore.results import SaveHandle
from ckptcore.training import expanded_location
from ckptcore_integrations.orbax_v1.deletion import is_from_ckptcore
from ckptcore_integrations.orbax_v1.library import (
    METRICS_CHECKPOINTABLE_KEY,
    V0AsyncCheckpointer,
    get_context,
    v0_args,
    v1,
    validate_save_checkpointables,
)
from ckptcore_integrations.orbax_v1.saving import Response, prepare
from ckptcore_integrations.orbax_v1.trees import with_tree_handler

CheckpointMetadata = v1.training.CheckpointMetadata
RootMetadata = v1.training.RootMetadata
errors = v1.training.errors
pathways = v1.training.pathways
preservation_policies = v1.training.preservation_policies
save_decision_policies = v1.training.save_decision_policies


class Checkpointer(v1.training.Checkpointer):  # type: ignore[misc]  # Orbax has no types
    """Orbax's `Checkpointer`, whose steps ckptcore saves, loads and deletes.

    Policies, names of steps, metrics and the list of checkpoints are Orbax's. The arguments and errors are the same as
    in `orbax.checkpoint.v1.training.Checkpointer`.
    """

    def __init__(self, directory: Any, **options: Any) -> None:
        """Open the directory of a run, and create it if it does not exist.

        ``cleanup_tmp_directories=True`` also removes temporary files of killed saves and deletions of ckptcore.
        """
        super().__init__(expanded_location(directory), **options)
        if options.get("cleanup_tmp_directories") and v1.multihost.is_primary_host(0):
            # Orbax does not know the hidden directories of our killed saves and deletions. The previous owner may have
            # been killed on a storage without locks, so take over. A running job that renews a lease keeps ownership.
            with ckptcore.Checkpointer(str(self.directory), if_in_use="take over", context=_alone()) as ours:
                ours.wait()
        self._saver = _Saver()
        deleter = self._manager._checkpoint_deleter
        if self._context.deletion.gcs_deletion_options.todelete_full_path is None:
            self._manager._checkpoint_deleter = _Deleter(self, deleter)

    def save_checkpointables_async(
        self,
        step: int,
        checkpointables: dict[str, Any],
        *,
        force: bool = False,
        overwrite: bool = False,
        metrics: Any = None,
        custom_metadata: Any = None,
    ) -> v1.AsyncResponse[bool] | None:
        """Begin to save a step, if the policy selects it. An existing step is replaced atomically.

        Returns:
            A response with the result True; None if the policy does not select the step.

        Raises:
            StepAlreadyExistsError: the step exists, and `overwrite` is False.
        """
        self._wait_for_deletion()
        validate_save_checkpointables(checkpointables)
        exists = any(checkpoint.step == step for checkpoint in self.checkpoints)
        if exists and not overwrite:
            raise errors.StepAlreadyExistsError(f"Step {step} already exists.")
        if exists:
            self._forget(step)
        context = get_context(self._context)
        with context:
            values = dict(checkpointables)
            if metrics:
                values[METRICS_CHECKPOINTABLE_KEY] = metrics
            self._manager._checkpointer = self._saver
            self._saver.values = values
            try:
                begun = self._manager.save(
                    step, args=v0_args.Composite(), metrics=metrics, force=force, custom_metadata=custom_metadata
                )
            except BaseException:
                self.reload()
                raise
        if not begun:
            if exists:
                self.reload()
            return None

        def wait() -> bool:
            self._manager.wait_until_finished()
            return True

        return Response(wait)

    def load_checkpointables(self, step: Any = None, abstract_checkpointables: Any = None) -> dict[str, Any]:
        """Load several objects of a step. If `step` is None, use the latest step."""
        with with_tree_handler(get_context(self._context)):
            loaded: dict[str, Any] = super().load_checkpointables(step, abstract_checkpointables)
        return loaded

    def metadata(self, step: Any = None) -> Any:
        """Return the metadata of the tree of a step. If `step` is None, use the latest step."""
        with with_tree_handler(get_context(self._context)):
            return super().metadata(step)

    def checkpointables_metadata(self, step: Any = None) -> Any:
        """Return the metadata of the objects of a step. If `step` is None, use the latest step."""
        with with_tree_handler(get_context(self._context)):
            return super().checkpointables_metadata(step)

    def cancel(self, step: Any = None) -> None:
        """Wait for a running save, because ckptcore does not cancel saves, and delete the step."""
        super().cancel(step)

    def _forget(self, step: int) -> None:
        """Remove a step from the list, so that it can be saved again. A step of Orbax is deleted first."""
        self._manager.wait_until_finished()
        if is_from_ckptcore(self._path(step)):
            self._manager._checkpoints.delete_if(lambda info: info.step == step)
        else:
            self._manager.delete(step)

    def _path(self, step: int) -> Any:
        return self.directory / self._step_name_format.build_name(step)


def _alone() -> ckptcore.Context:
    """Return a Context for operations of the first process alone."""
    return ckptcore.Context(job=JobOptions(coordinator=SingleProcess()))


class _Saver(V0AsyncCheckpointer):  # type: ignore[misc]  # Orbax has no types
    """The checkpointer that Orbax's `CheckpointManager` uses to save.

    Attributes:
        values: the checkpointables of the next save.
    """

    def __init__(self) -> None:  # the attributes of the base class are not used
        self.values: dict[str, Any] = {}
        self._handle: SaveHandle | None = None
        self._context: Any = None

    def save(self, directory: Any, *_: Any, custom_metadata: Any = None, **__: Any) -> None:
        """Begin to save `values`."""
        self._context = get_context()
        values, self.values = self.values, {}
        arguments = prepare(directory, values, True, custom_metadata)
        self._handle = ckptcore.save_checkpointables_async(**arguments)
        # Orbax creates the temporary directory while it copies the arrays, and its own tests rely on this.
        self._handle.wait_for_claim()

    def wait_until_finished(self) -> None:
        """Wait until the step is committed, and call the callback of the Context."""
        if self._handle is None:
            return
        handle, self._handle = self._handle, None
        handle.result(self._context.asynchronous.timeout_secs)
        if (callback := self._context.asynchronous.post_finalization_callback) is not None:
            callback()

    def check_for_errors(self) -> None:
        """Do nothing, because `wait_until_finished` raises the errors."""

    def cancel(self) -> None:
        """Wait until the step is committed."""
        self.wait_until_finished()

    def close(self) -> None:
        """Wait until the step is committed."""
        self.wait_until_finished()


class _Deleter:
    """Deletes steps: those of ckptcore with `ckptcore.delete`, and those of Orbax with its own deleter."""

    def __init__(self, checkpointer: Checkpointer, of_orbax: Any) -> None:
        self._checkpointer = checkpointer
        self._of_orbax = of_orbax

    def delete(self, step: int) -> None:
        path = self._checkpointer._path(step)
        if not is_from_ckptcore(path):
            self._of_orbax.delete(step)
        elif v1.multihost.is_primary_host(0):
            ckptcore.delete(str(path), other_files=True)  # as Orbax does

    def delete_steps(self, steps: Any) -> None:
        for step in steps:
            self.delete(step)

    def close(self) -> None:
        self._of_orbax.close()
