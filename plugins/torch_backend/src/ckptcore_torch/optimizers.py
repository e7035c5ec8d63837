"""The checkpointable handler of optimizers as they number their parameters: `torch.optim.Optimizer`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch

from ckptcore.errors import TreeMismatchError
from ckptcore.handlers import state_to_load
from ckptcore.model import AbstractArray
from ckptcore.protocols import Priority
from ckptcore_torch.abstracts import abstract_beside, abstract_tensor
from ckptcore_torch.tensors import same_memory

__all__ = [
    "OptimizerHandler",
    "numbered_parameters",
    "numbers_parameters",
    "options_to_load",
    "parameter_keys",
    "slots_to_load",
]


class OptimizerHandler:
    """`torch.optim.Optimizer`: its state dict, which numbers the parameters.

    ``load(location, optimizer)`` gives a state dict; ``load_into`` fills the optimizer, also a new one that made no step
    and has no state yet, and takes the state from one that was saved without. Nothing is cast: moments of float32 stay so,
    also where the parameters are of bfloat16. State of a DTensor, of its shape, is a DTensor with its placements.

    An optimizer may have a state dict of another form: one that torch.distributed.checkpoint has patched names the
    parameters, and a container of optimizers has the states of several. Such a state is saved as it is, and a load
    passes it to the ``load_state_dict`` of the optimizer.
    """

    priority = Priority.FRAMEWORK

    def flatten(self, value: torch.optim.Optimizer) -> object:
        """The state dict; its tensors are the optimizer's own."""
        return value.state_dict()

    def flatten_to_load(self, value: torch.optim.Optimizer, stored: object) -> object:
        """The state dict, with the state of each parameter as it is stored, and the options that are not there yet.

        Raises:
            TreeMismatchError: if the stored state names the parameters and the optimizer numbers them, or the reverse.
        """
        state = value.state_dict()
        if not isinstance(stored, Mapping):
            return state
        if not numbers_parameters(state):
            _refuse_numbers(value, stored)
            return state_to_load(state, stored, array=abstract_tensor)
        stored_groups = stored.get("param_groups")
        if not isinstance(stored_groups, list | tuple):
            stored_groups = ()  # of no optimizer; the core says what is missing
        _refuse_names(value, stored_groups)
        parameters = {number: parameter for parameter, number in numbered_parameters(value, state).items()}
        stored_state = stored.get("state")
        if isinstance(stored_state, Mapping):
            by_number = {_number_of(key, parameters): slots for key, slots in stored_state.items()}
            state["state"] = {
                number: slots_to_load(state["state"].get(number), slots, _beside(parameters.get(number)))
                for number, slots in by_number.items()
                if number in parameters or not isinstance(number, int)  # what is no parameter's has a name
            }
        for group, stored_group in zip(state["param_groups"], stored_groups, strict=False):
            if isinstance(stored_group, Mapping):
                group.update(options_to_load(group, stored_group))
        return state

    def unflatten(self, like: torch.optim.Optimizer, state: object) -> object:
        """The state dict itself, for ``like.load_state_dict``."""
        return state

    def restore(self, target: torch.optim.Optimizer, state: Any) -> None:
        """Load the state dict. The state keeps the dtypes in which it was saved; tensors that were filled in place stay.

        Left to itself, an optimizer casts its state to the dtypes of the parameters and copies its tensor options.
        """
        if not numbers_parameters(state):
            target.load_state_dict(state)
            return
        filled = [
            (parameter, name, held)
            for parameter, slots in target.state.items()
            if isinstance(slots, dict)
            for name, held in slots.items()
            if isinstance(held, torch.Tensor)
        ]
        options = [
            (number, name, held)
            for number, group in enumerate(target.param_groups)
            for name, held in group.items()
            if isinstance(held, torch.Tensor)
        ]
        numbers = numbered_parameters(target, state)
        target.load_state_dict(state)
        for parameter, slots in target.state.items():
            loaded = state["state"].get(numbers.get(parameter, parameter))
            if isinstance(slots, dict) and isinstance(loaded, dict):
                slots.update({name: _uncast(held, loaded.get(name)) for name, held in slots.items()})
        for parameter, name, held in filled:
            loaded = state["state"].get(numbers.get(parameter, parameter))
            if isinstance(loaded, dict) and same_memory(held, loaded.get(name)):
                target.state[parameter][name] = held
        for number, name, held in options:
            if same_memory(held, state["param_groups"][number].get(name)):
                target.param_groups[number][name] = held


def numbered_parameters(optimizer: torch.optim.Optimizer, state: Any) -> dict[Any, Any]:
    """For each parameter its number in a state dict."""
    return {
        parameter: number
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=False)
        for parameter, number in zip(group["params"], saved["params"], strict=False)
    }


def slots_to_load(own: Any, stored: Any, array: Callable[[AbstractArray], object]) -> Any:
    """What to ask for as the state of one parameter: as it is stored, into tensors of `own` where these can be filled.

    Args:
        own: its state now; None without one.
        stored: its state, with `AbstractArray` for arrays.
        array: makes the abstract tensor for what `own` has not.
    """
    held = {name: slot for name, slot in own.items() if isinstance(slot, torch.Tensor)} if isinstance(own, dict) else {}
    # Without its tensors: not all of them can make others like themselves, and what they made would lie anywhere.
    others = {name: slot for name, slot in own.items() if name not in held} if held else own
    asked = state_to_load(others, stored, array=array)
    if isinstance(asked, dict):
        for name, tensor in held.items():
            other = asked.get(name)
            if isinstance(other, torch.Tensor) and (tensor.shape, tensor.dtype) == (other.shape, other.dtype):
                asked[name] = tensor
    return asked


def options_to_load(own: Mapping[str, object], stored: Mapping[str, object]) -> dict[str, Any]:
    """What to ask for as the options of a group: as they are stored, into tensors of `own` where these can be filled."""
    options = {name: option for name, option in stored.items() if name != "params"}
    found: dict[str, Any] = slots_to_load(dict(own), options, abstract_tensor)
    return found


def parameter_keys(stored_groups: object) -> Iterator[object]:
    """The numbers or names by which stored groups know their parameters; of what has not the form of a group, none."""
    if isinstance(stored_groups, list | tuple):
        for group in stored_groups:
            keys = group.get("params") if isinstance(group, Mapping) else None
            if isinstance(keys, list | tuple):
                yield from keys


def numbers_parameters(state: Any) -> bool:
    """Return whether a state dict has the form that `torch.optim.Optimizer.state_dict` gives."""
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        return False
    groups = state.get("param_groups")
    return isinstance(groups, list) and all(isinstance(key, int) for key in parameter_keys(groups))


def _refuse_numbers(optimizer: torch.optim.Optimizer, stored: Mapping[Any, Any]) -> None:
    """Refuse a stored state that numbers the parameters, for an optimizer whose state dict has another form."""
    if not numbers_parameters(stored):
        return
    difference = (
        f"the stored state numbers the parameters, and the state dict of this {type(optimizer).__name__} does not"
    )
    raise TreeMismatchError(
        f"{difference}; load into the optimizer before torch.distributed.checkpoint patches it, or into an optimizer "
        "that numbers its parameters",
        [difference],
    )


def _refuse_names(optimizer: torch.optim.Optimizer, stored_groups: object) -> None:
    first = next((key for key in parameter_keys(stored_groups) if isinstance(key, str)), None)
    if first is None:
        return
    difference = f"the stored state is by the names of parameters ({first!r}), and the optimizer only numbers them"
    raise TreeMismatchError(
        f"{difference}; load into ckptcore_torch.named_optimizers.NamedOptimizer(model, optimizer), with the "
        f"{type(optimizer).__name__} as the optimizer",
        [difference],
    )


def _beside(parameter: torch.Tensor | None) -> Callable[[AbstractArray], object]:
    """Makes abstract tensors for the state of a parameter; for a state that is no parameter's, plain ones."""
    return abstract_tensor if parameter is None else functools.partial(abstract_beside, parameter)


def _number_of(key: object, numbers: Collection[int]) -> Any:
    """The number of a parameter, also from a checkpoint whose format knows keys of text only; any other key as it is."""
    if isinstance(key, str) and key.isascii() and key.isdecimal() and str(int(key)) == key and int(key) in numbers:
        return int(key)
    return key


def _uncast(held: Any, given: Any) -> Any:
    """What was loaded into an optimizer, with every tensor in the dtype in which it was given."""
    if isinstance(held, torch.Tensor) and isinstance(given, torch.Tensor):
        return held if held.dtype == given.dtype else given.to(held.device)
    if isinstance(held, dict) and isinstance(given, dict):
        held.update({name: _uncast(child, given.get(name)) for name, child in held.items()})
    elif type(held) in (list, tuple) and type(given) is type(held) and len(given) == len(held):
        return type(held)([_uncast(child, its) for child, its in zip(held, given, strict=True)])
    return held
