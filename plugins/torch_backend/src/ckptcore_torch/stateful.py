"""Handlers of schedulers, gradient scalers, data loaders and random generators, and handlers by type."""

from __future__ import annotations

import logging
from typing import Any, Final

import torch

from ckptcore.handlers import state_to_load
from ckptcore.protocols import CheckpointableHandler, Priority
from ckptcore_torch.abstracts import abstract_tensor
from ckptcore_torch.data_loaders import is_stateful_loader, lost_order
from ckptcore_torch.modules import ModuleHandler
from ckptcore_torch.named_optimizers import (
    NamedOptimizer,
    NamedOptimizerHandler,
    NamedOptimizerPart,
    NamedOptimizerPartHandler,
)
from ckptcore_torch.optimizers import OptimizerHandler

__all__ = ["DataLoaderHandler", "GeneratorHandler", "StateDictHandler", "handler_of_type"]

logger = logging.getLogger("ckptcore.torch")


class StateDictHandler(CheckpointableHandler):
    """Handler of objects with `state_dict` and `load_state_dict`: learning rate schedulers, gradient scalers.

    A loaded state has the stored structure, because a state can grow, and have None before the
    first step.
    """

    priority = Priority.FRAMEWORK

    def flatten(self, value: Any) -> object:
        """Return the state dict."""
        return value.state_dict()

    def flatten_to_load(self, value: Any, stored: object) -> object:
        """Return the stored state with the types in `value`, and tensors for other arrays."""
        return state_to_load(value.state_dict(), stored, array=abstract_tensor)

    def unflatten(self, like: Any, state: object) -> object:
        """Return the state dict, for ``like.load_state_dict``."""
        return state

    def restore(self, target: Any, state: object) -> None:
        """Load the state dict."""
        target.load_state_dict(state)


class DataLoaderHandler(StateDictHandler):
    """Handler of `StatefulDataLoader` of torchdata. Each process saves its own state.

    Logs a warning if the state lacks the order of a random sampler, because a resumed run would get
    other batches.
    """

    per_process = True

    def flatten(self, value: Any) -> object:
        """Return the state dict."""
        reason = lost_order(value)
        if reason is not None:
            logger.warning(
                "a resumed run will get other batches than an uninterrupted one: %s of this "
                "%s. Give it "
                "sampler=torchdata.stateful_dataloader.sampler.RandomSampler(dataset, "
                "generator=torch.Generator()), with a separate generator",
                reason,
                type(value).__qualname__,
            )
        return super().flatten(value)


class GeneratorHandler(CheckpointableHandler):
    """Handler of `torch.Generator`. Each process saves its own state."""

    priority = Priority.FRAMEWORK
    per_process = True

    def flatten(self, value: torch.Generator) -> object:
        """Return the state as a copied tensor of bytes."""
        return {"state": value.get_state()}

    def unflatten(self, like: torch.Generator, state: object) -> object:
        """Return the state."""
        return state

    def restore(self, target: torch.Generator, state: Any) -> None:
        """Set the state."""
        target.set_state(state["state"])


_MODULES: Final = ModuleHandler()
_OPTIMIZERS: Final = OptimizerHandler()
_NAMED_OPTIMIZERS: Final = NamedOptimizerHandler()
_NAMED_OPTIMIZER_PARTS: Final = NamedOptimizerPartHandler()
_STATE_DICTS: Final = StateDictHandler()
_GENERATORS: Final = GeneratorHandler()
_DATA_LOADERS: Final = DataLoaderHandler()


def handler_of_type(value_type: type) -> CheckpointableHandler | None:
    """Return the handler for a type, or None for types that are not PyTorch's."""
    if issubclass(value_type, torch.nn.Module):
        # A Keras model contains its optimizer, which its state tree has but its state dict lacks.
        return None if hasattr(value_type, "set_state_tree") and hasattr(value_type, "get_state_tree") else _MODULES
    if issubclass(value_type, torch.optim.Optimizer):
        return _OPTIMIZERS
    if issubclass(value_type, NamedOptimizerPart):
        return _NAMED_OPTIMIZER_PARTS
    if issubclass(value_type, NamedOptimizer):
        return _NAMED_OPTIMIZERS
    if issubclass(value_type, torch.optim.lr_scheduler.LRScheduler | torch.amp.GradScaler):
        return _STATE_DICTS
    if issubclass(value_type, torch.Generator):
        return _GENERATORS
    if is_stateful_loader(value_type):
        return _DATA_LOADERS
    return None
