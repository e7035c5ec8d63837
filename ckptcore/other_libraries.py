"""Names that users of other checkpointing libraries try first, and the names to use instead. Errors quote them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

__all__ = [
    "ARGUMENTS",
    "ATTRIBUTES",
    "LAYOUTS",
    "ExplainsAttributes",
    "did_you_mean",
    "explains_arguments",
    "instead_of",
]

P = ParamSpec("P")
T = TypeVar("T")

_RUN: Final = "ckptcore.Checkpointer(directory, save_policy=..., preservation_policy=...)"
_LOAD: Final = "ckptcore.load(path, abstract), or ckptcore.load_into(path, state) to restore in place"
_NEWEST: Final = "ckptcore.CheckpointReader(directory).latest"
_OPEN: Final = "ckptcore.open(path), then checkpoint['name'][0:8]"

_POLICIES: Final = (
    "BestN",
    "EveryNSteps",
    "FixedInterval",
    "LatestN",
    "PreemptionCheckpointing",
    "PreserveAll",
    "SpecificSteps",
)

ATTRIBUTES: Final[Mapping[str, Mapping[str, str]]] = {
    "ckptcore": {
        **dict.fromkeys(("CheckpointManager", "CheckpointManagerOptions", "ModelCheckpoint"), _RUN),
        **dict.fromkeys(
            ("load_checkpoint", "load_file", "load_pytree", "load_state_dict", "restore", "restore_checkpoint"), _LOAD
        ),
        **dict.fromkeys(
            (
                "PyTreeCheckpointer",
                "StandardCheckpointer",
                "save_checkpoint",
                "save_file",
                "save_pytree",
                "save_state_dict",
            ),
            "ckptcore.save(path, state)",
        ),
        **dict.fromkeys(("AsyncCheckpointer", "async_save", "save_pytree_async"), "ckptcore.save_async(path, state)"),
        **dict.fromkeys(("PyTreeRestore", "RestoreArgs", "StandardRestore", "args"), _LOAD),
        **dict.fromkeys(("checkpointables_metadata", "pytree_metadata"), "ckptcore.metadata(path)"),
        **dict.fromkeys(("latest_checkpoint", "latest_step"), _NEWEST),
        **dict.fromkeys(("get_tensor", "load_slice", "safe_open"), _OPEN),
        **dict.fromkeys(("FileSystemReader", "FileSystemWriter"), 'a path, and layout="dcp" to write'),
        **dict.fromkeys(("consolidate", "convert"), 'ckptcore.copy(source, destination, layout="safetensors")'),
        "Composite": "ckptcore.save_checkpointables(path, {name: object})",
        "wait_until_finished": "handle.result() of ckptcore.save_async, or Checkpointer.wait()",
        **{name: f"ckptcore.policies.{name}" for name in _POLICIES},
    },
    "StepReader": {
        "all_steps": "steps",
        "best_step": "ckptcore.policies.BestN(...) as preservation_policy, and step_info(step).metrics",
        "checkpoints": "steps",
        "item_metadata": "metadata(step)",
        "latest_step": "latest",
        "load_checkpoint": "load(step)",
        "load_pytree": "load(step, abstract)",
        "restore": "load(step, abstract), or load_into(target) to restore in place",
    },
    "Checkpointer": {
        "async_save": "save(step, state), which saves in the background",
        "check_for_errors": "wait()",
        "is_saving_in_progress": "the handle of save(step, state): handle.done()",
        "maybe_wait_for_staging": "save(step, state), which returns once the state may change",
        "reached_preemption": "preempted",
        "remove_checkpoint": "delete(step)",
        "save_checkpoint": "save(step, state)",
        "save_pytree": "save_blocking(step, state)",
        "save_pytree_async": "save(step, state), which saves in the background",
        "wait_until_finished": "wait()",
    },
    "SaveHandle": dict.fromkeys(("synchronize", "wait", "wait_until_finished"), "result()"),
    "LoadHandle": dict.fromkeys(("wait", "wait_until_finished"), "result()"),
    "StoredTree": {
        "get_slice": "checkpoint['name'][0:8]",
        "get_tensor": "checkpoint['name'][()]",
        "offset_keys": "keys()",
    },
}
"""Attributes by the name of the module or class, each with the expression to use instead."""

_DIRECTORY: Final = "the first argument, a path or URL"
_STATE: Final = "the second argument: one tree of containers, arrays and values"
_ABSTRACT: Final = "abstract, the second argument: a tree like the result"
_EVERY: Final = "save_policy=ckptcore.policies.FixedInterval(n) of Checkpointer"
_BEST: Final = "preservation_policy=ckptcore.policies.BestN(...) of Checkpointer"
_LATEST: Final = "preservation_policy=ckptcore.policies.LatestN(n) of Checkpointer"
_MATCHING: Final = 'matching=ckptcore.Matching(missing="keep", unexpected="ignore")'
_JOB: Final = "context=ckptcore.Context(job=ckptcore.context.JobOptions(...)); a running job is found without it"

ARGUMENTS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("keep_last", "keep_latest_n", "max_to_keep", "save_total_limit"), _LATEST),
    **dict.fromkeys(("best_fn", "best_mode", "monitor", "save_best_only", "save_top_k"), _BEST),
    **dict.fromkeys(("every_n_train_steps", "save_freq", "save_interval_steps", "save_steps"), _EVERY),
    **dict.fromkeys(("checkpoint_dir", "dirpath", "output_dir", "root_directory", "save_dir"), _DIRECTORY),
    **dict.fromkeys(("checkpoint_id", "checkpoint_path", "f", "filename", "filepath", "path"), _DIRECTORY),
    **dict.fromkeys(("checkpoint", "model", "obj", "pytree", "state_dict", "tensors", "tree"), _STATE),
    **dict.fromkeys(("abstract_pytree", "abstract_state", "args", "item", "restore_args", "target"), _ABSTRACT),
    **dict.fromkeys(("allow_partial_load", "partial_restore", "strict"), _MATCHING),
    **dict.fromkeys(("coordinator_rank", "no_dist", "process_group"), _JOB),
    **dict.fromkeys(("format", "planner", "storage_reader", "storage_writer"), 'layout="dcp", or another layout'),
    **dict.fromkeys(("async_options", "block", "blocking"), "save_async, or Checkpointer.save in the background"),
    **dict.fromkeys(("device", "map_location"), "abstract: its leaves state the device of the result"),
    **dict.fromkeys(("fsync", "sync_files"), 'context=ckptcore.Context(durability="none")'),
    **dict.fromkeys(
        ("num_workers", "thread_count"), "context=ckptcore.Context(io=ckptcore.context.IOOptions(threads=n))"
    ),
    "custom_metadata": "metadata",
    "every_n_epochs": "save_policy=ckptcore.policies.EpochInterval(n) of Checkpointer",
    "force": "overwrite=True",
    "item_names": "save_checkpointables and load_checkpointables",
    "keep_period": "preservation_policy=ckptcore.policies.EveryNSteps(n) of Checkpointer",
    "keep_time_interval": "preservation_policy=ckptcore.policies.EveryNSeconds(n) of Checkpointer",
    **dict.fromkeys(("mmap", "slice", "slices"), _OPEN),
    "options": "save_policy and preservation_policy of Checkpointer",
    "save_decision_policy": "save_policy",
    "should_save_fn": "save_policy=ckptcore.policies.CustomSave(...) of Checkpointer",
    "step_format_fixed_length": "step_names",
    "step_name_format": "step_names",
    "step_prefix": "step_names",
    "storage_options": "context=ckptcore.Context(storage={scheme: {...}})",
    "train_time_interval": "save_policy=ckptcore.policies.TimeInterval(seconds) of Checkpointer",
    "use_ocdbt": 'layout="ocdbt"',
    "use_zarr3": 'layout="zarr3"',
    "weights_only": "nothing: a load never runs code of a checkpoint",
}
"""Keyword arguments of functions and methods that save, load and checkpoint, each with the argument to use instead."""

LAYOUTS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("orbax", "tensorstore"), "ocdbt"),
    **dict.fromkeys(("distcp", "pytorch", "torch_dist"), "dcp"),
    **dict.fromkeys(("hf", "huggingface"), "safetensors"),
    **dict.fromkeys(("pickle", "pt", "pth"), "torch"),
}
"""Names of formats, each with the layout that has it."""


def instead_of(owner: str, name: str) -> str:
    """Return a suffix for the error about an unknown name: what to use instead; empty if no other library has it."""
    ours = ATTRIBUTES[owner].get(name) if owner in ATTRIBUTES else None
    return f"; use {ours}" if ours else ""


def did_you_mean(name: str, names: Collection[str]) -> str:
    """Return a suffix for an error message that suggests the most similar name; empty if no name is similar."""
    import difflib  # only errors need it

    near = difflib.get_close_matches(name, names, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def explains_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function: the TypeError for an unknown keyword argument names the argument to use instead."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            # Without a further frame the call itself failed: the arguments do not fit the signature.
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:
                _explain(error, function, kwargs)
            raise

    return call


def _explain(error: TypeError, function: Callable[..., object], arguments: Mapping[str, object]) -> None:
    known = inspect.signature(function).parameters
    for name in arguments:
        if name not in known:
            near = did_you_mean(name, known)
            ours = ARGUMENTS.get(name)
            if not ours and not near and "state" in known:
                ours = _STATE  # the call was like numpy.savez(path, name=array)
            error.args = (f"{error}" + (f"; use {ours}" if ours else near),)
            return
    if "multiple values" in str(error):  # the state came first
        error.args = (f"{error}; the arguments are {', '.join([name for name in known if name != 'self'])}",)


class ExplainsAttributes:
    """Mixin: if another library has an unknown attribute, the AttributeError says which attribute to use instead."""

    __slots__ = ()

    if not TYPE_CHECKING:  # with it, type checkers would accept any attribute

        def __getattr__(self, name: str) -> Any:
            for owner in type(self).__mro__:
                if hint := instead_of(owner.__name__, name):
                    message = f"{type(self).__name__!r} object has no attribute {name!r}{hint}"
                    raise AttributeError(message, name=name, obj=self)
            return object.__getattribute__(self, name)  # raises the error of Python, or that of a property
