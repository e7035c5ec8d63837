"""Data loaders of torchdata: type checks, and detection of samplers whose order is not in the state."""

from __future__ import annotations

import sys
from typing import Any, Final

from torch.utils.data import BatchSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

__all__ = ["is_stateful_loader", "lost_order"]

_WITHOUT_STATE: Final = tuple([kind.__iter__ for kind in (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)])
"""The iterators of the samplers that draw a random order and keep no state.

Subclasses may have others.
"""


def is_stateful_loader(value_type: type) -> bool:
    """Return whether objects of a type are data loaders of torchdata."""
    module = sys.modules.get("torchdata.stateful_dataloader")
    return module is not None and issubclass(value_type, getattr(module, "StatefulDataLoader", ()))


def lost_order(loader: Any) -> str | None:
    """Return the reason why the state of a loader lacks the order of its sampler;

    None if it has it, or if unknown.

    The loader saves the state of its sampler or batch sampler, if that has one. Otherwise a resumed
    loader draws a new order and skips as many indices as were taken. That is the same order only
    with the same generator state: in the first epoch.
    """
    batches = loader.batch_sampler
    sampler = loader.sampler if batches is None else getattr(batches, "sampler", None)
    if getattr(type(sampler), "__iter__", None) in _WITHOUT_STATE and not hasattr(sampler, "state_dict"):
        return f"the sampler, a {type(sampler).__module__}.{type(sampler).__qualname__}, keeps no state,"
    drawn = sys.modules.get("torchdata.stateful_dataloader.sampler")
    if drawn is None or not isinstance(sampler, drawn.RandomSampler):
        return None
    if type(batches) is BatchSampler:  # torchdata's own keeps the state of the sampler
        kind = type(batches)
        return f"the batch sampler, a {kind.__module__}.{kind.__qualname__}, keeps no state of the sampler"
    if loader.generator is sampler.generator:
        return "the sampler draws from the generator"
    return None
