"""Checks before the training that a state can be saved and restored."""

from __future__ import annotations

from collections.abc import Mapping

from ckptcore.context import Context, default_context
from ckptcore.job.agreement import Agreement
from ckptcore.other_libraries import explains_arguments
from ckptcore.protocols import Layout
from ckptcore.runtime import runtime_of
from ckptcore.saving.checking import check_values


@explains_arguments
def check(state: object, *, layout: str | Layout = "safetensors", context: Context | None = None) -> None:
    """Check that a tree can be saved and restored. Call it before the training, not only at the first save.

    Reads no array and writes nothing. In a job, every process calls it. Objects may create state while they are used,
    such as the moments of an optimizer; a check after the first step finds more. Methods of objects are called as by a
    save: pass an optimizer itself rather than an object that calls ``get_optimizer_state_dict`` of PyTorch, which makes
    a step if the optimizer has no state.

    Args:
        state: the tree, as for `save` and `load_into`.
        layout, context: as for `save`.

    Raises:
        UnsupportedLeafError: lists each path that cannot be saved or restored, with its type and a remedy.
        RankFailedError: another process of the job has such paths.
    """
    _check({"": state}, layout, context)


@explains_arguments
def check_checkpointables(
    checkpointables: Mapping[str, object],
    *,
    layout: str | Layout = "safetensors",
    context: Context | None = None,
) -> None:
    """Check that several objects can be saved into one checkpoint, and restored from it. See `check`.

    Args:
        checkpointables: as for `save_checkpointables`. Objects that write their own files are not checked.
        layout, context: as for `save`.

    Raises:
        UnsupportedLeafError, RankFailedError: see `check`.
    """
    _check(dict(checkpointables), layout, context)


def _check(values: Mapping[str, object], layout: str | Layout, context: Context | None) -> None:
    context = context or default_context()
    runtime = runtime_of(context)
    check_values(values, layout, context, Agreement(runtime.job(), runtime.exchange_key("check")))
