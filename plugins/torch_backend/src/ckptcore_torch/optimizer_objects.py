"""Objects and composed tensors in the states of optimizers, such as projectors of GaLore, saved as their attributes.

A load creates the object again. The class of the object must be a plain class of the optimizer's library, and must be
in the module of the optimizer. A load never imports a class that a checkpoint names, and calls none of its methods.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from ckptcore.errors import TreeMismatchError
from ckptcore.handlers import state_to_load
from ckptcore.model import PARTS, AbstractArray, Attribute, StoredObject
from ckptcore.protocols import ContainerHandler, Flattened, Priority
from ckptcore_torch.abstracts import abstract_tensor
from ckptcore_torch.stored_parts import parse_text
from ckptcore_torch.tensor_parts import inner_tensor, is_composed

_SIGNED: Final = "exp_avg"
"""The only slot of torchao's optimizers with negative elements."""


def with_composed_slots(optimizer: torch.optim.Optimizer, parameter: torch.Tensor | None, stored: Any) -> Any:
    """Return the stored state of a parameter, with a tensor of the optimizer in place of each dict of parts.

    An optimizer without a state has no such tensors yet. The optimizers of torchao.optim then
    create them with their own options and sharding. The stored type is only compared, and never
    used to find code.

    Raises:
        TreeMismatchError: if the optimizer has no such tensor, and this module does not know how to
            create it.
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
            return torch.zeros_like(parameter)  # optimizers create the state of such parameters in the same way
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
    """Return a function that creates a state tensor by its name. Return None if the optimizer is not torchao's."""
    make = getattr(optimizer, "_new_buffer", None)
    of_torchao = any(kind.__module__.startswith("torchao.") for kind in type(optimizer).__mro__)
    return (lambda name: make(parameter, name == _SIGNED)) if of_torchao and callable(make) else None


_CONTAINERS: Final = (dict, list, tuple)
_ATOMS: Final = frozenset((torch.Tensor, torch.nn.Parameter, AbstractArray, bool, int, float, str, type(None)))
"""Types of nearly all values in states of optimizers. Their values never need an `OptimizerObject`."""


class OptimizerObject:
    """An object in the state of an optimizer, as a container of its attributes."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        """Wrap an object of Python with a ``__dict__``."""
        self.value = value


class OptimizerObjectHandler(ContainerHandler):
    """Container handler of `OptimizerObject`."""

    priority = Priority.EXACT

    def flatten(self, value: OptimizerObject) -> Flattened:
        """Return the attributes."""
        held = vars(value.value)
        return Flattened("object", tuple(map(Attribute, held)), tuple(held.values()), _name_of(type(value.value)))

    def unflatten(self, like: OptimizerObject, children: Sequence[object]) -> object:
        """Return a new object of the same class with other attributes."""
        return OptimizerObject(_new(type(like.value), dict(zip(vars(like.value), children, strict=True))))


def wrapped_objects(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict with its objects wrapped, and without options that are functions.

    A load does not change options that are not stored, so an optimizer keeps its functions.
    """
    result = {key: _wrapped(optimizer, value) for key, value in state.items()}
    groups = state.get("param_groups")
    if isinstance(groups, list):
        result["param_groups"] = [
            {name: option for name, option in group.items() if not _is_function(option)}
            if isinstance(group, dict)
            else group
            for group in groups
        ]
    return result


def with_objects(state: Any) -> Any:
    """Return a loaded state dict in which the wrapped objects are unwrapped."""
    if isinstance(state, OptimizerObject):
        return state.value
    return _mapped(state, with_objects)


def objects_to_load(optimizer: torch.optim.Optimizer, stored: Any) -> Any:
    """Return the stored state of a parameter, with a request for each object in it.

    Raises:
        TreeMismatchError: if the class of an object is not in the module of the optimizer.
    """
    if isinstance(stored, StoredObject):
        known = _class_of(optimizer, stored.type)
        if known is None:
            difference = f"the stored state has a {stored.type}, which the module of {type(optimizer).__name__} lacks"
            raise TreeMismatchError(
                f"{difference}. Load it into an optimizer of the class that was saved, or use PLACEHOLDER in the place "
                "of the optimizer to start with a new state",
                [difference],
            )
        return OptimizerObject(_new(known, state_to_load({}, dict(stored), array=abstract_tensor)))
    return _mapped(stored, lambda child: objects_to_load(optimizer, child))


def _wrapped(optimizer: torch.optim.Optimizer, value: Any) -> Any:
    if type(value) in _ATOMS:
        return value
    if (
        type(value) not in _CONTAINERS
        and _class_of(optimizer, _name_of(type(value))) is type(value)
        and hasattr(value, "__dict__")
    ):
        return OptimizerObject(value)
    return _mapped(value, lambda child: _wrapped(optimizer, child))


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of a dict, list or tuple with changed children. Return the same container if no child changed."""
    if type(value) is dict:
        changed = {
            key: new
            for key, child in value.items()
            if type(child) not in _ATOMS and (new := change(child)) is not child
        }
        return {**value, **changed} if changed else value
    if type(value) in (list, tuple):
        if _ATOMS.issuperset(map(type, value)):
            return value
        items = type(value)(map(change, value))
        return items if any(item is not other for item, other in zip(items, value, strict=True)) else value
    return value


def _class_of(optimizer: torch.optim.Optimizer, name: str | None) -> type | None:
    """Return the class with a qualified name if it is in a module of the optimizer's classes, and None otherwise."""
    if name is None:
        return None
    for kind in type(optimizer).__mro__:
        if kind is torch.optim.Optimizer:
            return None
        member = getattr(sys.modules.get(kind.__module__), name.rpartition(".")[2], None)
        if isinstance(member, type) and _name_of(member) == name and _is_of(kind, member):
            return member
    return None


def _is_of(optimizer: type, kind: type) -> bool:
    """Return True for a plain class of the optimizer's library. Its objects can be created without running its code."""
    same_library = kind.__module__.partition(".")[0] == optimizer.__module__.partition(".")[0]
    makes: object = kind.__new__
    return same_library and makes is object.__new__ and not hasattr(kind, "__del__")


def _new(kind: type, attributes: Mapping[str, Any]) -> Any:
    value: Any = object.__new__(kind)
    vars(value).update(attributes)
    return value


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_function(option: object) -> bool:
    return callable(option) and not isinstance(option, torch.Tensor | type)
