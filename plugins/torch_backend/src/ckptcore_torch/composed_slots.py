"""Tensors of new optimizers that are composed of other tensors, as those of torchao.optim."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from ckptcore.errors import TreeMismatchError
from ckptcore.model import PARTS
from ckptcore_torch.stored_parts import parse_text
from ckptcore_torch.tensor_parts import inner_tensor, is_composed

_SIGNED: Final = "exp_avg"
"""The only slot of torchao's optimizers with negative elements."""


def with_composed_slots(optimizer: torch.optim.Optimizer, parameter: torch.Tensor | None, stored: Any) -> Any:
    """Return the stored state of a parameter, with a tensor of the optimizer in place of each dict of parts.

    An optimizer without a state has no such tensors yet. Those of torchao.optim make them with the options and the
    sharding of the optimizer. The stored type is only compared, and never used to find code.

    Raises:
        TreeMismatchError: if the optimizer has no such tensor, and it is unknown how it makes one.
    """
    if parameter is None or not isinstance(stored, Mapping):
        return stored
    made = {
        name: _slot(optimizer, parameter, name, slot)
        for name, slot in stored.items()
        if isinstance(slot, Mapping) and PARTS in slot
    }
    return {**stored, **made} if made else stored


def _slot(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, name: str, stored: Mapping[str, Any]) -> object:
    kind = str(parse_text(stored[PARTS]).get("type"))
    held = optimizer.state.get(parameter, {}).get(name)
    if not isinstance(held, torch.Tensor):
        make = _maker(optimizer, parameter)
        if make is None and type(inner_tensor(parameter)).__qualname__ == kind:
            return torch.zeros_like(parameter)  # as optimizers make the state of a parameter of that class
        if make is None:
            difference = f"{name} is stored as the parts of a {kind}, and this {type(optimizer).__name__} has none"
            raise TreeMismatchError(
                f"{difference}: create the optimizer that was saved. If it makes this tensor in its first step, make "
                "one step, and load the model and the optimizer then",
                [difference],
            )
        held = make(name)
    if kind.startswith("torch.") or is_composed(inner_tensor(held)):
        return held
    difference = (
        f"{name} is stored as the parts of a {kind}, and the {type(optimizer).__name__} has a plain tensor for a "
        f"parameter of the shape {tuple(parameter.shape)}"
    )
    raise TreeMismatchError(
        f"{difference}, as for shards that are too small or do not have whole blocks: load it on the mesh and with the "
        "options with which it was saved",
        [difference],
    )


def _maker(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> Callable[[str], torch.Tensor] | None:
    """Return the function that creates a tensor of the state by its name; None if the optimizer is not torchao's."""
    make = getattr(optimizer, "_new_buffer", None)
    of_torchao = any(kind.__module__.startswith("torchao.") for kind in type(optimizer).__mro__)
    return (lambda name: make(parameter, name == _SIGNED)) if of_torchao and callable(make) else None
