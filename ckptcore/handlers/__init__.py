"""Handlers to choose explicitly: ``Context(plugins=PluginOptions(handlers={type: handler}))``.

Choose one if an object has the methods of several handlers. Custom handlers can use `state_to_load`, and
`ValueFormHandler` for values that are stored as text or a number.
"""

from __future__ import annotations

from ckptcore.builtin.files import SavesToDirectoryHandler
from ckptcore.builtin.host_leaves import ValueForm, ValueFormHandler
from ckptcore.builtin.stateful import (
    GetStateHandler,
    NumpyGeneratorHandler,
    NumpyRandomStateHandler,
    PythonRandomHandler,
    StateDictHandler,
    StateTreeHandler,
    state_to_load,
    undo_by,
)

__all__ = [
    "GetStateHandler",
    "NumpyGeneratorHandler",
    "NumpyRandomStateHandler",
    "PythonRandomHandler",
    "SavesToDirectoryHandler",
    "StateDictHandler",
    "StateTreeHandler",
    "ValueForm",
    "ValueFormHandler",
    "state_to_load",
    "undo_by",
]
