"""Handlers to choose by hand, where an object has the methods of several: ``Context(handlers={type: handler})``."""

from __future__ import annotations

from ckptcore.builtin.files import SavesToDirectoryAsyncHandler, SavesToDirectoryHandler
from ckptcore.builtin.random_states import NumpyGeneratorHandler, NumpyRandomStateHandler, PythonRandomHandler
from ckptcore.builtin.stateful import GetStateHandler, StateDictHandler, StateTreeHandler

__all__ = [
    "GetStateHandler",
    "NumpyGeneratorHandler",
    "NumpyRandomStateHandler",
    "PythonRandomHandler",
    "SavesToDirectoryAsyncHandler",
    "SavesToDirectoryHandler",
    "StateDictHandler",
    "StateTreeHandler",
]
