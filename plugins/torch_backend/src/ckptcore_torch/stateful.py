"""Objects of PyTorch that have a state: modules, optimizers, schedulers, gradient scalers, random generators."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import torch

from ckptcore.errors import TreeMismatchError
from ckptcore.handlers import state_to_load
from ckptcore.model import PLAIN_ARRAY, AbstractArray
from ckptcore.protocols import CheckpointableHandler, Priority
from ckptcore_torch.dtypes import encoding_of_stored
from ckptcore_torch.tensors import is_uninitialized, same_memory

__all__ = ["GeneratorHandler", "ModuleHandler", "OptimizerHandler", "StateDictHandler", "handler_of_type"]


class ModuleHandler:
    """`torch.nn.Module`: its state dict, with every name of a tied weight, and buffers that are persistent.

    ``load(location, module)`` gives a state dict of the structure of the module's own; ``load_into`` fills the module.
    """

    priority = Priority.FRAMEWORK

    def flatten(self, value: torch.nn.Module) -> object:
        """The state dict; its tensors are views of the module's own."""
        return value.state_dict()

    def flatten_to_load(self, value: torch.nn.Module, stored: object) -> object:
        """The state dict; a parameter of a lazy module, which has no shape yet, is asked for as it is stored."""
        state = value.state_dict()
        if isinstance(stored, Mapping):
            for name, held in state.items():
                if is_uninitialized(held) and isinstance(stored.get(name), AbstractArray):
                    state[name] = _abstract_tensor(stored[name])
        return state

    def unflatten(self, like: torch.nn.Module, state: object) -> object:
        """The state dict itself, for ``like.load_state_dict``."""
        return state

    def restore(self, target: torch.nn.Module, state: Any) -> None:
        """Load what was not filled in place already. Parameters stay the same objects, but for those on the meta device:

        they are replaced by ones with elements, tied ones by one.

        Raises:
            TreeMismatchError: if a name is missing, or one too many.
        """
        own = target.state_dict()
        if own.keys() != state.keys():
            differences = [
                *(f"{name} is missing" for name in own.keys() - state.keys()),
                *(f"{name} is not in the module" for name in state.keys() - own.keys()),
            ]
            raise TreeMismatchError(
                f"the loaded state does not fit the {type(target).__qualname__}: {'; '.join(sorted(differences)[:20])}; "
                "make the module as it was when it was saved",
                sorted(differences),
            )
        lacking = [name for name, held in own.items() if _is_meta(held)]
        if lacking:
            ties = _ties_on_meta(target)
            target.load_state_dict({name: state[name] for name in lacking}, strict=False, assign=True)
            _tie(target, ties, set(lacking))
            own = target.state_dict()
        in_place = all(same_memory(held, state[name]) for name, held in own.items())
        if not in_place or _takes_part_in_loading(target):
            target.load_state_dict(state)


class StateDictHandler:
    """Objects with `state_dict` and `load_state_dict`: learning rate schedulers, gradient scalers.

    What is loaded has the structure that was saved: the state may grow, and hold None before the first step.
    """

    priority = Priority.FRAMEWORK

    def flatten(self, value: Any) -> object:
        """The state dict."""
        return value.state_dict()

    def flatten_to_load(self, value: Any, stored: object) -> object:
        """What is stored, with the types of what `value` has at the same places, and tensors where it has nothing."""
        return state_to_load(value.state_dict(), stored, array=_abstract_tensor)

    def unflatten(self, like: Any, state: object) -> object:
        """The state dict itself, for ``like.load_state_dict``."""
        return state

    def restore(self, target: Any, state: object) -> None:
        """Load the state dict."""
        target.load_state_dict(state)


class OptimizerHandler(StateDictHandler):
    """`torch.optim.Optimizer`: its state dict, which numbers the parameters.

    ``load(location, optimizer)`` gives a state dict; ``load_into`` fills the optimizer, also a new one that made no step
    and has no state yet, and takes the state from one that was saved without. Nothing is cast: moments of float32 stay so,
    also where the parameters are of bfloat16.
    """

    def flatten_to_load(self, value: torch.optim.Optimizer, stored: object) -> object:
        """The state dict, with the state of each parameter as it is stored, and the options that are not there yet."""
        state = value.state_dict()
        if not isinstance(stored, Mapping):
            return state
        numbers = {number for group in state["param_groups"] for number in group["params"]}
        stored_state = stored.get("state")
        if isinstance(stored_state, Mapping):
            by_number = {_number_of(key, numbers): slots for key, slots in stored_state.items()}
            state["state"] = {
                number: _to_fill(state["state"].get(number), slots)
                for number, slots in by_number.items()
                if number in numbers or not isinstance(number, int)  # what is no parameter's has a name
            }
        for group, stored_group in zip(state["param_groups"], stored.get("param_groups") or (), strict=False):
            group.update(_to_fill(group, {name: option for name, option in stored_group.items() if name != "params"}))
        return state

    def restore(self, target: torch.optim.Optimizer, state: Any) -> None:
        """Load the state dict. The state keeps the dtypes in which it was saved; tensors that were filled in place stay.

        Left to itself, an optimizer casts its state to the dtypes of the parameters and copies its tensor options.
        """
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
        numbers = _numbers(target, state)
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


class GeneratorHandler:
    """`torch.Generator`: the state of its random numbers, which differ from process to process."""

    priority = Priority.FRAMEWORK
    per_process = True

    def flatten(self, value: torch.Generator) -> object:
        """The state as a tensor of bytes, a copy."""
        return {"state": value.get_state()}

    def unflatten(self, like: torch.Generator, state: object) -> object:
        """The state itself."""
        return state

    def restore(self, target: torch.Generator, state: Any) -> None:
        """Set the state."""
        target.set_state(state["state"])


_MODULES: Final = ModuleHandler()
_OPTIMIZERS: Final = OptimizerHandler()
_STATE_DICTS: Final = StateDictHandler()
_GENERATORS: Final = GeneratorHandler()


def handler_of_type(value_type: type) -> CheckpointableHandler | None:
    """The handler for objects of a type; None for types that are not PyTorch's."""
    if issubclass(value_type, torch.nn.Module):
        # A model of Keras holds its optimizer too, which its state dict leaves out and its state tree has.
        return None if hasattr(value_type, "set_state_tree") and hasattr(value_type, "get_state_tree") else _MODULES
    if issubclass(value_type, torch.optim.Optimizer):
        return _OPTIMIZERS
    if issubclass(value_type, torch.optim.lr_scheduler.LRScheduler | torch.amp.GradScaler):
        return _STATE_DICTS
    if issubclass(value_type, torch.Generator):
        return _GENERATORS
    return None


def _number_of(key: object, numbers: Collection[int]) -> object:
    """The number of a parameter, also from a checkpoint whose format knows keys of text only; any other key as it is."""
    if isinstance(key, str) and key.isascii() and key.isdecimal() and str(int(key)) == key and int(key) in numbers:
        return int(key)
    return key


def _is_meta(held: object) -> bool:
    return isinstance(held, torch.Tensor) and not is_uninitialized(held) and held.is_meta


def _abstract_tensor(stored: AbstractArray) -> object:
    encoding = encoding_of_stored(stored.dtype.name, PLAIN_ARRAY)
    return stored if encoding is None else torch.empty(stored.shape, dtype=encoding.dtype, device="meta")


def _to_fill(own: Any, stored: Any) -> Any:
    """What is stored, with those tensors of the optimizer itself that can be filled in place."""
    asked = state_to_load(own, stored, array=_abstract_tensor)
    if isinstance(asked, dict) and isinstance(own, dict):
        for name, held in own.items():
            other = asked.get(name)
            if not isinstance(held, torch.Tensor) or not isinstance(other, torch.Tensor):
                continue
            if held.shape == other.shape and held.dtype == other.dtype:
                asked[name] = held
    return asked


def _uncast(held: object, given: object) -> object:
    """What was loaded into an optimizer, in the dtype in which it was given."""
    if type(held) is not torch.Tensor or type(given) is not torch.Tensor or held.dtype == given.dtype:
        return held
    return given.to(held.device)


def _ties_on_meta(module: torch.nn.Module) -> list[list[str]]:
    """The names of each Parameter or buffer on the meta device that has several."""
    names: dict[int, list[str]] = {}
    for named in (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)):
        for name, tensor in named:
            if tensor.is_meta:
                names.setdefault(id(tensor), []).append(name)
    return [tied for tied in names.values() if len(tied) > 1]


def _takes_part_in_loading(module: torch.nn.Module) -> bool:
    """Whether a module, or one in it, does more on loading than to copy tensors: it has hooks, or overrides the methods."""
    base = torch.nn.Module
    return any(
        part._load_state_dict_pre_hooks
        or part._load_state_dict_post_hooks
        or type(part).load_state_dict is not base.load_state_dict
        or type(part)._load_from_state_dict is not base._load_from_state_dict
        or type(part).set_extra_state is not base.set_extra_state
        for part in module.modules()
    )


def _tie(module: torch.nn.Module, ties: list[list[str]], loaded: set[str]) -> None:
    """Let every name of a tied tensor have the one that was loaded; ties of which nothing was loaded stay as they are."""
    for names in ties:
        source = next((name for name in names if name in loaded), None)
        if source is None:
            continue
        owner, _, attribute = source.rpartition(".")
        tensor = getattr(module.get_submodule(owner), attribute)
        for other in names:
            owner, _, attribute = other.rpartition(".")
            setattr(module.get_submodule(owner), attribute, tensor)


def _numbers(optimizer: torch.optim.Optimizer, state: Any) -> dict[Any, Any]:
    """For each parameter its number in a state dict."""
    return {
        parameter: number
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=False)
        for parameter, number in zip(group["params"], saved["params"], strict=False)
    }
