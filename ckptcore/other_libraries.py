"""Names that users of other checkpointing libraries try first, and the names to use instead. Errors quote them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

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
        **dict.fromkeys(("best_checkpoint", "best_model_path", "best_step"), "best(metric, mode)"),
        "checkpoints": "steps",
        "item_metadata": "metadata(step)",
        **dict.fromkeys(("last_step", "latest_checkpoint", "latest_step"), "latest"),
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
_PLACE: Final = (
    "abstract: its leaves state device and dtype, such as those of model.state_dict(); framework='torch' gives tensors "
    "on the CPU; load_into(path, model) fills a model where it is"
)
_CASTS: Final = 'matching=ckptcore.Matching(cast="narrowing"): the dtype is that of the target'
_SELECTION: Final = "select=ckptcore.select.names(name)"
_EXPORTS: Final = (
    "strategy=ckptcore.WithExports([ckptcore.Export(location=other, subtree=name)]); for a Checkpointer strategy="
    "ckptcore.StepExports([ckptcore.StepExport(directory=other, subtree=name)])"
)
_JOB: Final = "context=ckptcore.Context(job=ckptcore.context.JobOptions(...)); a running job is found without it"

ARGUMENTS: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("keep", "keep_last", "keep_last_n", "keep_latest_n", "keep_n", "max_keep", "max_to_keep", "save_total_limit"),
        _LATEST,
    ),
    **dict.fromkeys(
        ("best_fn", "best_metric", "best_mode", "keep_best", "metric_for_best_model", "mode", "monitor")
        + ("save_best_only", "save_top_k"),
        _BEST,
    ),
    **dict.fromkeys(("every_n_train_steps", "save_freq", "save_interval_steps", "save_steps"), _EVERY),
    **dict.fromkeys(("checkpoint_dir", "dirpath", "output_dir", "root_directory", "save_dir"), _DIRECTORY),
    **dict.fromkeys(("checkpoint_id", "checkpoint_path", "f", "filename", "filepath", "path"), _DIRECTORY),
    **dict.fromkeys(("checkpoint", "model", "obj", "pytree", "state_dict", "tensors", "tree"), _STATE),
    **dict.fromkeys(("abstract_pytree", "abstract_state", "args", "item", "restore_args", "target"), _ABSTRACT),
    **dict.fromkeys(("allow_partial_load", "partial_restore", "strict"), _MATCHING),
    **dict.fromkeys(("coordinator_rank", "no_dist", "process_group"), _JOB),
    **dict.fromkeys(("format", "planner", "storage_reader", "storage_writer"), 'layout="dcp", or another layout'),
    **dict.fromkeys(("async_options", "block", "blocking"), "save_async, or Checkpointer.save in the background"),
    **dict.fromkeys(("device", "device_map", "dtype", "map_location", "torch_dtype"), _PLACE),
    **dict.fromkeys(("restore_type", "return_tensors", "sharding", "shardings"), _PLACE),
    **dict.fromkeys(("filter", "include", "keys", "names", "prefix", "variables"), _SELECTION),
    **dict.fromkeys(("export", "exports"), _EXPORTS),
    **dict.fromkeys(("safe_serialization", "use_safetensors"), 'layout="safetensors"'),
    **dict.fromkeys(("max_shard_size", "shard_size"), "layout=ckptcore.SafetensorsLayout(n)"),
    **dict.fromkeys(("async_save", "is_async", "non_blocking"), "save_async, or Checkpointer.save in the background"),
    **dict.fromkeys(("exist_ok", "overwrite_existing"), "overwrite=True"),
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
    **dict.fromkeys(
        ("pickle_module", "trust_remote_code", "weights_only"), "nothing: a load never runs code of a checkpoint"
    ),
}
"""Unknown keyword arguments of any function or method of ckptcore, each with the argument to use instead."""

_IN_PLACE: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("device", "device_map", "framework", "map_location", "sharding", "shardings"),
        "no such argument: arrays of the target are filled where they are",
    ),
    **dict.fromkeys(("dtype", "torch_dtype"), _CASTS),
    **dict.fromkeys(("abstract", "into", "model", "state", "state_dict"), "the second argument: the target"),
    "step": "the path of the step, or ckptcore.CheckpointReader(directory).load_into(target, step=step)",
}

_AS_NEW: Final = "abstract, the second argument: a tree like the result; or load_into(path, target), which fills one"

ARGUMENTS_OF: Final[Mapping[str, Mapping[str, str]]] = {
    "load": {
        **dict.fromkeys(("into", "like", "model", "obj", "state", "state_dict", "target", "template", "tree"), _AS_NEW),
        "step": "the path of the step, or ckptcore.CheckpointReader(directory).load(step)",
    },
    "load_into": _IN_PLACE,
    "StepReader.load_into": {
        **_IN_PLACE,
        **dict.fromkeys(("abstract", "into", "model", "state", "state_dict"), "the first argument: the target"),
    },
    "Checkpointer.__init__": dict.fromkeys(("every", "interval", "save_every"), _EVERY),
}
"""Keyword arguments of one function, by its qualified name, each with the argument to use instead. They take precedence
over `ARGUMENTS`."""

REFUSING_NUMPY: Final = frozenset(("torch",))
"""Frameworks whose modules and optimizers refuse a state with NumPy arrays."""


def hint_of_framework(name: str) -> str:
    """Return a hint for a program that has loaded arrays of a framework as NumPy arrays."""
    return (
        f"arrays of {name} are loaded as NumPy arrays, which load_state_dict refuses: pass framework={name!r} for "
        "tensors on the CPU, or use load_into(path, model), which keeps devices and dtypes; framework='numpy' says "
        "that NumPy arrays are wanted"
    )


_NEWEST_STEPS: Final = ("latest", "last", "newest", "auto")


def hint_of_step(step: object) -> str:
    """Return a suffix for the error about a step that is not a number, or too large: what to pass instead."""
    if isinstance(step, int):
        return "; a step is a whole number from 0 to 2**63 - 1"
    if not isinstance(step, str):
        return "; pass the abstract tree as abstract="
    if step.lower() in _NEWEST_STEPS:
        return "; leave it out to load the newest valid step, which is also `latest`"
    if step.lower().startswith("best"):
        return "; pass the step that best(metric, mode) returns, such as step=run.best('loss', 'min')"
    return "; `steps` lists the steps"


LAYOUTS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("orbax", "tensorstore"), "ocdbt"),
    **dict.fromkeys(("distcp", "pytorch", "torch_dist"), "dcp"),
    **dict.fromkeys(("hf", "huggingface"), "safetensors"),
    **dict.fromkeys(("pickle", "pt", "pth"), "torch"),
}
"""Names that other libraries use for formats, each with the layout to use."""


def instead_of(owner: str, name: str) -> str:
    """Return a suffix for the error about an unknown name: what to use instead; empty if `ATTRIBUTES` lacks it."""
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
            # If the traceback has no further frame, the call itself failed: the arguments do not fit the signature.
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:
                _explain(error, function, kwargs)
            raise

    return call


def _explain(error: TypeError, function: Callable[..., object], arguments: Mapping[str, object]) -> None:
    known = inspect.signature(function).parameters
    for name in arguments:
        if name not in known:
            near = did_you_mean(name, known)
            ours = ARGUMENTS_OF.get(function.__qualname__, {}).get(name) or ARGUMENTS.get(name)
            if not ours and not near and "state" in known:
                ours = _STATE  # the call was like numpy.savez(path, name=array)
            error.args = (f"{error}" + (f"; use {ours}" if ours else near),)
            return
    if "multiple values" in str(error):  # the state was passed first
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
            return object.__getattribute__(self, name)  # raises the error of Python, or of a property
