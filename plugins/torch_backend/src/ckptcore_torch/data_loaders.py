"""The checkpointable handler of `torchdata.stateful_dataloader.StatefulDataLoader`."""

from __future__ import annotations

import logging
import sys
from typing import Any, Final

from torch.utils.data import BatchSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from ckptcore.handlers import state_to_load
from ckptcore.protocols import Priority
from ckptcore_torch.abstracts import abstract_tensor

__all__ = ["DataLoaderHandler", "is_stateful_loader"]

logger = logging.getLogger("ckptcore.torch")

_WITHOUT_STATE: Final = tuple([kind.__iter__ for kind in (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)])
"""The iterators of the samplers that draw a random order and keep no state. Subclasses may have others."""


class DataLoaderHandler:
    """`StatefulDataLoader` of torchdata: its state dict. Each process has a state of its own.

    Logs a warning if the state does not have the order of a random sampler: a run that resumes gets other batches then.
    """

    priority = Priority.FRAMEWORK
    per_process = True

    def flatten(self, value: Any) -> object:
        """The state dict."""
        reason = _forgets_the_order(value)
        if reason is not None:
            logger.warning(
                "a run that resumes gets other batches than one that goes on: %s of this %s. Give it "
                "sampler=torchdata.stateful_dataloader.sampler.RandomSampler(dataset, generator=torch.Generator()) and a generator of its own",
                reason,
                type(value).__qualname__,
            )
        return value.state_dict()

    def flatten_to_load(self, value: Any, stored: object) -> object:
        """What is stored, with the types of what `value` has at the same places, and tensors where it has nothing."""
        return state_to_load(value.state_dict(), stored, array=abstract_tensor)

    def unflatten(self, like: Any, state: object) -> object:
        """The state dict itself, for ``like.load_state_dict``."""
        return state

    def restore(self, target: Any, state: object) -> None:
        """Load the state dict."""
        target.load_state_dict(state)


def is_stateful_loader(value_type: type) -> bool:
    """Whether objects of a type are data loaders of torchdata."""
    module = sys.modules.get("torchdata.stateful_dataloader")
    return module is not None and issubclass(value_type, getattr(module, "StatefulDataLoader", ()))


def _forgets_the_order(loader: Any) -> str | None:
    """Why the state of a loader does not have the order that its sampler draws; None if it has it, or if that is not known.

    The loader keeps the state of what it asks for indices, if that has one. Otherwise it draws a new order and skips as many
    indices as were taken. That is the same order only if the generator is as it was before, which is so in the first epoch.
    """
    batches = loader.batch_sampler
    sampler = loader.sampler if batches is None else getattr(batches, "sampler", None)
    if getattr(type(sampler), "__iter__", None) in _WITHOUT_STATE and not hasattr(sampler, "state_dict"):
        return f"the sampler, a {type(sampler).__module__}.{type(sampler).__qualname__}, keeps no state,"
    drawn = sys.modules.get("torchdata.stateful_dataloader.sampler")
    if drawn is None or not isinstance(sampler, drawn.RandomSampler):
        return None
    if type(batches) is BatchSampler:  # that of torchdata keeps the state of the sampler
        return f"the batch sampler, a {type(batches).__module__}.{type(batches).__qualname__}, keeps no state of the sampler"
    if loader.generator is sampler.generator:
        return "the sampler draws from the generator"
    return None
