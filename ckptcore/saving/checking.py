"""Check before the training that a state can be saved and restored. Reads no arrays and writes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from ckptcore.context import Context, default_context
from ckptcore.errors import CheckpointError, TreeMismatchError, UnsupportedLeafError
from ckptcore.job.agreement import Agreement
from ckptcore.loading.abstract_trees import stored_at
from ckptcore.matching.leaf_matching import match_leaves
from ckptcore.other_libraries import explains_arguments
from ckptcore.plugins import Plugins
from ckptcore.protocols import Layout
from ckptcore.runtime import runtime_of
from ckptcore.saving.common_trees import refuse_per_process_objects
from ckptcore.saving.descriptions import TreeDescription, describe_part, naming
from ckptcore.tree.flattening import PerProcess, flatten, requested_columns

_SHOWN: Final = 50
"""Maximum number of refused values that an error lists."""


@explains_arguments
def check(state: object, *, layout: str | Layout = "safetensors", context: Context | None = None) -> None:
    """Check that a tree can be saved and restored. Call it before the training, not only at the first save.

    Reads no array and writes nothing. In a job, every process calls it. Objects may create state while they are used,
    such as the moments of an optimizer, so a check after the first step can find more. A check calls the same methods
    of objects as a save does. Pass an optimizer itself rather than an object that calls ``get_optimizer_state_dict``
    of PyTorch, because that function of PyTorch makes a step if the optimizer has no state.

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


def check_values(values: Mapping[str, object], layout: str | Layout, context: Context, agreement: Agreement) -> None:
    """Check that values can be saved and restored. Every process of a job calls it, and all of them raise an error.

    Args:
        values: by name; one tree has an empty name.
        layout: the layout of the saves.
        context: options.
        agreement: gathers the errors of all processes.

    Raises:
        UnsupportedLeafError: lists everything in the values of this process that cannot be saved or restored.
        RankFailedError: another process has such values.
    """
    with agreement.stage("check", meaning="nothing was saved"):
        runtime = runtime_of(context)
        registry, workers = runtime.registry, runtime.workers()
        if workers is not None:
            registry = registry.wrapping(workers.leaves_to_save)
        layout = runtime.registry.layout(layout)
        lines: list[str] = []
        for name in sorted(values):  # in one order on every process, because `state_dict` may be collective
            refusals: list[CheckpointError] = []
            try:
                with naming(name):
                    description = describe_part(
                        name,
                        values[name],
                        layout,
                        registry,
                        rank=agreement.rank,
                        size=agreement.size,
                        refusals=refusals,
                    )
                    if isinstance(description, TreeDescription) and not refusals:
                        refuse_per_process_objects(description, agreement.size, context)
                        _restore_abstractly(values[name], description, runtime.registry, agreement.rank)
            except TreeMismatchError as error:
                lines.extend(f"cannot be restored: {difference}" for difference in error.differences)
            except CheckpointError as error:
                lines.append(str(error))
            where = f"in {name!r}: " if name else ""
            lines[:0] = [f"{where}{refusal}" for refusal in refusals]
        if lines:
            raise _refusal(lines)


def _restore_abstractly(value: object, description: TreeDescription, plugins: Plugins, rank: int) -> None:
    """Match a value with its own description, as a load into the value would.

    Raises:
        TreeMismatchError: the value would not accept its own state.
        UnsupportedLeafError: a part of it cannot be loaded.
    """
    if isinstance(value, PerProcess):
        value = value.value
    find = stored_at(description.tree, plugins)
    columns = requested_columns(description.tree)
    flat = flatten(value, plugins, rank=rank, stored_at=find, columns=columns)
    match_leaves(flat, description.tree, "the state", by_name=False)


def _refusal(lines: Sequence[str]) -> UnsupportedLeafError:
    unique = list(dict.fromkeys(line.removesuffix(". Nothing was written") for line in lines))
    shown = "".join(f"\n  {line}" for line in unique[:_SHOWN])
    more = f"\n  and {len(unique) - _SHOWN} more" if len(unique) > _SHOWN else ""
    return UnsupportedLeafError(f"the state cannot be saved and restored:{shown}{more}")
