"""All functions that read a checkpoint, with outcomes that can be compared."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import numpy as np
from ckptcore_tools.locations import describe_and_check
from ckptcore_tools.run_steps import find_steps, read_steps

import ckptcore
from ckptcore.errors import CheckpointError, CheckpointNotFoundError, TargetUndefinedError
from ckptcore.inspection.completeness import has_expected_sizes
from ckptcore.inspection.describe import describe_checkpoint
from ckptcore.model import AbstractArray
from ckptcore.results import CheckpointMetadata, StoredArray, StoredTree

Outcome: TypeAlias = str
"""The result of a reader as text: equal for two reads of the same save, different for two saves."""

Reader: TypeAlias = Callable[[str, ckptcore.Context], object]

_REPLACED: Final = ("was replaced or deleted after it was opened", "was replaced during the consolidation")
_numbers = itertools.count()


def outcome_of(reader: Reader, location: str, context: ckptcore.Context) -> Outcome:
    """Return the outcome of one read, or the type of its `CheckpointError`.

    Other errors are raised.
    """
    try:
        return _plain(reader(location, context))
    except CheckpointError as error:
        reason: BaseException = error
        if isinstance(error, TargetUndefinedError) and error.__cause__ is not None:
            reason = error.__cause__  # an earlier attempt filled the target before the replacement
        return "replaced" if any(text in str(reason) for text in _REPLACED) else type(reason).__name__


def _plain(value: object) -> str:
    """Return a value as text, including types and elements."""
    if isinstance(value, Mapping):
        return "{" + ", ".join([f"{key}: {_plain(value[key])}" for key in value]) + "}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(map(_plain, value))})"
    if isinstance(value, np.ndarray | np.generic):
        return f"{value.dtype}{value.tolist()}"
    if isinstance(value, AbstractArray):
        return f"{value.dtype}{value.shape}"
    return repr(value)


def _load(location: str, context: ckptcore.Context) -> object:
    return ckptcore.load(location, context=context)


def _load_into(location: str, context: ckptcore.Context) -> object:
    target = {"a": {"w": np.zeros(3, np.int64)}}
    ckptcore.load_into(location, target, context=context, matching=ckptcore.Matching(unexpected="ignore"))
    return target


def _load_member(location: str, context: ckptcore.Context) -> object:
    return ckptcore.load(location + "/a", context=context)


def _load_checkpointables(location: str, context: ckptcore.Context) -> object:
    return ckptcore.load_checkpointables(location, context=context)


def _told(metadata: CheckpointMetadata) -> object:
    return {
        "tree": metadata.abstract,
        "custom": metadata.custom,
        "layout": metadata.layout,
        "ours": metadata.save_id is not None,
    }


def _told_of_several(metadata: CheckpointMetadata) -> object:
    return {
        "members": {name: _told(member) for name, member in metadata.checkpointables.items()},
        "custom": metadata.custom,
        "deleted": metadata.checkpointables.deleted,
        "unreadable": list(metadata.checkpointables.unreadable),
        "ours": metadata.save_id is not None,
    }


def _metadata(location: str, context: ckptcore.Context) -> object:
    metadata = ckptcore.metadata(location, context=context)
    return _told_of_several(metadata) if metadata.is_composite else _told(metadata)


def _inspect(location: str, context: ckptcore.Context) -> object:
    description = describe_checkpoint(location, context)
    return _told_of_several(description) if description.is_composite else _told(description)


def _inspect_files(location: str, context: ckptcore.Context) -> object:
    description, files = describe_and_check(location, context)
    told = _told_of_several(description) if description.is_composite else _told(description)
    return {"told": told, "problems": files.problems, "deleted": files.deleted}


def _step_states(location: str, context: ckptcore.Context) -> object:
    try:
        steps = find_steps(location.rpartition("/")[0], ckptcore.step_names.StepNames(), context)
    except CheckpointNotFoundError:
        return []
    statuses = read_steps(steps, steps.candidates(), context)
    # A step that was deleted after its listing has the state "other". File systems hide uncommitted steps.
    # Sizes are not compared, because a checkpoint of several sessions has other files than that of a single save.
    shown = [status for status in statuses if status.state not in ("other", "uncommitted")]
    return [(status.state, status.nbytes is not None, status.problems) for status in shown]


def _open(location: str, context: ckptcore.Context) -> object:
    with ckptcore.open(location, context=context) as checkpoint:
        return _elements(checkpoint)


def _elements(value: Any) -> object:
    if isinstance(value, StoredTree):
        return {key: _elements(value[key]) for key in value}
    return value[...] if isinstance(value, StoredArray) else value


def _slice(location: str, context: ckptcore.Context) -> object:
    with ckptcore.open(location, context=context) as checkpoint:
        return checkpoint["a/w"][1:3]


def _iter_boxes(location: str, context: ckptcore.Context) -> object:
    with ckptcore.open(location, context=context) as checkpoint:
        return {box.name: box.elements for box in checkpoint.iter_boxes()}


def _metadata_of_open(location: str, context: ckptcore.Context) -> object:
    with ckptcore.open(location, context=context) as checkpoint:
        return _told(checkpoint.metadata)


def _verify(location: str, context: ckptcore.Context) -> object:
    report = ckptcore.verify(location, context=context)
    problems = [(problem.key, problem.message) for problem in report.problems]
    return {"problems": problems, "unverified": sorted(report.unverified), "deleted": report.deleted}


def _has_expected_sizes(location: str, context: ckptcore.Context) -> object:
    return has_expected_sizes(location, context)


def _copy(location: str, context: ckptcore.Context) -> object:
    return _made(lambda to: ckptcore.copy(location, to, context=context))


def _convert(location: str, context: ckptcore.Context) -> object:
    return _made(lambda to: ckptcore.copy(location, to, layout="safetensors", context=context))


def _consolidate(location: str, context: ckptcore.Context) -> object:
    return _made(lambda to: ckptcore.copy(location, to, subtree=(), context=context))


def _consolidate_subtree(location: str, context: ckptcore.Context) -> object:
    return _made(lambda to: ckptcore.copy(location, to, subtree="a", context=context))


def _made(make: Callable[[str], object]) -> object:
    """Return the contents of a new location in memory that a call has written."""
    destination = f"memory://copies-{next(_numbers)}/copy"
    make(destination)
    description = describe_checkpoint(destination, ckptcore.Context())
    if not description.is_composite:
        return {"told": _told(description), "value": ckptcore.load(destination)}
    return {"told": _told_of_several(description), "value": ckptcore.load_checkpointables(destination)}


def _steps(location: str, context: ckptcore.Context) -> object:
    with ckptcore.CheckpointReader(location.rpartition("/")[0], context=context) as reader:
        return reader.steps


READERS: Final[Mapping[str, Reader]] = {
    "load": _load,
    "load_into": _load_into,
    "load_member": _load_member,
    "load_checkpointables": _load_checkpointables,
    "metadata": _metadata,
    "inspect": _inspect,
    "inspect_files": _inspect_files,
    "step_states": _step_states,
    "open": _open,
    "slice": _slice,
    "iter_boxes": _iter_boxes,
    "metadata_of_open": _metadata_of_open,
    "verify": _verify,
    "has_expected_sizes": _has_expected_sizes,
    "copy": _copy,
    "convert": _convert,
    "consolidate": _consolidate,
    "consolidate_subtree": _consolidate_subtree,
    "steps": _steps,
}
"""By name: each reads a checkpoint at a location."""
