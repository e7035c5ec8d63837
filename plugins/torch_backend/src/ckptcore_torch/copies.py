"""Copies of modules and optimizers, to restore their earlier states if a load fails early."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch

from ckptcore.handlers import undo_by
from ckptcore_torch.tensors import is_uninitialized, overlaps_itself


class ModuleCopy:
    """The parameters, buffers and extra states of a module."""

    def __init__(self, module: torch.nn.Module) -> None:
        """Copy the parameters, buffers and extra states. Shared tensors are copied once."""
        self._parts = [(part, dict(part._parameters), dict(part._buffers)) for part in module.modules()]
        self._attributes = [(part, _plain_attributes(part)) for part in module.modules() if _is_foreign(part)]
        self._values = _copies(
            _tensors([held for _, *all_held in (*self._parts, *self._attributes) for held in all_held])
        )
        self._extra = [
            undo_by(part.get_extra_state, part.set_extra_state)
            for part in module.modules()
            if type(part).get_extra_state is not torch.nn.Module.get_extra_state
        ]

    def restore(self) -> None:
        """Restore the copied values in the same objects."""
        for part, parameters, buffers in self._parts:
            part._parameters.update(parameters)
            part._buffers.update(buffers)
        for part, attributes in self._attributes:
            part.__dict__.update(attributes)
        for put_back in (*self._values, *self._extra):
            put_back()


class OptimizerCopy:
    """The groups of an optimizer, and the states of its parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy the groups and states."""
        self._optimizer = optimizer
        self._groups = [dict(group) for group in optimizer.param_groups]
        self._state = {key: _without_sharing(slots) for key, slots in optimizer.state.items()}
        held = [self._state, [_options(group) for group in self._groups]]
        self._values = _copies(_tensors(held))
        # A wrapper of another library has attributes of its own, one of which is the inner optimizer.
        self._attributes = _plain_attributes(optimizer)
        inner = [value for value in vars(optimizer).values() if isinstance(value, torch.optim.Optimizer)]
        self._inner = [OptimizerCopy(value) for value in inner]

    def restore(self) -> None:
        """Restore the copied values in the same tensors."""
        for inner in self._inner:
            inner.restore()
        self._optimizer.__dict__.update(self._attributes)
        for group, options in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.clear()
            group.update(options)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
        for put_back in self._values:
            put_back()


_OF_PYTORCH: Final = frozenset(vars(torch.nn.Module())) | {"state", "param_groups", "defaults"}
"""Attributes of PyTorch, which hold tensors, modules and hooks.

`_plain_attributes` skips them, because other code copies or keeps them.
"""


def _is_foreign(part: torch.nn.Module) -> bool:
    """Return True if a module is not PyTorch's. The loader of such a module may set any attribute."""
    return not type(part).__module__.startswith("torch.")


def _plain_attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, with copies of its lists, tuples and dicts."""
    return {name: _without_sharing(held) for name, held in vars(value).items() if name not in _OF_PYTORCH}


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group without its parameters, which an optimizer does not restore."""
    return {name: option for name, option in group.items() if name != "params"}


def _without_sharing(state: Any) -> Any:
    """Return new containers with the same values."""
    if type(state) is dict:
        return {key: _without_sharing(child) for key, child in state.items()}
    if type(state) in (list, tuple):
        return type(state)(map(_without_sharing, state))
    return state


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for child in value.values():
            yield from _tensors(child)
    elif isinstance(value, list | tuple):
        for child in value:
            yield from _tensors(child)


def _copies(tensors: Any) -> list[Callable[[], None]]:
    """Return functions that restore the current elements of tensors."""
    return [_copy(tensor) for tensor in {id(tensor): tensor for tensor in tensors}.values()]


def _copy(tensor: torch.Tensor) -> Callable[[], None]:
    """Return a function that restores the current elements of a tensor, even if the tensor has other memory by then."""
    if is_uninitialized(tensor) or tensor.is_meta or overlaps_itself(tensor):  # no load fills these
        return lambda: None
    data, elements, attributes = tensor.data, tensor.detach().clone(), dict(tensor.__dict__)

    def put_back() -> None:
        tensor.data = data
        with torch.no_grad():
            data.copy_(elements)
        tensor.__dict__.update(attributes)

    return put_back
