"""Checkpoints for machine learning: save and load the state of a training job, with any framework.

Save and load: `save`, `load` and `load_into` for one tree of arrays, `save_checkpointables` and `load_checkpointables`
for several objects; most have an asynchronous variant. `Checkpointer` saves the steps of a training run and resumes it.
`CheckpointReader` reads the steps of another job.

Inspect and manage: `open` reads parts of arrays on demand, `metadata` describes a checkpoint, `verify` checks all
bytes, `diff` compares two checkpoints, `copy` and `delete` manage checkpoints, and `plan` predicts a save.

Options are in `Context`. Further modules: `ckptcore.policies`, `select`, `transforms`, `step_names`, `errors`,
`events`, `results`, `handlers`, `context`; for authors of plugins `protocols`, `hookspecs`, `model`, `planning`.
`Update`, `copy`, `diff`, `partial`, `plan`, exports, `tiers` and `transforms` are in other distributions. If one is
missing, the error has the command that installs it.
"""

import importlib
import sys
import threading  # noqa: F401  # if it is first imported at exit, the interpreter does not wait for threads
from types import ModuleType
from typing import TYPE_CHECKING, Final

# Names are imported at their first use, so that importing this package is fast. Type checkers read the imports below; a
# test compares both.
_NAMES: Final = {
    "ckptcore.api.checkpoints": "abstract delete metadata open verify",
    "ckptcore.api.loads": "load load_async load_checkpointables load_into",
    "ckptcore.api.saves": "save save_async save_checkpointables save_checkpointables_async",
    "ckptcore.builtin.safetensors": "SafetensorsLayout",
    "ckptcore.builtin.sharded_arrays": "ArrayShard ShardedArray",
    "ckptcore.training.checkpointer": "Checkpointer",
    "ckptcore.context": "Context",
    "ckptcore.errors": "CheckpointError",
    "ckptcore.hookspecs": "hookimpl",
    "ckptcore.loading.load": "LoadAs",
    "ckptcore.matching.options": "Matching",
    "ckptcore.model": "AbstractArray",
    "ckptcore.protocols": "StatefulCheckpointable",
    "ckptcore.training.reader": "CheckpointReader",
    "ckptcore.saving.checking": "check check_checkpointables",
    "ckptcore.saving.writing": "PlainSave",
    "ckptcore.tree.flattening": "PLACEHOLDER PerProcess",
}

_MODULES: Final = (
    "context",
    "errors",
    "events",
    "handlers",
    "hookspecs",
    "model",
    "planning",
    "policies",
    "protocols",
    "results",
    "select",
    "step_names",
)

_HOMES: Final = {name: module for module, names in _NAMES.items() for name in names.split()}

if TYPE_CHECKING:
    from ckptcore import context as context
    from ckptcore import errors as errors
    from ckptcore import events as events
    from ckptcore import handlers as handlers
    from ckptcore import hookspecs as hookspecs
    from ckptcore import model as model
    from ckptcore import planning as planning
    from ckptcore import policies as policies
    from ckptcore import protocols as protocols
    from ckptcore import results as results
    from ckptcore import select as select
    from ckptcore import step_names as step_names
    from ckptcore.api.checkpoints import abstract as abstract
    from ckptcore.api.checkpoints import delete as delete
    from ckptcore.api.checkpoints import metadata as metadata
    from ckptcore.api.checkpoints import open as open
    from ckptcore.api.checkpoints import verify as verify
    from ckptcore.api.loads import load as load
    from ckptcore.api.loads import load_async as load_async
    from ckptcore.api.loads import load_checkpointables as load_checkpointables
    from ckptcore.api.loads import load_into as load_into
    from ckptcore.api.saves import save as save
    from ckptcore.api.saves import save_async as save_async
    from ckptcore.api.saves import save_checkpointables as save_checkpointables
    from ckptcore.api.saves import save_checkpointables_async as save_checkpointables_async
    from ckptcore.builtin.safetensors import SafetensorsLayout as SafetensorsLayout
    from ckptcore.builtin.sharded_arrays import ArrayShard as ArrayShard
    from ckptcore.builtin.sharded_arrays import ShardedArray as ShardedArray
    from ckptcore.context import Context as Context
    from ckptcore.errors import CheckpointError as CheckpointError
    from ckptcore.hookspecs import hookimpl as hookimpl
    from ckptcore.lazy_names import Export as Export
    from ckptcore.lazy_names import StepExport as StepExport
    from ckptcore.lazy_names import StepExports as StepExports
    from ckptcore.lazy_names import Update as Update
    from ckptcore.lazy_names import WithExports as WithExports
    from ckptcore.lazy_names import copy as copy
    from ckptcore.lazy_names import copy_steps as copy_steps
    from ckptcore.lazy_names import diff as diff
    from ckptcore.lazy_names import partial as partial
    from ckptcore.lazy_names import plan as plan
    from ckptcore.lazy_names import tiers as tiers
    from ckptcore.lazy_names import transforms as transforms
    from ckptcore.loading.load import LoadAs as LoadAs
    from ckptcore.matching.options import Matching as Matching
    from ckptcore.model import AbstractArray as AbstractArray
    from ckptcore.protocols import StatefulCheckpointable as StatefulCheckpointable
    from ckptcore.saving.checking import check as check
    from ckptcore.saving.checking import check_checkpointables as check_checkpointables
    from ckptcore.saving.writing import PlainSave as PlainSave
    from ckptcore.training.checkpointer import Checkpointer as Checkpointer
    from ckptcore.training.reader import CheckpointReader as CheckpointReader
    from ckptcore.tree.flattening import PLACEHOLDER as PLACEHOLDER
    from ckptcore.tree.flattening import PerProcess as PerProcess

    __version__: str
else:  # type checkers do not see `__getattr__`: with it, they would accept any name
    __all__ = list(_HOMES)

    def __getattr__(name: str) -> object:
        if name in _HOMES:
            value: object = getattr(_imported(_HOMES[name], name), name)
            globals()[name] = value
            return value
        if name in _MODULES:
            return _imported(f"{__name__}.{name}", name)
        if name == "__version__":
            from ckptcore.installed import version_of  # rarely used

            return version_of(__name__)
        if not name.startswith("_"):
            from ckptcore.distributions import import_name, lazy_names  # only names of other distributions need it

            if name in lazy_names():
                return import_name(name)
        raise _unknown_name(name)


def _imported(module: str, name: str) -> ModuleType:
    """Import the module of a name of this package. Refuse a module whose import a signal handler interrupted."""
    try:
        imported = importlib.import_module(module)
        unfinished = _is_unfinished(imported)
    except ImportError:
        unfinished = any(_is_unfinished(other) for key, other in [*sys.modules.items()] if key.startswith(__name__))
        if not unfinished:
            raise
    if unfinished:
        raise ImportError(
            f"{__name__}.{name}: called by a signal handler that interrupted another call of {__name__}, which imports "
            "modules. Set a flag in the handler, and make the call at the end of the step",
            name=module,
        ) from None
    return imported


def _is_unfinished(module: ModuleType) -> bool:
    return getattr(module.__spec__, "_initializing", False)


def _unknown_name(name: str) -> Exception:
    """Return the error for an unknown name. If another library has the name, the message says what to use instead."""
    from ckptcore.other_libraries import instead_of  # only errors need it

    hint = instead_of(__name__, name)
    # ``from ckptcore import name`` replaces an AttributeError by an ImportError without the hint.
    if hint and sys._getframe(2).f_code.co_name == "_handle_fromlist":
        return ImportError(f"cannot import name {name!r} from {__name__!r}{hint}", name=__name__)
    return AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    from ckptcore.distributions import installed_names

    special = [name for name in globals() if name.startswith("__")]
    return sorted({*special, "__version__", *_HOMES, *_MODULES, *installed_names()})
