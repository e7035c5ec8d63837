"""Checkpointable handler of `torch.optim.Optimizer`, whose state dict numbers the parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

import torch

from ckptcore.errors import TreeMismatchError
from ckptcore.handlers import state_to_load
from ckptcore.model import PLAIN_ARRAY, AbstractArray
from ckptcore.protocols import CheckpointableHandler, Priority
from ckptcore_torch.abstracts import abstract_state_like, abstract_tensor
from ckptcore_torch.conversions import encoding_of
from ckptcore_torch.copies import OptimizerCopy
from ckptcore_torch.optimizer_classes import has_parameter_names, in_order_of, refuse_other_class, refuse_unmigrated
from ckptcore_torch.optimizer_objects import (
    OptimizerObject,
    objects_to_load,
    with_composed_slots,
    with_objects,
    wrapped_objects,
)
from ckptcore_torch.tensors import same_memory


class OptimizerHandler(CheckpointableHandler):
    """Handler of `torch.optim.Optimizer`: its state dict, which numbers the parameters.

    ``load(location, optimizer)`` returns a state dict. ``load_into`` fills the optimizer, which can
    be new and without state. If no state was saved, it removes the optimizer's state. The state is
    not cast: float32 moments stay float32, even for bfloat16 parameters. If a parameter is a
    DTensor, its state tensors of the same shape are DTensors with the same placements.

    If the checkpoint and the optimizer have ``param_names``, parameters are matched by name,
    otherwise by position. Options that are not stored keep their values.

    A state dict can also have another form. If torch.distributed.checkpoint has patched an
    optimizer, its state dict names the parameters. The state dict of a container of optimizers has
    several states. Such a state is saved unchanged, and a load passes it to the optimizer's
    ``load_state_dict``.
    """

    priority = Priority.FRAMEWORK

    def flatten(self, value: torch.optim.Optimizer) -> object:
        """Return the state dict. Its tensors are the optimizer's own."""
        return wrapped_objects(value, value.state_dict())

    def flatten_to_load(self, value: torch.optim.Optimizer, stored: object) -> object:
        """Return the request: the state dict with all stored options and the stored structure of all states.

        Raises:
            TreeMismatchError: if the stored state names the parameters and the optimizer numbers
                them, or the reverse; if ``param_names`` differ; if parameters are on the meta
                device; or if another class of optimizer saved the state, see `refuse_other_class`.
        """
        refuse_meta(value)
        state = wrapped_objects(value, value.state_dict())
        if not isinstance(stored, Mapping):
            return state
        if not numbers_parameters(state):
            _refuse_numbers(value, stored)
            return state_to_load(state, stored, array=abstract_tensor)
        stored_groups = stored.get("param_groups")
        if not isinstance(stored_groups, list | tuple):
            stored_groups = ()  # not the state of an optimizer: the core reports the differences
        _refuse_names(value, stored_groups)
        _refuse_other_sizes(value, state["param_groups"], stored_groups)
        parameters = {number: parameter for parameter, number in numbered_parameters(value, state).items()}
        if has_parameter_names(stored_groups) and has_parameter_names(state["param_groups"]):
            groups = in_order_of(state["param_groups"], stored_groups, type(value).__name__)
            numbers = dict(zip(parameter_keys(groups), parameter_keys(stored_groups), strict=True))
            parameters = {numbers[number]: parameter for number, parameter in parameters.items()}
            state["state"] = {numbers.get(number, number): slots for number, slots in state["state"].items()}
            state["param_groups"] = [
                {**group, "params": stored_group["params"]}
                for group, stored_group in zip(groups, stored_groups, strict=True)
            ]
        stored_state = stored.get("state")
        stored_states = stored_state.values() if isinstance(stored_state, Mapping) else ()
        refuse_other_class(value, state["state"].values(), stored_groups, stored_states)
        if isinstance(stored_state, Mapping):
            by_number = {_number_of(key, parameters): slots for key, slots in stored_state.items()}
            state["state"] = {
                number: slots_to_load(
                    state["state"].get(number),
                    with_parameter_shapes(value, parameters.get(number), slots),
                    _state_factory(parameters.get(number)),
                )
                for number, slots in by_number.items()
                if number in parameters or not isinstance(number, int)  # a state of no parameter has a string key
            }
        for place, stored_group in enumerate(stored_groups[: len(state["param_groups"])]):
            if isinstance(stored_group, Mapping):
                own = state["param_groups"][place]
                state["param_groups"][place] = {**options_to_load(own, stored_group), "params": own["params"]}
        for key in (state.keys() | stored.keys()) - {"state", "param_groups"}:  # from another library
            if key in stored:
                others = objects_to_load(value, stored[key])
                state[key] = slots_to_load(state.get(key), others, abstract_tensor)
            else:
                del state[key]
        return state

    def unflatten(self, like: torch.optim.Optimizer, state: Any) -> object:
        """Return the state dict, for ``like.load_state_dict``."""
        return _in_own_order(like, state) if numbers_parameters(state) else state

    def restore(self, target: torch.optim.Optimizer, state: Any) -> None:
        """Load the state dict, in the stored dtypes, and keep the tensors that were filled in place.

        PyTorch's ``load_state_dict`` alone would cast the state to the dtypes of the parameters,
        and copy options that are tensors.

        Raises:
            TreeMismatchError: if the optimizer has hooks for loading, and cannot step with the
                state that they return.
        """
        state = with_objects(state)
        if not numbers_parameters(state):
            target.load_state_dict(state)
            return
        state = _in_own_order(target, state)
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
        own_options = [dict(group) for group in target.param_groups]
        target.load_state_dict(state)
        refuse_unmigrated(target)
        for group, own in zip(target.param_groups, own_options, strict=True):
            for name, option in own.items():
                group.setdefault(name, option)
        for parameter, slots in target.state.items():
            loaded = state["state"].get(numbers.get(parameter, parameter))
            if isinstance(slots, dict) and isinstance(loaded, dict):
                slots.update({name: _restore_dtypes(held, loaded.get(name)) for name, held in slots.items()})
        for parameter, name, held in filled:
            loaded = state["state"].get(numbers.get(parameter, parameter))
            if isinstance(loaded, dict) and same_memory(held, loaded.get(name)):
                target.state[parameter][name] = held
        for number, name, held in options:
            if same_memory(held, state["param_groups"][number].get(name)):
                target.param_groups[number][name] = held

    def may_refuse(self, target: torch.optim.Optimizer, request: object) -> bool:
        """Return True if the optimizer has hooks or a loader that is not PyTorch's.

        PyTorch's own loader refuses nothing, because all checks were made before.
        """
        loader = type(target).load_state_dict
        return (
            loader is not torch.optim.Optimizer.load_state_dict
            or bool(getattr(target, "_optimizer_load_state_dict_pre_hooks", None))  # wrappers can have none
            or bool(getattr(target, "_optimizer_load_state_dict_post_hooks", None))
            or not numbers_parameters(target.state_dict())
        )

    def undo(self, target: torch.optim.Optimizer) -> Callable[[], None]:
        """Return a function that restores the current state and options."""
        return OptimizerCopy(target).restore


def numbered_parameters(optimizer: torch.optim.Optimizer, state: Any) -> dict[Any, Any]:
    """Return the number of each parameter in a state dict."""
    return {
        parameter: number
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=False)
        for parameter, number in zip(group["params"], saved["params"], strict=False)
    }


def slots_to_load(own: Any, stored: Any, array: Callable[[AbstractArray], object]) -> Any:
    """Return the request for the state of one parameter.

    The request has the stored structure. It contains the tensors of `own` that have the stored
    shape and dtype, so that the load fills them.

    Args:
        own: current state of the parameter, or None.
        stored: stored state of the parameter, with `AbstractArray` for arrays.
        array: creates the abstract tensor for any other stored array.
    """
    held = {name: slot for name, slot in own.items() if isinstance(slot, torch.Tensor)} if isinstance(own, dict) else {}
    filled = {name: tensor for name, tensor in held.items() if _has_form(tensor, stored, name)}
    # Exclude tensors of `own`: `state_to_load` would make them abstract. This takes time, and some
    # tensor types do not support it.
    others = {name: slot for name, slot in own.items() if name not in held} if held else own
    left = {name: slot for name, slot in stored.items() if name not in filled} if filled else stored
    request = state_to_load(others, left, array=array)
    if not isinstance(request, dict):
        return request
    request.update({name: slot for name, slot in left.items() if isinstance(slot, OptimizerObject)})
    return {name: filled[name] if name in filled else request[name] for name in stored} if filled else request


def _has_form(tensor: torch.Tensor, stored: Any, name: object) -> bool:
    """Return True if a tensor has the shape and dtype of a stored array, so that the load fills it."""
    entry = stored.get(name) if isinstance(stored, Mapping) else None
    if not isinstance(entry, AbstractArray) or tuple(tensor.shape) != entry.shape:
        return False
    encoding = encoding_of(tensor.dtype)
    return encoding.kind == PLAIN_ARRAY and encoding.name == entry.dtype.name


def options_to_load(own: Mapping[str, object], stored: Mapping[str, object]) -> dict[str, Any]:
    """Return the request for the options of a group. See `slots_to_load`."""
    options = {name: option for name, option in stored.items() if name != "params"}
    loadable: dict[str, Any] = slots_to_load(dict(own), options, abstract_tensor)
    return loadable


def parameter_keys(stored_groups: object) -> Iterator[object]:
    """Iterate over the parameter numbers or names in stored groups. Skips invalid groups."""
    if isinstance(stored_groups, list | tuple):
        for group in stored_groups:
            keys = group.get("params") if isinstance(group, Mapping) else None
            if isinstance(keys, list | tuple):
                yield from keys


def numbers_parameters(state: Any) -> bool:
    """Return True if a state dict has the form of `torch.optim.Optimizer.state_dict`."""
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        return False
    groups = state.get("param_groups")
    return isinstance(groups, list) and all(isinstance(key, int) for key in parameter_keys(groups))


def _in_own_order(optimizer: torch.optim.Optimizer, state: Any) -> Any:
    """Return a loaded state dict with the optimizer's order of groups and parameters, and with its parameter names."""
    own = optimizer.state_dict()["param_groups"]
    if not has_parameter_names(state["param_groups"]) or not has_parameter_names(own):
        return state
    groups = in_order_of(state["param_groups"], own, type(optimizer).__name__)
    named = [{**group, "param_names": its["param_names"]} for group, its in zip(groups, own, strict=True)]
    return {**state, "param_groups": named}


def refuse_meta(optimizer: torch.optim.Optimizer) -> None:
    """Raise an error if parameters are on the meta device.

    A load of the model replaces them, but the optimizer would keep and train the old ones.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.is_meta:
                difference = f"a parameter of the {type(optimizer).__name__} is on the meta device"
                raise TreeMismatchError(
                    f"{difference}, so the load of the model replaces it, and the optimizer would keep the old one: "
                    "load the model first, create the optimizer with its new parameters, and load the optimizer then",
                    [difference],
                )


_SHAPED_AS_PARAMETERS: Final = (
    "acc_delta", "ax", "exp_avg", "exp_avg_sq", "exp_inf", "grad_avg", "max_exp_avg_sq", "momentum_buffer", "prev",
    "square_avg", "step_size", "sum", "variance",
)  # fmt: skip

_Shape: TypeAlias = tuple[int, ...]

_SLOT_SHAPES: Final[Mapping[Any, Callable[[_Shape], _Shape]]] = {
    **dict.fromkeys(_SHAPED_AS_PARAMETERS, lambda shape: shape),
    "row_var": lambda shape: (*shape[:-1], 1),
    "col_var": lambda shape: (*shape[:-2], 1, shape[-1]),
}
"""Shapes of the tensors of the optimizers in torch 2.13.0, from the shape of their parameter."""


def with_parameter_shapes(optimizer: torch.optim.Optimizer, parameter: torch.Tensor | None, stored: Any) -> Any:
    """Return the stored state of a parameter, with the shapes that PyTorch's optimizers need for the parameter.

    The core then reports a difference of shapes, or pads or cuts the array if the caller allows
    this for parameters. Stored objects become requests for objects. Tensors that are stored as
    parts become tensors of the optimizer, see `with_composed_slots`.
    """
    stored = with_composed_slots(optimizer, parameter, objects_to_load(optimizer, stored))
    of_torch = any(
        f"{kind.__module__}.".startswith("torch.optim.") and kind is not torch.optim.Optimizer
        for kind in type(optimizer).__mro__
    )
    if parameter is None or not of_torch or not isinstance(stored, Mapping):
        return stored
    shape = tuple(parameter.shape)
    return {
        name: replace(slot, shape=_SLOT_SHAPES[name](shape))
        if name in _SLOT_SHAPES and isinstance(slot, AbstractArray) and slot.shape and shape
        else slot
        for name, slot in stored.items()
    }


_MANY: Final = 1000
"""Minimum number of parameters of a group whose parameter numbers the core stores as one leaf.

The core does not compare the length of this leaf.
"""


def _refuse_other_sizes(optimizer: torch.optim.Optimizer, groups: Sequence[Any], stored_groups: Sequence[Any]) -> None:
    """Raise an error if the number of parameters of a large group differs. The core compares small groups."""
    for number, (group, stored) in enumerate(zip(groups, stored_groups, strict=False)):
        parameters = stored.get("params") if isinstance(stored, Mapping) else None
        own = len(group["params"])
        if isinstance(parameters, list | tuple) and len(parameters) != own and max(len(parameters), own) >= _MANY:
            difference = (
                f"group {number} of the {type(optimizer).__name__} has {own} parameters, {len(parameters)} are stored"
            )
            raise TreeMismatchError(f"{difference}. Create it with the parameters that it had", [difference])


def _refuse_numbers(optimizer: torch.optim.Optimizer, stored: Mapping[Any, Any]) -> None:
    """Raise an error if the stored state numbers the parameters, but the optimizer's state dict does not."""
    if not numbers_parameters(stored):
        return
    difference = (
        f"the stored state numbers the parameters, but the state dict of this {type(optimizer).__name__} does not"
    )
    raise TreeMismatchError(
        f"{difference}; load into the optimizer before torch.distributed.checkpoint patches it, or into an unpatched "
        "optimizer",
        [difference],
    )


def _refuse_names(optimizer: torch.optim.Optimizer, stored_groups: object) -> None:
    first = next((key for key in parameter_keys(stored_groups) if isinstance(key, str)), None)
    if first is None:
        return
    difference = f"the stored state names the parameters ({first!r}), but the optimizer numbers them"
    raise TreeMismatchError(
        f"{difference}; load into ckptcore_torch.named_optimizers.NamedOptimizer(model, optimizer), with the "
        f"{type(optimizer).__name__} as the optimizer",
        [difference],
    )


def _state_factory(parameter: torch.Tensor | None) -> Callable[[AbstractArray], object]:
    """Return a function that creates abstract tensors for the state of a parameter.

    If `parameter` is None, they are plain.
    """
    return abstract_tensor if parameter is None else functools.partial(abstract_state_like, parameter)


def _number_of(key: object, numbers: Collection[int]) -> Any:
    """Convert the number of a parameter from a string, for formats that only have string keys. Keep other keys."""
    if isinstance(key, str) and key.isascii() and key.isdecimal() and str(int(key)) == key and int(key) in numbers:
        return int(key)
    return key


def _restore_dtypes(cast: Any, loaded: Any) -> Any:
    """Return a value that PyTorch may have cast, with every tensor in its loaded dtype."""
    if isinstance(cast, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return cast if cast.dtype == loaded.dtype else loaded.to(cast.device)
    if isinstance(cast, dict) and isinstance(loaded, dict):
        cast.update({name: _restore_dtypes(child, loaded.get(name)) for name, child in cast.items()})
    elif type(cast) in (list, tuple) and type(loaded) is type(cast) and len(loaded) == len(cast):
        return type(cast)([_restore_dtypes(child, its) for child, its in zip(cast, loaded, strict=True)])
    return cast
