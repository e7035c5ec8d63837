"""Handlers of schedulers, gradient scalers, data loaders and random generators, and the handler for each type."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils.data import BatchSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from ckptcore import handlers
from ckptcore.events import logger_named
from ckptcore.handlers import state_to_load
from ckptcore.protocols import CheckpointableHandler, Priority
from ckptcore_torch.abstracts import abstract_tensor
from ckptcore_torch.modules import ModuleHandler
from ckptcore_torch.named_optimizers import (
    NamedOptimizer,
    NamedOptimizerHandler,
    NamedOptimizerPart,
    NamedOptimizerPartHandler,
)
from ckptcore_torch.optimizers import OptimizerHandler

logger = logger_named("ckptcore.torch")


_WITHOUT_STATE: Final = tuple([kind.__iter__ for kind in (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)])
"""``__iter__`` of samplers that draw a random order without saving their state. Subclasses may override it."""


class StateDictHandler(handlers.StateDictHandler):
    """Handler of learning rate schedulers and gradient scalers, whose state is equal on all processes.

    A stored array that the state of the object lacks is loaded as a tensor, even if the checkpoint
    does not record it as one.
    """

    priority = Priority.FRAMEWORK
    per_process = False

    def flatten_to_load(self, value: Any, stored: object) -> object:
        """Return a request with the stored structure and the leaf types of the object's state."""
        return state_to_load(value.state_dict(), stored, array=abstract_tensor)


class DataLoaderHandler(StateDictHandler):
    """Handler of `StatefulDataLoader` of torchdata. Each process saves its own state.

    A save logs a warning if the state lacks the order of a random sampler, because a resumed run
    would get different batches.
    """

    per_process = True

    def flatten(self, value: Any) -> object:
        """Return the state dict."""
        reason = _lost_order(value)
        if reason is not None:
            logger.warning(
                "%s: %s, so a resumed run gets other batches than an uninterrupted one. Pass "
                "sampler=torchdata.stateful_dataloader.sampler.RandomSampler(dataset, "
                "generator=torch.Generator()), with a separate generator",
                type(value).__qualname__,
                reason,
            )
        return super().flatten(value)


class GeneratorHandler(CheckpointableHandler):
    """Handler of `torch.Generator`. Each process saves its own state."""

    priority = Priority.FRAMEWORK
    per_process = True

    def flatten(self, value: torch.Generator) -> object:
        """Return the state in a dict, as a tensor of bytes. The tensor is a copy."""
        return {"state": value.get_state()}

    def unflatten(self, like: torch.Generator, state: object) -> object:
        """Return the state."""
        return state

    def restore(self, target: torch.Generator, state: Any) -> None:
        """Set the state."""
        target.set_state(state["state"])

    def undo(self, target: torch.Generator) -> Callable[[], None]:
        """Return a function that restores the current state."""
        state = self.flatten(target)
        return lambda: self.restore(target, state)


_MODULES: Final = ModuleHandler()
_OPTIMIZERS: Final = OptimizerHandler()
_NAMED_OPTIMIZERS: Final = NamedOptimizerHandler()
_NAMED_OPTIMIZER_PARTS: Final = NamedOptimizerPartHandler()
_STATE_DICTS: Final = StateDictHandler()
_GENERATORS: Final = GeneratorHandler()
_DATA_LOADERS: Final = DataLoaderHandler()


def checkpointable_handler_of_type(value_type: type) -> CheckpointableHandler | None:
    """Return the handler for a type, or None for types that are not PyTorch's, and for Keras models."""
    if issubclass(value_type, torch.nn.Module):
        # A Keras model is saved by its state tree, which contains its optimizer; its state dict
        # does not.
        return None if hasattr(value_type, "set_state_tree") and hasattr(value_type, "get_state_tree") else _MODULES
    if issubclass(value_type, torch.optim.Optimizer):
        # A program with such an optimizer has already imported the module, so do not import it
        # here.
        zero = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
        if zero is not None and issubclass(value_type, zero.ZeroRedundancyOptimizer):
            from ckptcore_torch.zero_optimizers import ZeroOptimizerHandler  # imports torch.distributed.optim

            return ZeroOptimizerHandler()
        return _OPTIMIZERS
    if issubclass(value_type, NamedOptimizerPart):
        return _NAMED_OPTIMIZER_PARTS
    if issubclass(value_type, NamedOptimizer):
        return _NAMED_OPTIMIZERS
    if issubclass(value_type, torch.optim.lr_scheduler.LRScheduler | torch.amp.GradScaler):
        return _STATE_DICTS
    if issubclass(value_type, torch.Generator):
        return _GENERATORS
    if _is_stateful_loader(value_type):
        return _DATA_LOADERS
    return None


def _is_stateful_loader(value_type: type) -> bool:
    """Return True if objects of a type are data loaders of torchdata."""
    module = sys.modules.get("torchdata.stateful_dataloader")
    return module is not None and issubclass(value_type, getattr(module, "StatefulDataLoader", ()))


def _lost_order(loader: Any) -> str | None:
    """Return the reason why a loader's state lacks its sampler's order.

    Return None if it has the order, or if this is unknown.

    The loader saves the state of its sampler or batch sampler if the sampler has a state. Otherwise
    a resumed loader draws a new order and skips the indices that were already used. The new order
    is the same only if the generator has the same state, which is the case only in the first epoch.
    """
    batches = loader.batch_sampler
    sampler = loader.sampler if batches is None else getattr(batches, "sampler", None)
    if getattr(type(sampler), "__iter__", None) in _WITHOUT_STATE and not hasattr(sampler, "state_dict"):
        return f"its sampler, a {type(sampler).__module__}.{type(sampler).__qualname__}, does not save its state"
    drawn = sys.modules.get("torchdata.stateful_dataloader.sampler")
    if drawn is None or not isinstance(sampler, drawn.RandomSampler):
        return None
    if type(batches) is BatchSampler:  # torchdata's own class saves the state of the sampler
        kind = type(batches)
        return f"its batch sampler, a {kind.__module__}.{kind.__qualname__}, does not save the state of the sampler"
    if loader.generator is sampler.generator:
        return "its sampler draws from the generator of the loader"
    return None
